"""Exit statuses of commands: 2 and a message after a user's mistake, 128 + n after signal n."""

import _thread
import argparse
import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import Any

import yaml

from verl.config.settings import ConfigError
from verl.config.settings.errors import UserError
from verl.config.yaml_files import YamlLimitError, parse_yaml
from verl.utils.logging import escape_control_characters

MISTAKE_STATUS = 2  # exit status of a user's mistake
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# Equal signals within these seconds count as one: a scheduler or a terminal sends a signal to all
# processes, and a parent process then forwards it.
SAME_SIGNAL_S = 1.0
RESEND_S = 0.05  # seconds until a signal that could not interrupt the main thread is sent again
MAX_RESENDS = 20  # of signals during calls of logging; a later signal interrupts such a call


class UsageError(UserError):
    """Error: a mistake in the arguments of a command, or in a file that the arguments name."""


def run_and_report_mistakes(
    main: Callable[..., int | None], *args: Any, catches_os_errors: bool = True
) -> int:
    """Call ``main(*args)`` and return the exit status.

    After a user's mistake the message is written to standard error, and the status is
    ``MISTAKE_STATUS``. Mistakes are ``UserError``, ``ConfigError`` and ``SystemExit`` with a
    message. With ``catches_os_errors``, an ``OSError`` that has a file name or no ``errno`` is also
    a mistake. After a signal the status is that of ``InterruptOnSignal``.
    """
    # Paths may have characters that the encoding of the locale lacks.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _require_working_directory()
        with InterruptOnSignal() as interruption:
            return main(*args) or 0
        return interruption.exit_status
    except (UserError, ConfigError) as error:
        message = str(error)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        message = error.code
    except OSError as error:
        # An OSError without errno was raised by this project and has a message for the user.
        if not catches_os_errors or (error.errno is not None and error.filename is None):
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    sys.stderr.write(f"{escape_control_characters(message)}\n")
    return MISTAKE_STATUS


def _require_working_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        message = "the working directory was deleted; allowed: an existing directory; fix: cd DIR"
        raise UsageError(message, "missing_file") from error


