"""What the threads of this process wait for, in words: the watchdog reads it."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

_open: dict[int, list[str]] = {}


@contextmanager
def waiting_for(labels: Iterable[str]) -> Iterator[list[str]]:
    """A block that waits for what ``labels`` name; it takes from the list what has come."""
    left = list(labels)
    _open[id(left)] = left
    try:
        yield left
    finally:
        del _open[id(left)]


def awaited() -> list[str]:
    """All that is waited for now, the longest wait first, each thing once."""
    return list(dict.fromkeys(label for left in list(_open.values()) for label in list(left)))
