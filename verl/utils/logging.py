"""Setup of logging: coloured on a terminal, plain lines in files and pipes, secrets masked."""

import contextlib
import functools
import logging
import os
import re
import sys
import traceback
from pathlib import Path
from types import TracebackType
from typing import IO, Any, cast

from rich.console import Console
from rich.logging import RichHandler

from verl.config.settings.secret_values import mask_text, register_secrets

LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Loggers that report every request or file at INFO.
QUIET_LOGGERS = ("urllib3", "filelock", "httpx", "fsspec", "matplotlib", "asyncio")

# Control characters except tab and newline, and lone surrogates, which cannot be encoded.
_UNPRINTABLE_PATTERN = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\ud800-\udfff]")

# Handlers that setup_logging added to the root logger, which may have others (of pytest).
_installed_handlers: list[logging.Handler] = []


def escape_control_characters(text: str) -> str:
    r"""Return ``text`` with control characters and lone surrogates as escape sequences.

    A terminal executes control characters: they can change its title, its clipboard or earlier
    lines. Tabs and newlines are kept.

    >>> escape_control_characters("a\x1b[2Jb")
    'a\\x1b[2Jb'
    """
    return _UNPRINTABLE_PATTERN.sub(lambda match: repr(match[0])[1:-1], text)


class MaskingFormatter(logging.Formatter):
    """Formatter that masks the secrets in records and their tracebacks.

    It escapes control characters and indents further lines, so that a text of an environment or a
    policy cannot imitate other records.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``, including a traceback, with masked secrets."""
        return escape_control_characters(mask_text(super().format(record))).replace("\n", "\n    ")


class TolerantStderr:
    """Standard error, whose write errors are ignored: a run must survive a closed terminal."""

    def __getattr__(self, name: str) -> Any:
        # During a progress bar, rich replaces sys.stderr by an object that writes to the console.
        return getattr(getattr(sys.stderr, "rich_proxied_file", sys.stderr), name)

    def write(self, text: str) -> int:
        """Write ``text``, and return its length."""
        with contextlib.suppress(OSError):
            self.__getattr__("write")(text)
        return len(text)

    def flush(self) -> None:
        """Flush the stream."""
        with contextlib.suppress(OSError):
            self.__getattr__("flush")()


@functools.cache
def get_console() -> Console:
    """Return the console on stderr, which log lines and progress bars share."""
    return Console(file=cast(IO[str], TolerantStderr()))


def setup_logging(log_file: str | Path | None = None, level: str = "INFO") -> None:
    """Write the log of this process to stderr, and append it to ``log_file``, with masked secrets.

    Uncaught exceptions are written to stderr only. A second call replaces the handlers of the
    first.
    """
    register_secrets(os.environ)
    sys.excepthook = _write_uncaught_error
    root_logger = logging.getLogger()
    for handler in _installed_handlers:
        root_logger.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_make_console_handler()]
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
        handlers[-1].setFormatter(MaskingFormatter(LINE_FORMAT))
    _installed_handlers[:] = handlers
    for handler in handlers:
        root_logger.addHandler(handler)
    root_logger.setLevel(level)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _make_console_handler() -> logging.Handler:
    if get_console().is_terminal:
        handler = RichHandler(console=get_console(), show_path=False, log_time_format="%H:%M:%S")
        handler.setFormatter(MaskingFormatter())
        return handler
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(MaskingFormatter(LINE_FORMAT, datefmt="%H:%M:%S"))
    return handler


def _write_uncaught_error(
    error_type: type[BaseException], error: BaseException, traceback_object: TracebackType | None
) -> None:
    sys.stderr.write(
        escape_control_characters(
            mask_text("".join(traceback.format_exception(error_type, error, traceback_object)))
        )
    )
