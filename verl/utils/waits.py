"""Register of the results that this process waits for, and stopwatch of a training step.

The watchdog logs the awaited results and the running parts of the step.
"""

import logging
import threading
import time
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager

logger = logging.getLogger(__name__)
_awaited_labels: dict[int, list[str]] = {}


@contextmanager
def mark_as_awaited(labels: Iterable[str]) -> Iterator[list[str]]:
    """Register ``labels`` as awaited results during the ``with`` block.

    The block receives a list of the labels, and removes a label from it when its result arrives.
    """
    pending_labels = list(labels)
    _awaited_labels[id(pending_labels)] = pending_labels
    try:
        yield pending_labels
    finally:
        del _awaited_labels[id(pending_labels)]


def list_awaited() -> list[str]:
    """Return the labels of all awaited results, without duplicates, oldest wait first."""
    return list(
        dict.fromkeys(label for wait in list(_awaited_labels.values()) for label in list(wait))
    )


@contextmanager
def log_waiting(awaited: str, quiet_s: float) -> Iterator[None]:
    """Log "waiting for ``awaited``" if the ``with`` block runs longer than ``quiet_s`` seconds.

    The first line follows after ``quiet_s``, others after 2, 4, ... times ``quiet_s``. Use it
    before the watchdog is started, which logs all later waits.
    """
    end_event = threading.Event()
    start_time = time.monotonic()

    def log_repeatedly() -> None:
        next_log_s = quiet_s
        while not end_event.wait(start_time + next_log_s - time.monotonic()):
            logger.info("waiting for %s for %.0f s", awaited, next_log_s)
            next_log_s *= 2

    threading.Thread(target=log_repeatedly, name="logged wait", daemon=True).start()
    try:
        yield
    finally:
        end_event.set()


# ---- parts of a training step ------------------------------------------------------------------


class Stopwatch:
    """Stopwatch that adds up the seconds of named parts of a training step.

    Parts may be nested and repeated. ``running_parts`` are the parts that have started and not
    ended, innermost last. ``changes`` is the number of starts and ends of parts.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running_parts: list[str] = []
        self.changes = 0

    @contextmanager
    def measure_part(self, name: str) -> Iterator[None]:
        """Add the seconds of the ``with`` block to the part ``name``, even if the block raises."""
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
        """Add seconds that another process or thread measured. ``parts`` maps names to seconds."""
        for name, seconds in parts.items():
            self.seconds[name] += seconds

    def pop_metrics(self) -> dict[str, float]:
        """Return ``timing_s/<part>`` of every part, and clear all parts."""
        result = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        # Clear the dict: a part that does not occur in the next step must be absent there, not 0.
        self.seconds.clear()
        return result
