"""What stands still is said, then its stacks are written and it ends; what moves goes on."""

import logging
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest

from tests.helpers.refusals import mentions
from verl.utils import progress, watchdog
from verl.utils.progress import Progress
from verl.utils.stacks import (
    STACKS_DIR,
    RemoteStacks,
    answer_with_stacks,
    collect_local_stacks,
    collect_stacks,
)
from verl.utils.waits import Stopwatch, list_awaited, waiting_for
from verl.utils.watchdog import EXIT_STATUS, GRACE_S, MAX_LABELS, Stalled, Watchdog

ANSWERS = """
import sys, time
from verl.utils.stacks import answer_with_stacks
answer_with_stacks("player")
def deep_in_thought():
    print("ready", flush=True)
    time.sleep(600)
deep_in_thought()
"""
DEAF = """
import sys, time
from pathlib import Path
from verl.utils import watchdog
watchdog.POLL_S = 0.1
watchdog.GRACE_S = 2.0
with watchdog.Watchdog(Path(sys.argv[1]), 60.0, 0.1):
    while True:
        try:
            time.sleep(60)
        except KeyboardInterrupt:
            print("as if nothing had happened", flush=True)
"""
FROZEN = """
import ctypes, os, signal, sys
from pathlib import Path
from verl.utils import watchdog
watchdog.POLL_S = 0.2
watchdog.GRACE_S = 2.0
with watchdog.Watchdog(Path(sys.argv[1]), 60.0, 1.0):
    if sys.argv[2] == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    def native_code():
        while True:
            ctypes.PyDLL(None).sleep(600)  # keeps Python's lock
    native_code()
"""
ALIVE = """
import sys, time
from pathlib import Path
from verl.utils import watchdog
watchdog.POLL_S = 0.2
watchdog.GRACE_S = 2.0
with watchdog.Watchdog(Path(sys.argv[1]), 60.0, 4.0) as dog:
    for turn in range(35):
        time.sleep(0.2)
        dog.enter_stage(f"stage {turn}")
print("as it should")
"""
MUTE = "print('ready', flush=True); import time; time.sleep(600)"


