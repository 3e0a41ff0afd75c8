"""Coefficients that adapt to measurements: of the KL term and of the prices of thought tokens."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from verl.utils.saved_state import is_not_negative, read_state_value


@runtime_checkable
class KLController(Protocol):
    """KL coefficient ``value`` that may adapt to the measured divergence."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...


class FixedKLController:
    """KL coefficient with the constant value ``kl_coef``."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing: the coefficient is constant."""


class AdaptiveKLController:
    """KL coefficient that moves the measured KL towards ``target_kl`` (Ziegler et al., 2019).

    ``value *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon`` (section 2.2), where
    ``n_steps / horizon`` is at most 1, so that ``value`` never becomes negative.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"target_kl and horizon must be positive, got {target_kl} and {horizon}"
            )
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the mean KL ``current_kl`` (nats) measured over ``n_steps`` samples."""
        # Clip the relative error, so that one unusual batch does not change the coefficient much.
        relative_error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + relative_error * min(n_steps / self.horizon, 1.0)


def get_kl_controller(
    type: str, kl_coef: float, horizon: float = 10000, target_kl: float = 0.1
) -> KLController:
    """Create the KL controller ``type`` (``fixed`` or ``adaptive``) of ``algorithm.kl_ctrl``."""
    if type == "fixed":
        return FixedKLController(kl_coef)
    return AdaptiveKLController(kl_coef, target_kl, horizon)


# ---- prices of thought tokens --------------------------------------------------------------------

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
        """Return the state of the controller for a checkpoint."""
        return {
            "multiplier": self.multiplier,
            "average": self.average_success,
            "best": self.best_success,
        }

    def resume(self, state: Mapping[str, object]) -> None:
        """Restore the controller from ``state``, which a checkpoint contains.

        Do nothing if ``tolerance`` is None: prices are then constant. Do nothing either if
        ``state`` has no average, because its run had no ``tolerance``. The factor then starts at 0.
        Raises ``InvalidStateError`` for invalid values.
        """
        multiplier, average, best = (
            read_state_value(
                state, key, _is_none_or_nonnegative, "null, or a number of at least 0", None
            )
            for key in ("multiplier", "average", "best")
        )
        if self.tolerance is not None and average is not None:
            self.multiplier = min(float(multiplier or 0.0), 1.0)
            self.average_success = average
            self.best_success = float(best or 0.0)


def _is_none_or_nonnegative(value: object) -> bool:
    return value is None or is_not_negative(value)
