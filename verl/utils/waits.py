"""Results that this process waits for, calls in background threads, and stopwatch of a step.

The watchdog logs the awaited results and the running parts of the training step.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future
from contextlib import contextmanager
from typing import Generic, TypeVar

ResultT = TypeVar("ResultT")
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


def list_awaited_labels() -> list[str]:
    """Return the labels of all awaited results, without duplicates, oldest wait first."""
    return list(
        dict.fromkeys(
            label
            for labels_of_wait in list(_awaited_labels.values())
            for label in list(labels_of_wait)
        )
    )


@contextmanager
def log_waiting(awaited: str, quiet_s: float) -> Iterator[None]:
    """Log that the ``with`` block waits for ``awaited``, after ``quiet_s`` seconds.

    Log again when twice, four times, ... this time has passed. Use this only before the watchdog
    runs, because the watchdog logs waits itself.
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


# ---- calls in background threads -----------------------------------------------------------------


class BackgroundCall(Generic[ResultT]):
    """Call of ``function`` in a new thread named ``name``."""

    def __init__(self, function: Callable[[], ResultT], name: str) -> None:
        self._future: Future[ResultT] = Future()
        # Use a daemon thread, so that the process can exit before the call ends. Do not store
        # ``function``: its data must be freed after the call.
        self._thread = threading.Thread(target=self._run, args=(function,), name=name, daemon=True)
        self._thread.start()

    def _run(self, function: Callable[[], ResultT]) -> None:
        try:
            self._future.set_result(function())
        except BaseException as error:  # raised again in get_result
            self._future.set_exception(error)

    def wait(self, timeout_s: float | None = None) -> bool:
        """Wait up to ``timeout_s`` seconds for the end of the call. Return True if it has ended."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def get_result(self, timeout_s: float | None = None) -> ResultT:
        """Wait for the call and return its result, or raise its exception.

        Raises ``TimeoutError`` if the call has not ended after ``timeout_s`` seconds.
        """
        if not self.wait(timeout_s):
            raise TimeoutError(f"{self._thread.name}: not finished after {timeout_s:g} s")
        return self._future.result()


class BackgroundQueue:
    """Queue of at most ``max_waiting`` functions, which threads named ``name`` call in order.

    If a function raises an error, no further function is called, and ``add`` and ``wait`` raise
    this error. ``add`` and ``wait`` raise ``TimeoutError`` after waiting for ``timeout_s`` seconds.
    Only one thread may call them.
    """

    def __init__(self, name: str, max_waiting: int, timeout_s: float) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._calls: deque[BackgroundCall[None]] = deque()  # the oldest one runs, others wait

    def add(self, function: Callable[[], object]) -> None:
        """Add ``function`` to the end of the queue. Wait while the queue is full."""
        self._wait_until_at_most(self._max_waiting)
        previous_call = self._calls[-1] if self._calls else None

        def call_after_previous() -> None:
            if previous_call is not None:
                previous_call.get_result()  # an error of the previous call ends this one too
            function()

        self._calls.append(BackgroundCall(call_after_previous, self._name))

    def wait(self) -> None:
        """Wait until all functions that were added so far have returned."""
        self._wait_until_at_most(0)

    def _wait_until_at_most(self, num_calls: int) -> None:
        end_time = time.monotonic() + self._timeout_s
        with mark_as_awaited([self._name]):
            while self._calls and (len(self._calls) > num_calls or self._calls[0].wait(0)):
                if not self._calls[0].wait(end_time - time.monotonic()):
                    raise TimeoutError(f"{self._name}: not finished after {self._timeout_s:g} s")
                self._calls[0].get_result()
                self._calls.popleft()


# ---- parts of a training step ------------------------------------------------------------------


class Stopwatch:
    """Stopwatch of named parts of a training step, which may be nested and repeated."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.running_parts: list[str] = []  # started and not ended, innermost last
        self.changes = 0  # number of starts and ends of parts

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
        metrics = {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}
        # Clear the dict: a part that does not occur in the next step must be absent there, not 0.
        self.seconds.clear()
        return metrics
