"""Handling of SIGTERM, SIGINT and SIGHUP: the first raises ``KeyboardInterrupt``, a second exits.

with Interruption() as interruption:
    train()                    # raises KeyboardInterrupt at the signal
interruption.exit_status       # 143 after SIGTERM, 130 after SIGINT, 129 after SIGHUP, else 0
"""

import contextlib
import os
import signal
import threading
from collections.abc import Iterator
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Interruption:
    """Context manager that raises ``KeyboardInterrupt`` at a signal of ``SIGNALS`` and catches it.

    A closed terminal sends SIGHUP. It stays ignored if ``nohup`` started the process.

    The exception is ``KeyboardInterrupt``, because Ray propagates no other exception of a signal
    handler while it waits. In a thread other than the main thread, the context manager has no
    effect, because Python handles signals only in the main thread.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """Return 128 + number of the received signal, or 0 if no signal was received."""
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> "Interruption":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                signal_number: signal.signal(signal_number, self._handle_signal)
                for signal_number in SIGNALS
                if signal_number != signal.SIGHUP
                or signal.getsignal(signal_number) != signal.SIG_IGN
            }
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> bool:
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)
        # Catch a KeyboardInterrupt only if _handle_signal raised it.
        return kind is KeyboardInterrupt and self.signal is not None

    def _handle_signal(self, signal_number: int, _frame: FrameType | None) -> None:
        # Exit at the second signal: the cleanup after the first one hangs or takes too long.
        if self.signal is not None:
            if signal_number == signal.SIGHUP:  # a closed terminal may send it twice
                return
            os._exit(128 + signal_number)
        self.signal = signal.Signals(signal_number)
        raise KeyboardInterrupt


@contextlib.contextmanager
def keep_sigterm_handler() -> Iterator[None]:
    """Restore the SIGTERM handler after the ``with`` block, if there was one before."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    previous_handler = signal.getsignal(signal.SIGTERM)
    try:
        yield
    finally:
        # None stands for a handler that was not installed from Python and cannot be restored.
        if previous_handler not in (None, signal.SIG_DFL):
            signal.signal(signal.SIGTERM, previous_handler)
