"""Groups: members with one uid play the same task from the same start."""

from collections.abc import Sequence


class GroupMismatch(RuntimeError):
    """Two members of a group started from different states: their returns cannot be compared."""


def assert_same_start(uids: Sequence[str], starts: Sequence[tuple[str, str] | None]) -> None:
    """Raise ``GroupMismatch`` unless rows with the same uid had the same start: text and state of
    the observation.

    ``None`` stands for a member whose reset failed; it is not compared.
    """
    first: dict[str, tuple[str, str]] = {}
    for uid, start in zip(uids, starts, strict=True):
        if start is None:
            continue
        # Against the first member: equality is transitive, so that no pairs are needed.
        expected = first.setdefault(uid, start)
        if expected != start:
            raise GroupMismatch(
                f"members of group {uid} started from different states: {expected[0][:200]!r} and "
                f"{start[0][:200]!r}; the environment's reset must depend on task and seed alone"
            )
