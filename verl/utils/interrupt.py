"""Ending a run from outside: the first SIGTERM or Ctrl-C unwinds it in order, a second one ends the
process at once.

with Interruption() as interruption:
    train()                    # raises KeyboardInterrupt wherever it is
interruption.exit_status       # 143 after SIGTERM, 130 after SIGINT, 0 after neither
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT)


class Interruption:
    """A block that SIGTERM and SIGINT leave by a ``KeyboardInterrupt``, which ends with the block.

    It is a plain ``KeyboardInterrupt`` because Ray passes on no other exception that is raised
    while it waits. Outside the main thread, where Python handles no signals, nothing changes.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._before: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """What a shell reports of a process that the signal ended; 0 where none came."""
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._handle) for number in SIGNALS}
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        for number, handler in self._before.items():
            signal.signal(number, handler)
        # Only what a signal has raised ends here: an interrupt of another origin goes on.
        return kind is KeyboardInterrupt and self.signal is not None

    def _handle(self, number: int, _frame: FrameType | None) -> None:
        # The second signal: unwinding hangs, or takes longer than its sender will wait.
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        raise KeyboardInterrupt


@contextlib.contextmanager
def sigterm_handler_kept() -> Iterator[None]:
    """A block after which SIGTERM means what it meant before; where that was the default, what the
    block set stays.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None: a handler that was not installed from Python, and cannot be put back.
        if before not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, before)
