"""Checks of the values that a user's score function returned: numbers, flags, weighted rewards."""

import numbers
from collections.abc import Mapping
from typing import Any

# Largest float32: scores are stored in this type.
MAX_FLOAT32 = 3.4028234663852886e38
ROUNDING_TOLERANCE = 1e-6  # a sum of rewards that is this much below 1 counts as 1


def read_finite_number(score: object, source: str) -> float:
    """Return ``score``, a Python number or a scalar of numpy or torch, as a float.

    ``source`` names the origin in error messages. Raises ``TypeError`` for another type, and
    ``ValueError`` for a number that float32 cannot represent.
    """
    score = _to_number(score)
    if not isinstance(score, numbers.Real):
        raise TypeError(f"{source}: it returned a {type(score).__name__}, not a number")
    try:
        value = float(score)
    except OverflowError:  # an integer beyond float64
        value = float("inf")
    # ``not <=`` also refuses NaN, which ``>`` would accept.
    if not abs(value) <= MAX_FLOAT32:
        raise ValueError(f"{source}: it returned {score}, not a finite number")
    return value


def read_finite_numbers(scores: Mapping[str, Any], source: str) -> dict[str, float]:
    """Return ``scores`` with each value converted by ``read_finite_number``."""
    return {
        name: read_finite_number(score, f"{source}, {name!r}") for name, score in scores.items()
    }


def is_full_score(score: float) -> bool:
    """Return True if ``score`` is at least 1, the full score, within a rounding error of 1e-6.

    >>> is_full_score(0.7 + 0.2 + 0.1), is_full_score(0.999)
    (True, False)
    """
    return score >= 1.0 - ROUNDING_TOLERANCE


def read_flag(value: object, source: str) -> bool:
    """Return ``value``, a bool, 0 or 1 (also as a scalar of numpy or torch), as a bool.

    Raises ``ValueError`` for other values, because ``bool("False")`` and ``bool(0.3)`` are True.
    """
    plain_number = _to_number(value)
    if isinstance(plain_number, numbers.Real) and plain_number in (0, 1):
        return bool(plain_number)
    raise ValueError(
        f"{source}: the value is {str(value)[:80]!r} ({type(value).__name__}); allowed: true, "
        "false, 0, 1; fix: return a bool, and a fraction under another name"
    )


def is_number(value: object) -> bool:
    """Return True if ``value`` is a number or a scalar of numpy or torch."""
    return isinstance(_to_number(value), numbers.Real)


def compute_weighted_sum(
    rewards: Mapping[str, float], weights: Mapping[str, float], source: str
) -> float:
    """Return the sum of the rewards ``rewards`` times their ``weights``.

    A reward without a weight is ignored. Raises ``ValueError`` for a weight without a reward.
    """
    missing_names = [name for name in weights if name not in rewards]
    if missing_names:
        available_names = ", ".join(sorted(rewards)) or "none"
        raise ValueError(
            f"{source}: reward_model.weights names {missing_names[0]!r}, which it did not return; "
            f"allowed: {available_names}; fix: name one of them, or return it"
        )
    return sum(weight * rewards[name] for name, weight in weights.items())


def _to_number(value: Any) -> Any:
    """Return the Python number of a scalar of numpy or torch; other values unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
