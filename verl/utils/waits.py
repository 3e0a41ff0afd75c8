"""What the threads of this process wait for, in words: the watchdog reads it."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)
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


@contextmanager
def logged_wait(what: str, quiet_s: float) -> Iterator[None]:
    """A block before there is a watchdog: the log says that ``what`` is waited for after
    ``quiet_s``, then after twice as many seconds.
    """
    over = threading.Event()
    began = time.monotonic()

    def tell() -> None:
        due = quiet_s
        while not over.wait(began + due - time.monotonic()):
            logger.info("waiting for %s since %.0f s", what, due)
            due *= 2

    threading.Thread(target=tell, name="logged wait", daemon=True).start()
    try:
        yield
    finally:
        over.set()
