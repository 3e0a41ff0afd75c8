"""Progress of a long operation: a bar on a terminal, else a log line every ``LOG_INTERVAL_S``.

    with Progress("demonstrations", total=3000, unit="episodes") as progress:
        for chunk in chunks:
            progress.add_done(len(chunk))

    demonstrations ━━━━━━━━━━━━━━━━━━ 1,312/3,000 episodes 98/s  0:00:17 left
    INFO verl.utils.progress: demonstrations: 1,312 of 3,000 episodes, 98/s, 0:00:17 left

Each step of progress is also a heartbeat for the watchdog. The watchdog counts the heartbeats of
its own process (``count_heartbeats``). Child processes touch a file at each heartbeat
(``enable_heartbeat_file``).
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
LOG_INTERVAL_S = 10.0  # minimum seconds between two log lines
BAR_COLUMNS = ("{task.description}", "{task.fields[count]}", "{task.fields[pace]}")
HEARTBEAT_SUFFIX = ".moved"  # suffix of a file that is touched at every heartbeat
_heartbeats = Counter[str]()
_heartbeat_files: list[Path] = []


def record_heartbeat(name: str) -> None:
    """Record that the operation ``name`` has made progress, for the watchdog."""
    _heartbeats[name] += 1
    for path in _heartbeat_files:
        path.touch()


def count_heartbeats() -> int:
    """Return how often this process has called ``record_heartbeat``."""
    return _heartbeats.total()


def enable_heartbeat_file() -> None:
    """Touch a file at every later heartbeat of this process, if the run has a watchdog."""
    folder = Path(os.environ.get(STACKS_DIR, ""))
    if STACKS_DIR in os.environ and folder.is_dir():
        _heartbeat_files.append(folder / f"{os.getpid()}{HEARTBEAT_SUFFIX}")


def read_heartbeat_times(folder: Path) -> dict[str, float]:
    """Return the Unix time of the last heartbeat of each child process, by its file in ``folder``.

    The times may decrease if the clock of the machine is corrected.
    """
    return {path.name: path.stat().st_mtime for path in folder.glob(f"*{HEARTBEAT_SUFFIX}")}


class Progress:
    """Context manager that shows the progress of an operation with ``total`` units.

    With ``total=None`` the number of units is unknown. ``num_done_before`` units were finished
    earlier; rate and remaining time do not count them. Operations may be nested. ``clock`` returns
    seconds.
    """

    def __init__(
        self,
        name: str,
        total: int | None,
        unit: str,
        num_done_before: int = 0,
        console: Console | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.total = total
        self.unit = unit
        self.num_done = num_done_before
        self._first_done = num_done_before
        self._clock = clock
        self._start_time = self._last_log_time = clock()
        self._bar: Bars | None = None
        console = console or get_console()
        if console.is_terminal:
            title_column, count_column, pace_column = (
                TextColumn(text, markup=False) for text in BAR_COLUMNS
            )
            self._bar = Bars(
                title_column,
                BarColumn(),
                count_column,
                pace_column,
                console=console,
                transient=True,
            )
            self._task = self._bar.add_task(
                name, total=total, completed=num_done_before, count="", pace=""
            )
            self._bar.start()
            self._draw_bar("")

    def set_done(self, num_done: int, note: str = "") -> None:
        """Set the number of finished units to ``num_done``. ``note`` is shown after the rate."""
        if num_done != self.num_done:
            record_heartbeat(self.name)
        self.num_done = num_done
        if self._bar is not None:
            self._draw_bar(note)
        elif self._clock() - self._last_log_time >= LOG_INTERVAL_S and num_done > self._first_done:
            self._last_log_time = self._clock()
            texts = (self._format_count(" of "), *self._format_pace(), note)
            logger.info("%s: %s", self.name, ", ".join(text for text in texts if text))

    def add_done(self, count: int = 1) -> None:
        """Add ``count`` to the number of finished units."""
        self.set_done(self.num_done + count)

    def close(self) -> None:
        """Remove the progress bar. May be called twice."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None

    def __enter__(self) -> "Progress":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _draw_bar(self, note: str) -> None:
        if self._bar is not None:
            pace = "  ".join(text for text in (*self._format_pace(), note) if text)
            self._bar.update(
                self._task, completed=self.num_done, count=self._format_count("/"), pace=pace
            )

    def _format_count(self, separator: str) -> str:
        total_text = "" if self.total is None else f"{separator}{self.total:,}"
        return f"{self.num_done:,}{total_text} {self.unit}"

    def _format_pace(self) -> tuple[str, ...]:
        """Return texts of the rate and of the remaining time.

        Without ``total`` only the rate is returned. Before any progress the tuple is empty.
        """
        units_done = self.num_done - self._first_done
        seconds = self._clock() - self._start_time
        if units_done <= 0 or seconds <= 0:
            return ()
        rate = units_done / seconds
        rate_text = f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"
        if self.total is None:
            return (rate_text,)
        time_left = timedelta(seconds=round(max(0, self.total - self.num_done) / rate))
        return (rate_text, f"{time_left} left")
