"""Progress of a long operation: a bar on a terminal, else a log line every ``PERIOD_S`` seconds.

    with Progress("demonstrations", total=3000, unit="episodes") as progress:
        for chunk in chunks:
            progress.add(len(chunk))

    demonstrations ━━━━━━━━━━━━━━━━━━ 1,312/3,000 episodes 98/s  0:00:17 left
    INFO verl.utils.progress: demonstrations: 1,312 of 3,000 episodes, 98/s, 0:00:17 left

Every progress is also a heartbeat for the watchdog. It counts the heartbeats of this process
(``count_heartbeats``) and sees those of its child processes in files (``report_heartbeats``).
"""

import logging
import os
import time
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, TextColumn
from rich.progress import Progress as Bars

from verl.utils.logging import get_console
from verl.utils.stacks import STACKS_DIR

logger = logging.getLogger(__name__)
PERIOD_S = 10.0  # shortest interval of log lines
COLUMNS = ("{task.description}", "{task.fields[count]}", "{task.fields[pace]}")
HEARTBEAT_SUFFIX = ".moved"  # suffix of a file that is touched at every heartbeat
_heartbeats = Counter[str]()
_heartbeat_files: list[Path] = []


def record_heartbeat(name: str) -> None:
    """Record that the operation ``name`` has made progress, which the watchdog checks."""
    _heartbeats[name] += 1
    for path in _heartbeat_files:
        path.touch()


def count_heartbeats() -> int:
    """Return how often this process has called ``record_heartbeat``."""
    return _heartbeats.total()


def report_heartbeats() -> None:
    """Report the following heartbeats by a file to the watchdog of the run, if there is one."""
    folder = Path(os.environ.get(STACKS_DIR, ""))
    if STACKS_DIR in os.environ and folder.is_dir():
        _heartbeat_files.append(folder / f"{os.getpid()}{HEARTBEAT_SUFFIX}")


def find_last_heartbeat(folder: Path) -> float:
    """Return the time of the last heartbeat reported to ``folder``, Unix seconds; 0 if none."""
    return max((path.stat().st_mtime for path in folder.glob(f"*{HEARTBEAT_SUFFIX}")), default=0.0)


class Progress:
    """Progress of an operation of ``total`` units (None: unknown), as a context manager.

    ``first`` units are done before; they do not count for the rate and the time left. Operations
    may be nested. ``clock`` returns seconds.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        first: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.done = first
        self._first = first
        self._clock = clock
        self._began = self._last_logged = clock()
        self._bars: Bars | None = None
        console = console or get_console()
        if console.is_terminal:
            title, count, pace = (TextColumn(text, markup=False) for text in COLUMNS)
            self._bars = Bars(title, BarColumn(), count, pace, console=console, transient=True)
            self._task = self._bars.add_task(name, total=total, completed=first, count="", pace="")
            self._bars.start()
            self._draw_bar("")

    def set_done(self, done: int, note: str = "") -> None:
        """Set the number of finished units to ``done``. ``note`` is shown after the rate."""
        if done != self.done:
            record_heartbeat(self.name)
        self.done = done
        if self._bars is not None:
            self._draw_bar(note)
        elif self._clock() - self._last_logged >= PERIOD_S and done > self._first:
            self._last_logged = self._clock()
            texts = (self._format_count(" of "), *self._format_pace(), note)
            logger.info("%s: %s", self.name, ", ".join(text for text in texts if text))

    def add_done(self, count: int = 1) -> None:
        """Add ``count`` to the number of finished units."""
        self.set_done(self.done + count)

    def close(self) -> None:
        """Remove the bar; may be called twice."""
        if self._bars is not None:
            self._bars.stop()
            self._bars = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _draw_bar(self, note: str) -> None:
        if self._bars is not None:
            pace = "  ".join(text for text in (*self._format_pace(), note) if text)
            self._bars.update(
                self._task, completed=self.done, count=self._format_count("/"), pace=pace
            )

    def _format_count(self, of: str) -> str:
        total_text = "" if self.total is None else f"{of}{self.total:,}"
        return f"{self.done:,}{total_text} {self.unit}"

    def _format_pace(self) -> tuple[str, ...]:
        """Return the rate and, if ``total`` is known, the time left; empty before any progress."""
        units_done = self.done - self._first
        seconds = self._clock() - self._began
        if units_done <= 0 or seconds <= 0:
            return ()
        rate = units_done / seconds
        rate_text = f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"
        if self.total is None:
            return (rate_text,)
        time_left = timedelta(seconds=round(max(0, self.total - self.done) / rate))
        return (rate_text, f"{time_left} left")
