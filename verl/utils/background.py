"""Calls in background threads, whose errors are raised in the thread that waits for them."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from verl.utils.waits import waiting_for

AnswerT = TypeVar("AnswerT")


class BackgroundCall(Generic[AnswerT]):
    """Call of ``work`` in a thread, as ``BackgroundCall(save, "save").get_result()``."""

    def __init__(self, work: Callable[[], AnswerT], name: str) -> None:
        self._work = work
        self._answers: list[AnswerT] = []
        self._error: BaseException | None = None
        # A daemon thread, so that the process can exit before the call ends.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._work())
        except BaseException as error:  # raised again in get_result
            self._error = error

    def wait(self) -> None:
        """Wait until the call has ended. Its error is only raised by ``get_result``."""
        self._thread.join()

    def get_result(self, timeout_s: float | None = None) -> AnswerT:
        """Wait for the call and return its result, or raise its exception.

        Raises ``TimeoutError`` if it has not ended after ``timeout_s``.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name}: not finished after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._answers[0]


class BackgroundCalls:
    """Queue of at most ``max_waiting`` functions, which thread ``name`` calls in order.

    After a call has raised, no further call is made, and ``add`` and ``wait`` raise its error. They
    raise ``TimeoutError`` after waiting for ``timeout_s``.
    """

    def __init__(self, name: str, max_waiting: int, timeout_s: float) -> None:
        self._name = name
        self._max_waiting = max_waiting
        self._timeout_s = timeout_s
        self._waiting: deque[Callable[[], object]] = deque()
        self._added = 0
        self._done = 0
        self._error: BaseException | None = None
        self._running = False
        self._changed = threading.Condition()

    def add(self, work: Callable[[], object]) -> None:
        """Queue ``work``, to be called after all earlier calls. Waits while the queue is full."""
        with self._changed:
            self._wait_until(lambda: len(self._waiting) < self._max_waiting)
            self._waiting.append(work)
            self._added += 1
            if not self._running:
                self._running = True
                # A daemon thread that exists only while there is work: no close() is needed.
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def wait(self) -> None:
        """Wait until all calls that were added so far have ended."""
        with self._changed:
            num_added = self._added
            self._wait_until(lambda: self._done >= num_added)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        def is_over() -> bool:
            return self._error is not None or reached()

        with waiting_for([self._name]):
            in_time = self._changed.wait_for(is_over, self._timeout_s)
        if self._error is not None:
            raise self._error
        if not in_time:
            raise TimeoutError(f"{self._name}: not finished after {self._timeout_s:g} s")

    def _run(self) -> None:
        while (work := self._take_next()) is not None:
            error = None
            try:
                work()
            except BaseException as raised:  # raised again in add and wait
                error = raised
            with self._changed:
                self._done += 1
                self._error = error
                self._changed.notify_all()

    def _take_next(self) -> Callable[[], object] | None:
        with self._changed:
            self._running = bool(self._waiting) and self._error is None
            if not self._running:
                return None
            self._changed.notify_all()
            return self._waiting.popleft()
