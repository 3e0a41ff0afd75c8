"""Registry of the results that threads of this process wait for; the watchdog logs them."""

import logging
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)
_open_waits: dict[int, list[str]] = {}


@contextmanager
def waiting_for(labels: Iterable[str]) -> Iterator[list[str]]:
    """Register ``labels`` as awaited during the block.

    The block removes from the yielded list the labels whose results have arrived.
    """
    pending_labels = list(labels)
    _open_waits[id(pending_labels)] = pending_labels
    try:
        yield pending_labels
    finally:
        del _open_waits[id(pending_labels)]


def list_awaited() -> list[str]:
    """Return the labels that are awaited now, the longest wait first, without duplicates."""
    return list(dict.fromkeys(label for wait in list(_open_waits.values()) for label in list(wait)))


@contextmanager
def log_waiting(awaited: str, quiet_s: float) -> Iterator[None]:
    """Log "waiting for ``awaited``" at growing intervals while the ``with`` block runs.

    The first line follows after ``quiet_s``, the next ones after 2, 4, ... times as many seconds.
    Use it before the watchdog runs.
    """
    is_over = threading.Event()
    began = time.monotonic()

    def log_repeatedly() -> None:
        due = quiet_s
        while not is_over.wait(began + due - time.monotonic()):
            logger.info("waiting for %s for %.0f s", awaited, due)
            due *= 2

    threading.Thread(target=log_repeatedly, name="logged wait", daemon=True).start()
    try:
        yield
    finally:
        is_over.set()
