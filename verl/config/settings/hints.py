"""The nearest right name for a wrong one, as every error message says it."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """The one of ``known`` that ``name`` resembles most; None below ``cutoff`` (0: anything, 1:
    equal). Of two that are as near, the one with the same letters, then the one that begins alike.
    """
    names = list(known)
    found = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=cutoff)
    likeness = difflib.SequenceMatcher(b=name)

    def nearness(candidate: str) -> tuple[float, bool, bool]:
        likeness.set_seq1(candidate)
        return likeness.ratio(), sorted(candidate) == sorted(name), candidate[:1] == name[:1]

    return max(found, key=nearness, default=None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """``"; did you mean 'right'?"``, or the empty string where nothing is near."""
    found = nearest_name(name, known, cutoff)
    return f"; did you mean {found!r}?" if found else ""
