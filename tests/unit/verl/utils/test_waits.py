"""Tests that long waits outside the watchdog are logged repeatedly, and short waits are not."""

import logging
import threading
import time

from verl.utils.waits import log_waiting


def test_long_wait_is_logged_at_doubling_intervals(caplog):
    with caplog.at_level(logging.INFO), log_waiting("the first tasks", 0.05):
        deadline = time.monotonic() + 30
        while len(caplog.messages) < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert all("the first tasks" in message for message in caplog.messages[:3])
    assert [record.args[1] for record in caplog.records[:3]] == [0.05, 0.1, 0.2]


def test_short_wait_is_not_logged(caplog):
    with caplog.at_level(logging.INFO), log_waiting("the first tasks", 600.0):
        (waiting,) = [one for one in threading.enumerate() if one.name == "logged wait"]
    waiting.join(60)
    assert not waiting.is_alive() and caplog.messages == []
