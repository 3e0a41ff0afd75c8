"""Adapt the prices of thought tokens, which lower the advantage, so that success does not fall.

All prices of a batch are multiplied by a factor from 0 to 1. It grows while the average success
rate is within a tolerance of the best average so far, and falls otherwise.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from verl.utils.saved_state import is_not_negative, read_state_value

BATCH_WEIGHT = 0.1  # weight of a new batch in the moving average of the success rate
MAX_GROWTH = 0.1  # largest increase of the price factor per batch
MAX_FALL_RATIO = 3.0  # largest decrease of the price factor per batch, as a multiple of MAX_GROWTH
# Amount by which the best average success rate falls in each batch, as a fraction of ``tolerance``.
BEST_DECAY = 0.02


@dataclass(slots=True)
class PriceController:
    """Factor of the prices of thought tokens, adapted to the success rate (dual ascent).

    A price lowers the advantage of a long thought. All prices are multiplied by ``multiplier``.
    ``tolerance`` is the accepted fall of the success rate in percentage points (1 is 0.01). None
    keeps ``multiplier`` at 1, otherwise it starts at 0 and stays within 0 to 1. Each batch adds
    ``MAX_GROWTH * margin``. The margin is
    ``(average_success - best_success + tolerance) / tolerance``, at least -3.

        tolerance 2: average 0.50, best 0.51: margin 0.5, the factor grows by 0.05
                     average 0.47, best 0.51: margin -1,  the factor falls by 0.1
    """

    tolerance: float | None = None
    multiplier: float = 1.0
    average_success: float | None = None
    best_success: float = 0.0

    def __post_init__(self) -> None:
        if self.tolerance is not None:
            self.multiplier = 0.0

    def update(self, success_rate: float) -> None:
        """Adapt ``multiplier`` to the ``success_rate`` (0..1) of a new batch."""
        if self.tolerance is None:
            return
        if self.average_success is None:
            self.average_success = self.best_success = success_rate
        self.average_success += BATCH_WEIGHT * (success_rate - self.average_success)
        tolerance = self.tolerance / 100
        # The maximum of many noisy averages is too high, so the best average decreases slowly.
        self.best_success = max(self.average_success, self.best_success - BEST_DECAY * tolerance)
        margin = max(
            (self.average_success - self.best_success + tolerance) / tolerance, -MAX_FALL_RATIO
        )
        self.multiplier = min(max(self.multiplier + MAX_GROWTH * margin, 0.0), 1.0)

    def state(self) -> dict[str, float | None]:
        """Return the price factor and the averages of the success rate, for a checkpoint."""
        return {
            "multiplier": self.multiplier,
            "average": self.average_success,
            "best": self.best_success,
        }

    def resume(self, state: Mapping[str, object]) -> None:
        """Restore the controller from ``state``, which a checkpoint contains.

        Do nothing if no loss of success is limited: prices are then constant. Do nothing either if
        ``state`` has no average, as in a run without this limit: the factor then starts at 0.
        Raises ``InvalidState`` for invalid values.
        """
        multiplier, average, best = (
            read_state_value(state, key, _is_valid, "null, or a number of at least 0", None)
            for key in ("multiplier", "average", "best")
        )
        if self.tolerance is not None and average is not None:
            self.multiplier = min(float(multiplier or 0.0), 1.0)
            self.average_success = average
            self.best_success = float(best or 0.0)


def _is_valid(value: object) -> bool:
    return value is None or is_not_negative(value)
