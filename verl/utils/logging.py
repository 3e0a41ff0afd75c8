"""Setup of logging: coloured on a terminal, plain lines in files and pipes, secrets masked."""

import functools
import logging
import os
import sys
import traceback
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.logging import RichHandler

from verl.config.settings.secret_values import mask_text, register_secrets

LINE_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# Loggers that report every request or file at INFO.
QUIET_LOGGERS = ("urllib3", "filelock", "httpx", "fsspec", "matplotlib", "asyncio")

# Handlers that setup_logging added to the root logger. It does not remove other handlers, such as
# those of pytest.
_installed_handlers: list[logging.Handler] = []


class MaskingFormatter(logging.Formatter):
    """Formatter that masks the secrets in records and their tracebacks."""

    def format(self, record: logging.LogRecord) -> str:
        """Return the text of ``record``, including a traceback, with masked secrets."""
        return mask_text(super().format(record))


@functools.cache
def get_console() -> Console:
    """Return the console on stderr, which log lines and progress bars share."""
    return Console(stderr=True)


def setup_logging(log_file: str | Path | None = None, level: str = "INFO") -> None:
    """Write the log of this process to stderr and to ``log_file``, with masked secrets.

    The file is appended to. Uncaught exceptions are written to stderr only. A second call replaces
    the handlers that the first call added.
    """
    register_secrets(os.environ)
    sys.excepthook = _show_error
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


def _show_error(
    error_type: type[BaseException], error: BaseException, traceback_object: TracebackType | None
) -> None:
    sys.stderr.write(
        mask_text("".join(traceback.format_exception(error_type, error, traceback_object)))
    )
