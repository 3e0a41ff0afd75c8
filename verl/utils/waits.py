"""Results that threads of this process wait for, and the seconds of parts of a training step.

The watchdog logs the awaited results and the running parts.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger(__name__)
_open_waits: dict[int, list[str]] = {}


@contextmanager
def waiting_for(labels: Iterable[str]) -> Iterator[list[str]]:
    """Register ``labels`` as awaited in the block, which removes arrived ones from the list."""
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
    """Log "waiting for ``awaited``" while the block runs, after 1, 2, 4, ... times ``quiet_s``.

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


# ---- parts of a training step ------------------------------------------------------------------


class Stopwatch:
    """Seconds per named part of a training step; parts may be nested and repeated.

    ``running_parts`` are measured now, the innermost last. ``changes`` counts starts and ends.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running_parts: list[str] = []
        self.changes = 0

    @contextmanager
    def measure_part(self, name: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to the part ``name``, also when it raises."""
        start_time = time.perf_counter()
        self.running_parts.append(name)
        self.changes += 1
        try:
            yield
        finally:
            self.running_parts.pop()
            self.changes += 1
            self.seconds[name] += time.perf_counter() - start_time

    def add_seconds(self, parts: Mapping[str, float]) -> None:
        """Add seconds by part name that were measured in other processes or threads."""
        for name, seconds in parts.items():
            self.seconds[name] += seconds

    def pop_metrics(self) -> dict[str, float]:
        """Return ``timing_s/<part>`` of every part, and clear all parts."""
        result = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        # A part that does not occur in the next step must be absent from its metrics, not 0.
        self.seconds.clear()
        return result
