"""Counter-based seeds: a random number depends on its purpose and index, not on earlier draws."""

import contextlib
import hashlib
import json
import os
import random
from collections.abc import Iterator

import numpy as np


def derive_seed(*parts: int | str | float | bool | np.integer | None) -> int:
    """Return a seed in [0, 2**63) that depends only on ``parts`` and is equal on every machine.

    ``1`` and ``"1"`` give different seeds, and so do ``("ab", "c")`` and ``("a", "bc")``. Use
    ``seed & 0x7FFFFFFF`` where 32 bits are needed. Raises ``TypeError`` for a part that is neither
    a number, a text, a truth value nor None.
    """
    for part in parts:
        if not (part is None or isinstance(part, (int, str, float, bool, np.integer))):
            raise TypeError(
                f"derive_seed: a part is a {type(part).__name__}; allowed: int, str, float, bool, "
                "None"
            )
    plain_parts = [int(part) if isinstance(part, np.integer) else part for part in parts]
    # Do not use hash(): for text its result differs between processes.
    digest = hashlib.blake2b(json.dumps(plain_parts).encode("utf-8"), digest_size=8).digest()
    # Use 63 bits, because torch and numpy accept signed 64-bit integers.
    return int.from_bytes(digest, "big") >> 1


@contextlib.contextmanager
def preserve_random_state() -> Iterator[None]:
    """Restore the state of Python's global random generator after the ``with`` block."""
    random_state = random.getstate()
    try:
        yield
    finally:
        random.setstate(random_state)


def seed_everything(seed: int) -> None:
    """Seed Python, numpy and torch (all devices); set ``PYTHONHASHSEED`` for child processes."""
    import torch  # imported here: environment processes derive seeds without torch

    os.environ["PYTHONHASHSEED"] = str(seed & 0x7FFFFFFF)
    random.seed(seed)
    np.random.seed(seed & 0x7FFFFFFF)
    torch.manual_seed(seed)  # seeds the CPU and every accelerator
