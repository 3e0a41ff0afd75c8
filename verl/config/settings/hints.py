"""Suggestions in error messages: the valid name that is most similar to a wrong one."""

import difflib
from collections.abc import Iterable


def nearest_name(name: str, known: Iterable[str], cutoff: float = 0.6) -> str | None:
    """Return the name in ``known`` that is most similar to ``name``.

    None if no similarity reaches ``cutoff`` (0: anything matches, 1: only an equal name). Among
    equally similar names, one with the same letters in another order is preferred, then one with
    the same first letter.
    """
    names = list(known)
    matches = difflib.get_close_matches(name, names, n=len(names) or 1, cutoff=cutoff)
    matcher = difflib.SequenceMatcher(b=name)

    def rank_candidate(candidate: str) -> tuple[float, bool, bool]:
        matcher.set_seq1(candidate)
        return matcher.ratio(), sorted(candidate) == sorted(name), candidate[:1] == name[:1]

    return max(matches, key=rank_candidate, default=None)


def did_you_mean(name: str, known: Iterable[str], cutoff: float = 0.6) -> str:
    """Return ``"; did you mean 'right'?"``, or the empty string if no name is similar."""
    match = nearest_name(name, known, cutoff)
    return f"; did you mean {match!r}?" if match else ""
