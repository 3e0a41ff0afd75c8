"""The one place that sets logging up: coloured on a terminal, plain in files and pipes."""

import functools
import logging
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler

from verl.config.settings.secret_values import hide_secrets, masked_text

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# These report every request or file at INFO.
QUIET = ("urllib3", "filelock", "httpx", "fsspec", "matplotlib", "asyncio")

# The root logger's handlers that are ours: others (pytest's, a notebook's) are left alone.
_installed: list[logging.Handler] = []


class MaskingFormatter(logging.Formatter):
    """Formats records and their tracebacks with the secrets in them masked."""

    def format(self, record: logging.LogRecord) -> str:
        """The line, or lines, of ``record``."""
        return masked_text(super().format(record))


@functools.cache
def screen() -> Console:
    """Where this process shows how it goes: lines of the log and progress bars, which tear each
    other unless they share a console. Standard output is left to what a command has to say.
    """
    return Console(stderr=True)


def setup_logging(log_file: str | Path | None = None, level: str = "INFO") -> None:
    """Send this process's log to the terminal (or stderr as plain lines) and, appending, to
    ``log_file``, and errors that end the process to stderr; secrets are masked in all of them. A
    second call replaces the handlers of the first.
    """
    hide_secrets(os.environ)
    sys.excepthook = _show_error
    root = logging.getLogger()
    for handler in _installed:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_screen_handler()]
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
        handlers[-1].setFormatter(MaskingFormatter(PLAIN))
    _installed[:] = handlers
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _screen_handler() -> logging.Handler:
    if screen().is_terminal:
        handler = RichHandler(console=screen(), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(MaskingFormatter())
        return handler
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskingFormatter(PLAIN, datefmt="%H:%M:%S"))
    return handler


def _show_error(
    kind: type[BaseException], error: BaseException, trace: TracebackType | None
) -> None:
    sys.stderr.write(masked_text("".join(traceback.format_exception(kind, error, trace))))
