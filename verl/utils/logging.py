"""The one place that sets logging up: coloured on a terminal, plain in files and pipes."""

import logging
import sys
from pathlib import Path

from rich.console import Console
from rich.logging import RichHandler

PLAIN = "%(asctime)s %(levelname)s %(name)s: %(message)s"
# These report every request or file at INFO.
QUIET = ("urllib3", "filelock", "httpx", "fsspec", "matplotlib", "asyncio")

# The root logger's handlers that are ours: others (pytest's, a notebook's) are left alone.
_installed: list[logging.Handler] = []


def setup_logging(
    log_file: str | Path | None = None, level: str = "INFO", console: Console | None = None
) -> None:
    """Send this process's log to the terminal (or stderr as plain lines) and, appending, to
    ``log_file``.

    ``console`` is the rich console that also draws the progress bar, so that lines do not tear it.
    A second call replaces the handlers of the first.
    """
    root = logging.getLogger()
    for handler in _installed:
        root.removeHandler(handler)
        handler.close()
    handlers: list[logging.Handler] = [_screen(console)]
    if log_file is not None:
        Path(log_file).parent.mkdir(parents=True, exist_ok=True)
        handlers.append(logging.FileHandler(log_file, encoding="utf-8"))
        handlers[-1].setFormatter(logging.Formatter(PLAIN))
    _installed[:] = handlers
    for handler in handlers:
        root.addHandler(handler)
    root.setLevel(level)
    for name in QUIET:
        logging.getLogger(name).setLevel(logging.WARNING)


def _screen(console: Console | None) -> logging.Handler:
    if console is not None and console.is_terminal:
        return RichHandler(console=console, show_path=False, log_time_format="%H:%M:%S")
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(PLAIN, datefmt="%H:%M:%S"))
    return handler