class Clock:
    """Seconds that a test lets pass."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(tmp_path, clock, monkeypatch):
    """A watchdog whose looks are those of the test alone."""
    monkeypatch.setattr(watchdog, "POLL_S", 600.0)
    dog = Watchdog(tmp_path, 60.0, 600.0, clock)
    dog.check_progress()
    return dog


@pytest.fixture
def sent(monkeypatch):
    """Signals that the watchdog sends, caught on their way, and exits."""
    sent: list[object] = []
    monkeypatch.setattr(watchdog.signal, "pthread_kill", lambda _, number: sent.append(number))
    monkeypatch.setattr(watchdog.os, "_exit", lambda status: sent.append(("exit", status)))
    monkeypatch.setattr(watchdog, "collect_stacks", lambda *_: [])
    return sent


@pytest.fixture
def child(tmp_path, monkeypatch):
    """``child(code)``: a process that runs it and has said that it is ready."""
    monkeypatch.setenv(STACKS_DIR, str(tmp_path))
    started: list[subprocess.Popen] = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        started.append(process)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in started:
        process.kill()
        process.communicate()


def pass_time(dog: Watchdog, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        dog.check_progress()


def said(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_what_is_waited_for_is_said_at_doubling_intervals(dog, clock, caplog):
    caplog.set_level(logging.INFO)
    parts = Stopwatch()
    dog.follow_stopwatch(parts)
    with (
        parts.measure_part("step"),
        parts.measure_part("update_actor"),
        waiting_for(["rank 0", "rank 1"]),
    ):
        pass_time(dog, clock, 300)
    assert said(caplog) == [
        f"waiting for update_actor for {seconds} s: rank 0, rank 1" for seconds in (60, 120, 240)
    ]


@pytest.mark.parametrize("moves", ["stage", "part", "progress"])
def test_a_run_that_moves_is_left_alone(dog, clock, sent, caplog, moves):
    caplog.set_level(logging.INFO, logger=watchdog.__name__)
    parts = Stopwatch()
    dog.follow_stopwatch(parts)
    progress = Progress("brewing", 100, "potions")
    for turn in range(40):
        if moves == "stage":
            dog.enter_stage(f"stage {turn}")
        elif moves == "part":
            with parts.measure_part("gen"):
                pass
        else:
            progress.add_done()
        pass_time(dog, clock, 50)
    progress.close()
    assert sent == [] and said(caplog) == []


def test_a_part_that_fails_is_no_longer_under_way():
    parts = Stopwatch()
    with (
        pytest.raises(OSError, match="disk"),
        parts.measure_part("step"),
        parts.measure_part("save"),
    ):
        assert parts.running_parts == ["step", "save"]
        raise OSError("disk")
    assert parts.running_parts == [] and parts.changes == 4


def test_progress_that_stands_still_is_no_movement(dog, clock, sent):
    progress = Progress("brewing", 100, "potions", first=3)
    for _ in range(13):
        progress.set_done(3)
        pass_time(dog, clock, 50)
    progress.close()
    assert sent == [signal.SIGINT]


def test_a_stall_interrupts_the_run_once_and_then_ends_the_process(dog, clock, sent, caplog):
    pass_time(dog, clock, 599)
    assert sent == []
    pass_time(dog, clock, 1)
    assert sent == [signal.SIGINT]
    assert "start" in said(caplog)[-1] and "600 s" in said(caplog)[-1]
    pass_time(dog, clock, int(GRACE_S) - 1)
    assert sent == [signal.SIGINT]
    pass_time(dog, clock, 1)
    assert sent == [signal.SIGINT, ("exit", EXIT_STATUS)]
    assert EXIT_STATUS != 0


@pytest.mark.parametrize("broken", ["collect_stacks", "progress.find_last_heartbeat"])
def test_a_disk_that_fails_keeps_no_stalled_run_alive(tmp_path, sent, monkeypatch, caplog, broken):
    def fails(*_):
        if broken == "collect_stacks" or not failed:
            failed.append(1)
            raise OSError(28, "No space left on device")

    failed: list[int] = []
    monkeypatch.setattr(f"verl.utils.watchdog.{broken}", fails)
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(watchdog, "GRACE_S", 600.0)
    with pytest.raises(Stalled, check=mentions("start")), Watchdog(tmp_path, 60.0, 0.1):
        while not sent:
            time.sleep(0.01)
    assert sent == [signal.SIGINT] and failed == [1]
    assert "No space left on device" in caplog.text


def test_without_a_deadline_nothing_is_ended(tmp_path, clock, sent, caplog):
    caplog.set_level(logging.INFO)
    patient = Watchdog(tmp_path, 60.0, None, clock)
    patient.check_progress()
    pass_time(patient, clock, 4000)
    assert sent == []
    assert said(caplog)[-1] == "waiting for start for 3840 s"


def test_a_long_list_is_cut(dog, clock, caplog):
    caplog.set_level(logging.INFO)
    with waiting_for([f"rank {number}" for number in range(MAX_LABELS + 3)]):
        pass_time(dog, clock, 60)
    assert said(caplog)[0].endswith(f"rank {MAX_LABELS - 1} and 3 more")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConnectionError("a peer is gone"), None])
def test_the_block_raises_stalled_whatever_it_ended_with(dog, clock, sent, tmp_path, error):
    with pytest.raises(Stalled, check=mentions("save", "stall_timeout_s=600")) as caught, dog:
        dog.enter_stage("save")
        pass_time(dog, clock, 601)
        if error is not None:
            raise error
    assert caught.value.__cause__ is error
    assert STACKS_DIR not in os.environ and not (tmp_path / "stacks").exists()


def test_a_block_that_fails_by_itself_keeps_its_error(dog):
    with pytest.raises(ConnectionError, match="a peer is gone"), dog:
        raise ConnectionError("a peer is gone")


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["front", "background"])
def started(request):
    """How a shell started this process: what it puts in the background ignores SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_a_wait_of_the_main_thread_is_interrupted(started, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    waited = []
    with pytest.raises(Stalled, check=mentions("start")), Watchdog(tmp_path, 60.0, 0.1):
        waited.append(threading.Event().wait(60))
    assert waited == [], "it was left to wait"
    assert signal.getsignal(signal.SIGINT) == started
    stacks = next(tmp_path.glob("stacks-*.txt")).read_text()
    assert "== driver" in stacks and "test_a_wait_of_the_main_thread" in stacks


def test_a_process_in_the_background_stays_deaf_to_others(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Watchdog(tmp_path, 60.0, 60.0):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_a_process_that_does_not_end_in_order_is_ended(tmp_path):
    done = subprocess.run([sys.executable, "-c", DEAF, tmp_path], capture_output=True, timeout=60)
    assert done.returncode == EXIT_STATUS
    assert b"as if nothing had happened" in done.stdout
    assert b"the run did not end within" in done.stderr


@pytest.mark.parametrize("how", ["stopped", "keeps the lock"])
def test_a_driver_whose_watchdog_stands_still_is_ended_from_outside(tmp_path, how):
    command = [sys.executable, "-c", FROZEN, tmp_path, how]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert done.returncode == -signal.SIGKILL
    assert re.search(rb"the driver \(process \d+\) has sent no heartbeat", done.stderr)
    (answer,) = (tmp_path / "stacks").glob("*.txt")
    assert ("in native_code" in answer.read_text()) == (how != "stopped")


def test_a_driver_that_moves_is_left_alone_by_the_guard(tmp_path):
    command = [sys.executable, "-c", ALIVE, tmp_path]
    done = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"as it should\n"), done.stderr


def test_the_guard_goes_with_its_driver(child):
    process = child(
        "from verl.utils.driver_guard import DriverGuard; import time; guard = DriverGuard(600.0); "
        "print('ready', flush=True); time.sleep(600)"
    )
    (guard,) = psutil.Process(process.pid).children()
    process.kill()
    psutil.wait_procs([guard], timeout=30)
    assert not guard.is_running()


def test_movement_of_a_process_that_was_started_is_seen(dog, clock, sent, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_heartbeat_files", [])
    (tmp_path / "stacks").mkdir()
    monkeypatch.setenv(STACKS_DIR, str(tmp_path / "stacks"))
    child = (
        "import sys; from verl.utils import progress; progress.report_heartbeats(); "
        "progress.record_heartbeat('brewing')"
    )
    pass_time(dog, clock, 599)
    subprocess.run([sys.executable, "-c", child], check=True)
    pass_time(dog, clock, 599)
    assert sent == []
    pass_time(dog, clock, 2)
    assert sent == [signal.SIGINT]


def test_nothing_is_reported_where_nobody_watches(monkeypatch):
    monkeypatch.setattr(progress, "_heartbeat_files", [])
    monkeypatch.delenv(STACKS_DIR, raising=False)
    progress.report_heartbeats()
    monkeypatch.setenv(STACKS_DIR, "/nowhere/at/all")
    progress.report_heartbeats()
    assert progress._heartbeat_files == []


def test_a_part_of_a_watched_run_has_no_watchdog_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv(STACKS_DIR, raising=False)
    with watchdog.watch_run(tmp_path, 60.0, 600.0) as enter:
        assert enter is not progress.record_heartbeat
        with watchdog.watch_run(tmp_path / "inner", 60.0, 600.0) as inner:
            before = progress.count_heartbeats()
            inner("episodes")
            assert progress.count_heartbeats() == before + 1
    assert not (tmp_path / "inner").exists()


def test_waits_are_forgotten_when_they_end():
    with waiting_for(["a", "b"]) as left, waiting_for(["c", "b"]):
        left.remove("a")
        assert list_awaited() == ["b", "c"]
    assert list_awaited() == []


def test_a_process_answers_with_its_stacks_and_lives_on(child, tmp_path):
    process = child(ANSWERS)
    assert collect_stacks(tmp_path, tmp_path / "all.txt") == []
    text = (tmp_path / "all.txt").read_text()
    assert f"== player (process {process.pid}" in text and "in deep_in_thought" in text
    assert process.poll() is None


def test_a_stopped_process_is_named_and_killed(child, tmp_path):
    process = child(ANSWERS)
    process.send_signal(signal.SIGSTOP)
    silent = collect_stacks(tmp_path, tmp_path / "all.txt")
    assert len(silent) == 1
    assert silent[0].describe_process().startswith(f"player (process {process.pid}, stopped, ")
    assert "it did not answer" in (tmp_path / "all.txt").read_text()
    watchdog._kill_processes(silent)
    assert process.wait(30) == -signal.SIGKILL


def test_a_process_that_cannot_answer_is_not_asked(child, tmp_path):
    process = child(MUTE)
    assert collect_stacks(tmp_path, tmp_path / "all.txt") == []
    assert f"process {process.pid}" in (tmp_path / "all.txt").read_text()
    time.sleep(0.1)
    assert process.poll() is None


def test_who_was_started_by_others_is_asked_by_its_machine(child, tmp_path):
    process = child(ANSWERS)
    other = tmp_path / "another-machine-1.txt"
    gone = tmp_path / f"{socket.gethostname()}-999999999.txt"
    # Its number is in use, and not by a process that answers.
    taken = tmp_path / f"{socket.gethostname()}-{os.getpid()}.txt"
    for path in (other, gone, taken):
        path.write_text("somebody\n")
    told = collect_local_stacks(tmp_path)
    assert f"== player (process {process.pid}" in told and "in deep_in_thought" in told
    assert told.count("==") == 1 and process.poll() is None


HEARD = RemoteStacks("\n== node b\nin a kernel\n", ("node c does not answer",))


@pytest.mark.parametrize("answer", [HEARD, None])
def test_other_machines_are_asked_and_cannot_keep_a_run_from_ending(
    dog, clock, sent, tmp_path, monkeypatch, caplog, answer
):
    monkeypatch.setattr(watchdog, "REMOTE_STACKS_S", 0.2)
    asked: list[Path] = []

    def elsewhere(folder: Path) -> RemoteStacks:
        asked.append(folder)
        if answer is None:
            threading.Event().wait(600)
        return answer or RemoteStacks()

    dog.set_remote_stacks(elsewhere)
    pass_time(dog, clock, 600)
    assert asked == [tmp_path / "stacks"] and sent == [signal.SIGINT]
    written = "".join(path.read_text() for path in tmp_path.glob("stacks-*.txt"))
    assert written == (answer.stacks if answer else "")
    assert ("node c" in caplog.text) == (answer is not None)


@pytest.mark.parametrize("folder", ["", "/nowhere/at/all"])
def test_nothing_is_written_where_no_run_collects_stacks(monkeypatch, folder):
    monkeypatch.setenv(STACKS_DIR, folder)
    before = signal.getsignal(signal.SIGUSR1)
    answer_with_stacks("player")
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not Path("/nowhere").exists()