class InterruptOnSignal:
    """Context manager that raises ``KeyboardInterrupt`` at a signal of ``SIGNALS`` and catches it.

    A second SIGTERM or SIGINT ends the process, unless it repeats the first in ``SAME_SIGNAL_S``::

        with InterruptOnSignal() as interruption:
            train()                    # raises KeyboardInterrupt at the signal
        interruption.exit_status       # 143 (SIGTERM), 130 (SIGINT), 129 (SIGHUP) or 0

    A closed terminal sends SIGHUP. It stays ignored if ``nohup`` started the process.

    The exception is ``KeyboardInterrupt``, because Ray propagates no other exception of a signal
    handler while it waits. In a thread other than the main thread, the context manager has no
    effect, because Python handles signals only in the main thread.

    Two kinds of code cannot be interrupted. The module ``logging`` would not release its locks.
    Python ignores the exceptions of some functions (``__del__``). In both the signal is sent again.
    A forked child, such as a worker of a pool, exits without a message.
    """

    def __init__(self) -> None:
        self.signal: signal.Signals | None = None
        self._process_id = os.getpid()
        self._signal_time = 0.0
        self._num_resends = 0
        self._previous_hook = sys.unraisablehook
        self._previous_handlers: dict[signal.Signals, Any] = {}

    @property
    def exit_status(self) -> int:
        """Return 128 + number of the received signal, or 0 if no signal was received."""
        return 128 + self.signal if self.signal else 0

    def __enter__(self) -> "InterruptOnSignal":
        if threading.current_thread() is threading.main_thread():
            self._previous_handlers = {
                signal_number: signal.signal(signal_number, self._handle_signal)
                for signal_number in SIGNALS
                if signal_number != signal.SIGHUP
                or signal.getsignal(signal_number) != signal.SIG_IGN
            }
            self._previous_hook, sys.unraisablehook = sys.unraisablehook, self._handle_ignored_error
        return self

    def __exit__(self, exception_type: type[BaseException] | None, *error: object) -> bool:
        for signal_number, handler in self._previous_handlers.items():
            signal.signal(signal_number, handler)
        if self._previous_handlers:
            sys.unraisablehook = self._previous_hook
        # Catch a KeyboardInterrupt only if _handle_signal raised it.
        return exception_type is KeyboardInterrupt and self.signal is not None

    def _handle_ignored_error(self, error: "sys.UnraisableHookArgs") -> None:
        self._previous_hook(error)
        if error.exc_type is KeyboardInterrupt and self.signal is not None:
            signal_number, self.signal = self.signal, None
            _send_again(signal_number)

    def _handle_signal(self, signal_number: int, frame: FrameType | None) -> None:
        if os.getpid() != self._process_id:
            # An exception, because a killed worker would not release the locks of its pool.
            raise SystemExit(128 + signal_number)
        # Python also calls functions of logging at a fork, and ignores their exceptions.
        if self._num_resends < MAX_RESENDS and _is_in_logging(frame):
            self._num_resends += 1
            _send_again(signal_number)
            return
        # Exit at the second signal: the cleanup after the first one hangs or takes too long.
        signal_name = signal.Signals(signal_number).name
        if self.signal is not None:
            seconds_since_first = time.monotonic() - self._signal_time
            is_repeated = signal_number == self.signal and seconds_since_first < SAME_SIGNAL_S
            if is_repeated or signal_number == signal.SIGHUP:  # a closed terminal may send it twice
                return
            _write_to_stderr(f"{signal_name}: ended at the second signal, without cleanup\n")
            os._exit(128 + signal_number)
        self.signal = signal.Signals(signal_number)
        self._signal_time = time.monotonic()
        _write_to_stderr(
            f"{signal_name}: the command ends; a second signal ends it at once, without cleanup\n"
        )
        raise KeyboardInterrupt


def _is_in_logging(frame: FrameType | None) -> bool:
    while frame is not None and frame.f_globals.get("__name__") != "logging":
        frame = frame.f_back
    return frame is not None


def _send_again(signal_number: int) -> None:
    """Send the signal to the main thread after ``RESEND_S``."""

    def send() -> None:
        time.sleep(RESEND_S)
        signal.pthread_kill(main_thread_id, signal_number)

    main_thread_id = threading.get_ident()
    # Unlike threading.Thread, this function needs no lock that the interrupted code may hold.
    _thread.start_new_thread(send, ())


def _write_to_stderr(text: str) -> None:
    """Write ``text`` without Python's stream, whose lock the interrupted code may hold."""
    with contextlib.suppress(OSError):  # a closed terminal
        os.write(2, text.encode())


@contextlib.contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Raise ``UsageError`` with ``path`` if the ``with`` block cannot read the file's content."""
    try:
        yield
    except UsageError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        why = " ".join(repr(error).split())[:200]
        raise UsageError(
            f"{path}: it is not a file that a run wrote ({why}); allowed: files of a run; fix: "
            "restore or remove it",
            "unreadable_file",
        ) from error


def parse_positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as a ``type`` of ``argparse``."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole numbers of at least 1")
    return int(text)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping with string keys that the YAML file ``path`` contains.

    Raises ``UsageError`` for other content, or beyond the limits of ``verl.config.yaml_files``.
    """
    try:
        mapping = parse_yaml(path.read_bytes().decode("utf-8-sig"))
    except YamlLimitError as error:
        raise UsageError(f"{path}: {error}", "unreadable_file") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        message = f"{path}: not YAML ({first_line}); fix: correct the file"
        raise UsageError(message, "unreadable_file") from error
    if not isinstance(mapping, Mapping) or not all(isinstance(key, str) for key in mapping):
        message = f"{path}: not a mapping of names to values; allowed: key: value lines"
        raise UsageError(message, "unreadable_file")
    return dict(mapping)
