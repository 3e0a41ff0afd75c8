"""Groups: rows with the same uid, which have the same task and start state."""

from collections.abc import Sequence


class GroupMismatch(RuntimeError):
    """Error for a group whose members have different start states, so that their returns cannot be
    compared.
    """


def assert_same_start(uids: Sequence[str], starts: Sequence[tuple[str, str] | None]) -> None:
    """Raise ``GroupMismatch`` unless rows with the same uid have the same start.

    ``starts`` contains (text, state) of the first observation of each row. It is None for a row
    whose reset failed; such a row is not compared.
    """
    start_by_uid: dict[str, tuple[str, str]] = {}
    for uid, start in zip(uids, starts, strict=True):
        if start is None:
            continue
        # Comparing with the first member is enough: equality is transitive.
        expected = start_by_uid.setdefault(uid, start)
        if expected != start:
            raise GroupMismatch(
                f"members of group {uid} started from different states: {expected[0][:200]!r} and "
                f"{start[0][:200]!r}; fix: make reset depend on task and seed only"
            )
