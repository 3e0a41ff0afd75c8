"""Results that this process waits for, calls in background threads, and stopwatch of a step.

The watchdog logs the awaited results and the running parts of the training step.
"""

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
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


# ---- calls in background threads -----------------------------------------------------------------


class BackgroundCall(Generic[ResultT]):
    """Call of ``function`` in a new thread named ``name``.

    Example: ``BackgroundCall(save, "save").get_result()``.
    """

    def __init__(self, function: Callable[[], ResultT], name: str) -> None:
        self._function = function
        self._results: list[ResultT] = []
        self._error: BaseException | None = None
        # Use a daemon thread, so that the process can exit before the call ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._results.append(self._function())
        except BaseException as error:  # raised again in get_result
            self._error = error

    def wait(self) -> None:
        """Wait until the call has ended. An error of the call is raised only by ``get_result``."""
        self._thread.join()

    def get_result(self, timeout_s: float | None = None) -> ResultT:
        """Wait for the call and return its result, or raise its exception.

        Raises ``TimeoutError`` if the call has not ended after ``timeout_s`` seconds.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name}: not finished after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._results[0]


class BackgroundQueue:
    """Queue of at most ``max_waiting`` functions, which a thread named ``name`` calls in order.

    If a function raises an error, no further function is called, and ``add`` and ``wait`` raise
    this error. ``add`` and ``wait`` raise ``TimeoutError`` after waiting for ``timeout_s`` seconds.
    """

    def __init__(self, name: str, max_waiting: int, timeout_s: float) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._queue: deque[Callable[[], object]] = deque()
        self._num_added = 0
        self._num_done = 0
        self._error: BaseException | None = None
        self._is_running = False
        self._condition = threading.Condition()

    def add(self, function: Callable[[], object]) -> None:
        """Add ``function`` to the end of the queue. Wait while the queue is full."""
        with self._condition:
            self._wait_until(lambda: len(self._queue) < self._max_waiting)
            self._queue.append(function)
            self._num_added += 1
            if not self._is_running:
                self._is_running = True
                # The thread ends when the queue is empty, so this class needs no close().
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def wait(self) -> None:
        """Wait until all functions that were added so far have returned."""
        with self._condition:
            num_added = self._num_added
            self._wait_until(lambda: self._num_done >= num_added)

    def _wait_until(self, is_reached: Callable[[], bool]) -> None:
        def is_reached_or_failed() -> bool:
            return self._error is not None or is_reached()

        with mark_as_awaited([self._name]):
            is_in_time = self._condition.wait_for(is_reached_or_failed, self._timeout_s)
        if self._error is not None:
            raise self._error
        if not is_in_time:
            raise TimeoutError(f"{self._name}: not finished after {self._timeout_s:g} s")

    def _run(self) -> None:
        while (function := self._take_next_function()) is not None:
            error = None
            try:
                function()
            except BaseException as function_error:  # raised again in add and wait
                error = function_error
            with self._condition:
                self._num_done += 1
                self._error = error
                self._condition.notify_all()

    def _take_next_function(self) -> Callable[[], object] | None:
        with self._condition:
            self._is_running = bool(self._queue) and self._error is None
            if not self._is_running:
                return None
            self._condition.notify_all()
            return self._queue.popleft()


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
