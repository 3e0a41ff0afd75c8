"""Wall-clock bookkeeping: a stopwatch whose readings become ``timing_s/*`` metrics."""

import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager


class Stopwatch:
    """Seconds spent per named part of a step; parts may nest and repeat.

    ``under_way`` are the parts that are measured now, the innermost last; ``changes`` counts how
    often one began or ended.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.under_way: list[str] = []
        self.changes = 0

    @contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the duration of the block to ``name``, also when it raises."""
        start = time.perf_counter()
        self.under_way.append(name)
        self.changes += 1
        try:
            yield
        finally:
            self.under_way.pop()
            self.changes += 1
            self.seconds[name] += time.perf_counter() - start

    def add(self, parts: Mapping[str, float]) -> None:
        """Add seconds measured elsewhere."""
        for name, seconds in parts.items():
            self.seconds[name] += seconds

    def metrics(self) -> dict[str, float]:
        """Return ``timing_s/<part>`` for every part and start afresh."""
        result = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        # A part that does not occur in the next step must be absent there, not 0.
        self.seconds.clear()
        return result
