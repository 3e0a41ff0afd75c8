"""Groups: rows with the same uid, which have the same task and start state."""

from collections.abc import Sequence


class GroupMismatch(RuntimeError):
    """Different start states in one group. The returns of its members cannot be compared."""


def assert_same_start(uids: Sequence[str], starts: Sequence[tuple[str, str] | None]) -> None:
    """Raise ``GroupMismatch`` unless rows with the same uid have the same start.

    A start is the text and the state of the first observation. ``None`` is a member whose reset
    failed; it is not compared.
    """
    first: dict[str, tuple[str, str]] = {}
    for uid, start in zip(uids, starts, strict=True):
        if start is None:
            continue
        # Comparing with the first member is enough: equality is transitive.
        expected = first.setdefault(uid, start)
        if expected != start:
            raise GroupMismatch(
                f"members of group {uid} started from different states: {expected[0][:200]!r} and "
                f"{start[0][:200]!r}; fix: make reset depend on task and seed only"
            )
