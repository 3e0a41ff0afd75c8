"""Handling of SIGTERM and Ctrl-C: the first raises ``KeyboardInterrupt``, a second one exits.

with Interruption() as interruption:
    train()                    # raises KeyboardInterrupt at the signal
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
    """Context manager that turns SIGTERM and SIGINT into a ``KeyboardInterrupt`` and catches it.

    Ray propagates no other exception of a signal handler while it waits. It has no effect outside
    of the main thread, where Python handles no signals.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """Exit status of a process that the signal ended (128 + number); 0 without a signal."""
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                signum: signal.signal(signum, self._handle_signal) for signum in SIGNALS
            }
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        for signum, handler in self._previous_handlers.items():
            signal.signal(signum, handler)
        # Catch only an interrupt of a signal handled here; others are raised further.
        return kind is KeyboardInterrupt and self.signal is not None

    def _handle_signal(self, number: int, _frame: FrameType | None) -> None:
        # Exit at the second signal: the unwinding hangs or takes too long.
        if self.signal is not None:
            os._exit(128 + number)
        self.signal = signal.Signals(number)
        raise KeyboardInterrupt


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler after the block, if one was installed before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None means a handler that was not installed from Python; it cannot be restored.
        if previous_handler not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, previous_handler)
