"""Whether weights that were sent to an engine are in it."""

from collections.abc import Iterator, Mapping
from typing import TypeAlias

import numpy as np
import torch

from verl.utils.fingerprint import fingerprint
from verl.workers.rollout.base import EngineError, Weights

SHOWN = 3  # names in a message
READABLE = (torch.float32, torch.bfloat16, torch.float16)
Values: TypeAlias = np.ndarray | torch.Tensor


class Arrival:
    """Notes weights on their way into an engine, or into share ``share`` of the ``shares`` that an
    engine on several devices cuts them into.

    ``held`` are those that the engine lets be read, before they change. ``taken`` maps the name of
    each weight that the engine took to its fingerprint.
    """

    def __init__(self, held: Mapping[str, torch.Tensor], share: int = 0, shares: int = 1) -> None:
        self._held = held
        self._share = share
        self._shares = shares
        self._expected: dict[str, int] = {}
        self.taken: dict[str, int] = {}

    def through(self, weights: Weights) -> Iterator[tuple[str, Values]]:
        """``weights``, each of them noted when it is asked for."""
        for name, value in weights:
            self.taken[name] = fingerprint(value)
            place = self._held.get(name)
            # What is quantised has a type that a cast alone does not lead to.
            if place is not None and place.dtype in READABLE:
                own = self._own(value, place.shape)
                if own is not None:
                    self._expected[name] = fingerprint(own, place.dtype)
            yield name, value

    def _own(self, value: Values, shape: torch.Size) -> Values | None:
        """What of ``value`` is kept here in ``shape``; None where it is fused, repacked, or cut in
        another way than by its columns.
        """
        if value.shape == shape:
            return value
        # Rows of what is fused are cut in an order of the engine's own; columns never are.
        if len(shape) != 2 or value.shape != (shape[0], shape[1] * self._shares):
            return None
        start = self._share * shape[1]
        return value[:, start : start + shape[1]]

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
