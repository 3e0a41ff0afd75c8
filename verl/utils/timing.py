"""Measurement of the seconds of each part of a training step, for the metrics ``timing_s/*``."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Seconds per named part of a training step; parts may be nested and repeated.

    ``running_parts`` are the parts that are being measured, the innermost last. ``changes`` counts
    the starts and ends of parts.
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
