"""Control of token prices by a constraint on success, instead of a coefficient.

Token prices of a batch are multiplied by a factor in 0..1. It grows while the average success rate
stays within a tolerance of the best average so far, and falls when it does not.
"""

from collections.abc import Mapping
from dataclasses import dataclass

AVERAGE_SHARE = 0.1  # weight of a new batch in the average success rate
STEP = 0.1  # largest growth of the factor per batch
MAX_FALL = 3.0  # the factor falls at most this many times STEP per batch
FORGETTING = 0.02  # share of the tolerance by which the best average falls per batch


@dataclass(slots=True)
class PriceController:
    """Factor of all token prices, adapted to the success rate of the batches (dual ascent).

    ``tolerance`` is in points of success (1 point is 0.01); None keeps the factor at 1. The margin
    is ``(average - best + tolerance) / tolerance``. Per batch the factor grows by ``STEP`` times
    that.

        tolerance 2: average 0.50, best 0.51: margin 0.5, the factor grows by 0.05
                     average 0.47, best 0.51: margin -1,  the factor falls by 0.1
    """

    tolerance: float | None = None
    multiplier: float = 1.0
    average: float | None = None
    best: float = 0.0

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            self.multiplier = 0.0

    def update(self, success_rate: float) -> None:
        """Adapt ``multiplier`` to the ``success_rate`` (0..1) of one more batch."""
        if self.tolerance is None:
            return
        if self.average is None:
            self.average = self.best = success_rate
        self.average += AVERAGE_SHARE * (success_rate - self.average)
        tolerance = self.tolerance / 100
        # The largest of many noisy averages is too high. Forgetting it slowly corrects that.
        self.best = max(self.average, self.best - FORGETTING * tolerance)
        margin = max((self.average - self.best + tolerance) / tolerance, -MAX_FALL)
        self.multiplier = min(max(self.multiplier + STEP * margin, 0.0), 1.0)

    def state(self) -> dict[str, float | None]:
        """Return the state for a checkpoint."""
        return {"multiplier": self.multiplier, "average": self.average, "best": self.best}

    def resume(self, state: Mapping[str, float | None]) -> None:
        """Restore ``state``. Without a tolerance, or for an empty state, nothing changes."""
        if self.tolerance is not None and state:
            self.multiplier = float(state["multiplier"] or 0.0)
            self.average = state["average"]
            self.best = float(state["best"] or 0.0)
