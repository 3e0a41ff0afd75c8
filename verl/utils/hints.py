"""The nearest right name for a wrong one, as every error message says it."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``name`` resembles most; None below ``cutoff`` (0: anything, 1:
    equal).
    """
    found = difflib.get_close_matches(name, list(known), n=1, cutoff=cutoff)
    return found[0] if found else None


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'right'?"``, or the empty string where nothing is near."""
    found = nearest_name(name, known, cutoff)
    return f"; did you mean {found!r}?" if found else ""
