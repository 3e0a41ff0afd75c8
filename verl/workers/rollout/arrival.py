"""Whether weights that were sent to an engine are in it."""

from collections.abc import Iterator, Mapping

import numpy as np
import torch

from verl.utils.fingerprint import fingerprint
from verl.workers.rollout.base import EngineError, Weights

SHOWN = 3  # names in a message
READABLE = (torch.float32, torch.bfloat16, torch.float16)


class Arrival:
    """Weights on their way into an engine, which iterates over them.

    ``held`` are those that the engine lets be read, before they change. ``taken`` maps the name of
    each weight that the engine took to its fingerprint.
    """

    def __init__(self, weights: Weights, held: Mapping[str, torch.Tensor]) -> None:
        self._weights = weights
        self._held = held
        self._expected: dict[str, int] = {}
        self.taken: dict[str, int] = {}

    def __iter__(self) -> Iterator[tuple[str, np.ndarray | torch.Tensor]]:
        for name, value in self._weights:
            self.taken[name] = fingerprint(value)
            place = self._held.get(name)
            # What an engine keeps fused or repacked has another shape, what is quantised a type
            # that a cast alone does not lead to.
            if place is not None and place.shape == value.shape and place.dtype in READABLE:
                self._expected[name] = fingerprint(value, place.dtype)
            yield name, value

    def check(self, held: Mapping[str, torch.Tensor]) -> int:
        """How many weights could be read back from ``held``, what the engine has now.

        Raises ``EngineError`` where one is not what was taken.
        """
        readable = [name for name in self._expected if name in held]
        stale = [name for name in readable if fingerprint(held[name]) != self._expected[name]]
        if stale:
            raise EngineError(
                f"the engine took new weights, but {len(stale)} of {len(readable)} that can be "
                f"read back are not the new ones: {', '.join(stale[:SHOWN])}"
            )
        return len(readable)
