"""What a grader returned, read as numbers: one score, or several rewards that weights join."""

import numbers
from collections.abc import Mapping
from typing import Any

# Scores become float32; what is larger would be infinite there.
LARGEST = 3.4028234663852886e38
ROUNDING = 1e-6  # by which a sum of rewards may miss 1 and is full


def finite(score: Any, who: str) -> float:
    """The number that ``who`` returned, a Python one or a scalar of numpy or torch.

    Raises ``TypeError`` for what is no number, ``ValueError`` for one that float32 cannot hold.
    """
    score = _plain(score)
    if not isinstance(score, numbers.Real):
        raise TypeError(f"{who}: it returned a {type(score).__name__}, not a number")
    try:
        value = float(score)
    except OverflowError:  # an integer beyond float64
        value = float("inf")
    # Not ``>``: NaN compares false with everything and must be refused too.
    if not abs(value) <= LARGEST:
        raise ValueError(f"{who}: it returned {score}, not a finite number")
    return value


def is_full(score: float) -> bool:
    """Say that ``score`` is 1 or more, but for the rounding of a sum.

    >>> is_full(0.7 + 0.2 + 0.1), is_full(0.999)
    (True, False)
    """
    return score >= 1.0 - ROUNDING


def read_flag(value: Any, who: str) -> bool:
    """The truth value that ``who`` returned: a bool, 0 or 1, also of numpy or torch.

    Raises ``ValueError`` for anything else: ``bool("False")`` would be true, and a share is no
    truth value.
    """
    plain = _plain(value)
    if isinstance(plain, numbers.Real) and plain in (0, 1):
        return bool(plain)
    raise ValueError(
        f"{who}: it is {str(value)[:80]!r} ({type(value).__name__}); allowed: true, false, 0, 1; "
        "fix: return a bool, and a share under another name"
    )


def is_number(value: Any) -> bool:
    """Whether ``value`` is meant as a number: everything else in a dictionary is a remark."""
    return isinstance(_plain(value), numbers.Real)


def weighed(parts: Mapping[str, float], weights: Mapping[str, float], who: str) -> float:
    """The rewards ``parts`` times their ``weights``, summed; rewards without a weight count for
    nothing.

    Raises ``ValueError`` for a weight of a reward that ``who`` did not return.
    """
    absent = [name for name in weights if name not in parts]
    if absent:
        there = ", ".join(sorted(parts)) or "none"
        raise ValueError(
            f"{who}: reward_model.weights names {absent[0]!r}, which it did not return; allowed: "
            f"{there}; fix: name one of them, or return it"
        )
    return sum(weight * parts[name] for name, weight in weights.items())


def _plain(value: Any) -> Any:
    """The number in a scalar of numpy or torch; anything else as it is."""
    return value.item() if getattr(value, "ndim", None) == 0 else value
