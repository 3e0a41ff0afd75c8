"""Counter-based seeds: what is drawn depends on what it is for, not on what was drawn before."""

import hashlib
import json
import os
import random

import numpy as np


def derive_seed(*parts: int | str | float | bool | np.integer | None) -> int:
    """A seed in [0, 2**63) that depends on ``parts`` alone: same parts, same seed, on every
    machine.

    Types count: ``derive_seed(1)`` and ``derive_seed("1")`` differ, as do ``("ab", "c")`` and
    ``("a", "bc")``. Use ``seed & 0x7FFFFFFF`` where 32 bits are asked for. Raises ``TypeError`` for
    a part that is not a plain value.
    """
    for part in parts:
        if not (part is None or isinstance(part, (int, str, float, bool, np.integer))):
            raise TypeError(
                f"derive_seed: {type(part).__name__} is not an int, str, float, bool or None"
            )
    # json would refuse numpy's integers; they mean the same as Python's.
    plain = [int(part) if isinstance(part, np.integer) else part for part in parts]
    # Not hash(), which differs from process to process for text.
    digest = hashlib.blake2b(json.dumps(plain).encode("utf-8"), digest_size=8).digest()
    # 63 bits: signed 64-bit integers are what torch and numpy take.
    return int.from_bytes(digest, "big") >> 1


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices) of this process; also ``PYTHONHASHSEED`` for its
    children.
    """
    import torch  # here, so that environment processes can derive seeds without loading torch

    os.environ["PYTHONHASHSEED"] = str(seed & 0x7FFFFFFF)
    random.seed(seed)
    np.random.seed(seed & 0x7FFFFFFF)
    torch.manual_seed(seed)  # seeds the CPU and every accelerator
