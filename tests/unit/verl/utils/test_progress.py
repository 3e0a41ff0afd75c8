"""Tests of progress output: a bar on a terminal, a line from time to time elsewhere."""

import io
import logging
import time

import pytest
from rich.console import Console

from verl.utils.progress import LOG_INTERVAL_S, Progress


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def make_terminal(width: int = 100) -> Console:
    return Console(file=io.StringIO(), force_terminal=True, width=width)


def read_console(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.fixture
def lines(caplog):
    """Return a function that lists the logged lines."""
    caplog.set_level(logging.INFO)
    return lambda: [record.getMessage() for record in caplog.records]


def make_line_progress(clock: Clock, total: int | None = 40, first: int = 0) -> Progress:
    return Progress("brewing", total, "potions", first, Console(file=io.StringIO()), clock)


def test_line_has_rate_and_time_left(lines):
    clock = Clock()
    with make_line_progress(clock) as progress:
        clock.now += 20
        progress.set_done(10, "loss 0.300")
    assert lines() == ["brewing: 10 of 40 potions, 2 s each, 0:01:00 left, loss 0.300"]


def test_lines_have_a_minimum_interval(lines):
    clock = Clock()
    with make_line_progress(clock, total=1000) as progress:
        for _ in range(100):
            clock.now += LOG_INTERVAL_S / 10
            progress.add_done(3)
    assert len(lines()) == 10
    assert lines()[-1] == "brewing: 300 of 1,000 potions, 3/s, 0:03:53 left"


def test_short_progress_logs_nothing(lines):
    clock = Clock()
    with make_line_progress(clock) as progress:
        clock.now += LOG_INTERVAL_S - 1
        progress.set_done(40)
    assert lines() == []


def test_nothing_is_logged_before_the_first_unit(lines):
    clock = Clock()
    with make_line_progress(clock, first=7) as progress:
        clock.now += 100
        progress.set_done(7)
        assert lines() == []
        progress.set_done(8)
    # Units that were done before the start do not count in the rate.
    assert lines() == ["brewing: 8 of 40 potions, 100 s each, 0:53:20 left"]


def test_unknown_total_gives_no_time_left(lines):
    clock = Clock()
    with make_line_progress(clock, total=None) as progress:
        clock.now += 10
        progress.set_done(50)
    assert lines() == ["brewing: 50 potions, 5/s"]


def test_terminal_shows_a_bar_and_no_lines(lines):
    clock = Clock()
    console = make_terminal()
    with Progress("brewing", 1500, "potions", console=console, clock=clock) as progress:
        clock.now += 30
        progress.set_done(1200, "loss 0.300")
        progress.close()
    text = read_console(console)
    for part in ("brewing", "━", "1,200/1,500 potions", "40/s", "0:00:08 left", "loss 0.300"):
        assert part in text
    assert lines() == []


def test_progress_bars_can_be_nested():
    console = make_terminal()
    with (
        Progress("training", 3, "steps", num_done_before=1, console=console),
        Progress("playing", 9, "plays", console=console) as part,
    ):
        part.set_done(9)
        console.print("a line above them")
        deadline = time.monotonic() + 30
        # The bars are drawn together a few times per second.
        while "9/9 plays" not in read_console(console) and time.monotonic() < deadline:
            time.sleep(0.02)
    above, _, _ = read_console(console).partition("9/9 plays")
    assert "1/3 steps" in above[above.index("a line above them") :]


def test_name_in_brackets_is_shown_unchanged():
    console = make_terminal()
    with Progress("[red] potions", 1, "[b]", console=console) as progress:
        progress.set_done(1)
    assert "[red] potions" in read_console(console) and "1/1 [b]" in read_console(console)
