"""Calls beside the caller's own work, whose errors are raised where he asks for them."""

import threading
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from verl.utils.waits import waiting_for

AnswerT = TypeVar("AnswerT")


class BackgroundCall(Generic[AnswerT]):
    """``work`` in a thread called ``name``, from now on.

    Example: ``BackgroundCall(save, "save").result()``.
    """

    def __init__(self, work: Callable[[], AnswerT], name: str) -> None:
        self._work = work
        self._answers: list[AnswerT] = []
        self._error: BaseException | None = None
        # A daemon: a process that is stopped does not wait for its end.
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._answers.append(self._work())
        except BaseException as error:  # raised again where the answer is asked for
            self._error = error

    def wait(self) -> None:
        """Return when the call has ended, whether it raised or not."""
        self._thread.join()

    def result(self, timeout_s: float | None = None) -> AnswerT:
        """The answer, once it is there. Raises what the call raised, and ``TimeoutError`` where it
        has not ended after ``timeout_s``.
        """
        self._thread.join(timeout_s)
        if self._thread.is_alive():
            raise TimeoutError(f"{self._thread.name}: no end after {timeout_s:g} s")
        if self._error is not None:
            raise self._error
        return self._answers[0]


class BackgroundCalls:
    """Calls one after another in a thread called ``name``, of which at most ``most`` wait.

    After one that raised none is made, and whoever adds or waits gets its error. Nobody waits
    longer than ``timeout_s``: then ``TimeoutError`` is raised.
    """

    def __init__(self, name: str, most: int, timeout_s: float) -> None:
        self._name = name
        self._most = most
        self._timeout_s = timeout_s
        self._waiting: deque[Callable[[], object]] = deque()
        self._added = 0
        self._done = 0
        self._error: BaseException | None = None
        self._running = False
        self._changed = threading.Condition()

    def add(self, work: Callable[[], object]) -> None:
        """Have ``work`` called when what was added before is done; waits for room."""
        with self._changed:
            self._wait_until(lambda: len(self._waiting) < self._most)
            self._waiting.append(work)
            self._added += 1
            if not self._running:
                self._running = True
                # A daemon, and only while there is work: nothing has to be closed.
                threading.Thread(target=self._run, name=self._name, daemon=True).start()

    def wait(self) -> None:
        """Return when all that was added until now is done."""
        with self._changed:
            last = self._added
            self._wait_until(lambda: self._done >= last)

    def _wait_until(self, reached: Callable[[], bool]) -> None:
        def over() -> bool:
            return self._error is not None or reached()

        with waiting_for([self._name]):
            in_time = self._changed.wait_for(over, self._timeout_s)
        if self._error is not None:
            raise self._error
        if not in_time:
            raise TimeoutError(f"{self._name}: no end after {self._timeout_s:g} s")

    def _run(self) -> None:
        while (work := self._next()) is not None:
            error = None
            try:
                work()
            except BaseException as raised:  # raised again where somebody adds or waits
                error = raised
            with self._changed:
                self._done += 1
                self._error = error
                self._changed.notify_all()

    def _next(self) -> Callable[[], object] | None:
        with self._changed:
            self._running = bool(self._waiting) and self._error is None
            if not self._running:
                return None
            self._changed.notify_all()
            return self._waiting.popleft()
