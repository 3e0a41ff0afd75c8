"""One call beside the caller's own work, whose error is raised where its answer is asked for."""

import threading
from collections.abc import Callable
from typing import Generic, TypeVar

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
