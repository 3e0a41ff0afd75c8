"""Calls in background threads, whose errors are raised in the thread that waits for them."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from verl.utils.waits import mark_as_awaited

ResultT = TypeVar("ResultT")


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


class BackgroundCalls:
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
