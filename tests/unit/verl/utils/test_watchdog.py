"""Tests of the watchdog: a stalled run is reported, its stacks are written and it ends."""

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

import pytest

from tests.helpers.refusals import mentions, missing_parts
from verl.utils import progress, watchdog
from verl.utils.progress import Progress
from verl.utils.stacks import (
    STACKS_DIR,
    RemoteStacks,
    collect_local_stacks,
    collect_stacks,
    install_stack_dump_handler,
)
from verl.utils.waits import Stopwatch, list_awaited_labels, mark_as_awaited
from verl.utils.watchdog import EXIT_STATUS, GRACE_S, MAX_LABELS, Stalled, Watchdog

ANSWERING = """
import sys, time
from verl.utils.stacks import install_stack_dump_handler
install_stack_dump_handler("worker")
def compute_slowly():
    print("ready", flush=True)
    time.sleep(600)
compute_slowly()
"""
IGNORES_INTERRUPTS = """
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
            print("interrupt ignored", flush=True)
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
            ctypes.PyDLL(None).sleep(600)  # holds the GIL
    native_code()
"""
MOVING = """
import sys, time
from pathlib import Path
from verl.utils import watchdog
watchdog.POLL_S = 0.2
watchdog.GRACE_S = 2.0
with watchdog.Watchdog(Path(sys.argv[1]), 60.0, 4.0) as dog:
    for turn in range(35):
        time.sleep(0.2)
        dog.enter_stage(f"stage {turn}")
print("finished in order")
"""
NO_ANSWER = "print('ready', flush=True); import time; time.sleep(600)"


class Clock:
    """Clock that a test advances."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def dog(tmp_path, clock, monkeypatch):
    """Return a watchdog that checks only when the test calls ``check_progress``."""
    monkeypatch.setattr(watchdog, "POLL_S", 600.0)
    dog = Watchdog(tmp_path, 60.0, 600.0, clock)
    dog.check_progress()
    return dog


@pytest.fixture
def caught_signals(monkeypatch):
    """Replace signals and exits of the watchdog by entries of the returned list."""
    caught_signals: list[object] = []
    monkeypatch.setattr(
        watchdog.signal, "pthread_kill", lambda _, number: caught_signals.append(number)
    )
    monkeypatch.setattr(
        watchdog.os, "_exit", lambda status: caught_signals.append(("exit", status))
    )
    monkeypatch.setattr(watchdog, "collect_stacks", lambda *_: [])
    return caught_signals


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Return ``child(code)``: it starts a process that runs ``code`` and waits until it prints
    ready.
    """
    monkeypatch.setenv(STACKS_DIR, str(tmp_path))
    processes: list[subprocess.Popen] = []

    def start(code: str) -> subprocess.Popen:
        process = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
        processes.append(process)
        assert process.stdout and process.stdout.readline() == b"ready\n"
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def pass_time(dog: Watchdog, clock: Clock, seconds: int) -> None:
    for _ in range(seconds):
        clock.now += 1
        dog.check_progress()


def list_messages(caplog) -> list[str]:
    return [record.getMessage() for record in caplog.records]


def test_waits_are_logged_at_doubling_intervals(dog, clock, caplog):
    caplog.set_level(logging.INFO)
    parts = Stopwatch()
    dog.follow_stopwatch(parts)
    with (
        parts.measure_part("step"),
        parts.measure_part("update_actor"),
        mark_as_awaited(["rank 0", "rank 1"]),
    ):
        pass_time(dog, clock, 300)
    for message, seconds in zip(list_messages(caplog), (60, 120, 240), strict=True):
        assert not missing_parts(message, "update_actor", f" {seconds} s", "rank 0, rank 1")


@pytest.mark.parametrize("moves", ["stage", "part", "progress"])
def test_moving_run_is_not_interrupted(dog, clock, caught_signals, caplog, moves):
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
    assert caught_signals == [] and list_messages(caplog) == []


def test_failed_part_is_no_longer_running():
    parts = Stopwatch()
    with (
        pytest.raises(OSError, match="disk"),
        parts.measure_part("step"),
        parts.measure_part("save"),
    ):
        assert parts.running_parts == ["step", "save"]
        raise OSError("disk")
    assert parts.running_parts == [] and parts.changes == 4


def test_unchanged_progress_counts_as_stalled(dog, clock, caught_signals):
    progress = Progress("brewing", 100, "potions", num_done_before=3)
    for _ in range(13):
        progress.set_done(3)
        pass_time(dog, clock, 50)
    progress.close()
    assert caught_signals == [signal.SIGINT]


def test_stall_interrupts_once_and_then_ends_the_process(dog, clock, caught_signals, caplog):
    pass_time(dog, clock, 599)
    assert caught_signals == []
    pass_time(dog, clock, 1)
    assert caught_signals == [signal.SIGINT]
    assert "start" in list_messages(caplog)[-1] and "600 s" in list_messages(caplog)[-1]
    pass_time(dog, clock, int(GRACE_S) - 1)
    assert caught_signals == [signal.SIGINT]
    pass_time(dog, clock, 1)
    assert caught_signals == [signal.SIGINT, ("exit", EXIT_STATUS)]
    assert EXIT_STATUS != 0


@pytest.mark.parametrize("failing_call", ["collect_stacks", "progress.read_heartbeat_times"])
def test_disk_error_does_not_keep_a_stalled_run_alive(
    tmp_path, caught_signals, monkeypatch, caplog, failing_call
):
    def raise_once(*_):
        if failing_call == "collect_stacks" or not failures:
            failures.append(1)
            raise OSError(28, "No space left on device")

    failures: list[int] = []
    monkeypatch.setattr(f"verl.utils.watchdog.{failing_call}", raise_once)
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    monkeypatch.setattr(watchdog, "GRACE_S", 600.0)
    with pytest.raises(Stalled, check=mentions("start")), Watchdog(tmp_path, 60.0, 0.1):
        while not caught_signals:
            time.sleep(0.01)
    assert caught_signals == [signal.SIGINT] and failures == [1]
    assert "No space left on device" in caplog.text


def test_without_stall_timeout_nothing_is_interrupted(tmp_path, clock, caught_signals, caplog):
    caplog.set_level(logging.INFO)
    dog = Watchdog(tmp_path, 60.0, None, clock)
    dog.check_progress()
    pass_time(dog, clock, 4000)
    assert caught_signals == []
    assert not missing_parts(list_messages(caplog)[-1], "start", "3840 s")


def test_long_list_of_waits_is_cut(dog, clock, caplog):
    caplog.set_level(logging.INFO)
    with mark_as_awaited([f"rank {number}" for number in range(MAX_LABELS + 3)]):
        pass_time(dog, clock, 60)
    assert list_messages(caplog)[0].endswith(f"rank {MAX_LABELS - 1} and 3 more")


@pytest.mark.parametrize("error", [KeyboardInterrupt(), ConnectionError("a peer is gone"), None])
def test_stalled_is_raised_for_any_end_of_the_block(dog, clock, caught_signals, tmp_path, error):
    with pytest.raises(Stalled, check=mentions("save", "stall_timeout_s=600")) as caught, dog:
        dog.enter_stage("save")
        pass_time(dog, clock, 601)
        if error is not None:
            raise error
    assert caught.value.__cause__ is error
    assert STACKS_DIR not in os.environ and not (tmp_path / "stacks").exists()


def test_error_without_a_stall_is_kept(dog):
    with pytest.raises(ConnectionError, match="a peer is gone"), dog:
        raise ConnectionError("a peer is gone")


@pytest.fixture(params=[signal.default_int_handler, signal.SIG_IGN], ids=["front", "background"])
def sigint_handler(request):
    """Set the SIGINT handler of a shell: processes in its background ignore SIGINT."""
    before = signal.signal(signal.SIGINT, request.param)
    yield request.param
    signal.signal(signal.SIGINT, before)


def test_wait_of_the_main_thread_is_interrupted(sigint_handler, tmp_path, monkeypatch):
    monkeypatch.setattr(watchdog, "POLL_S", 0.05)
    results = []
    with pytest.raises(Stalled, check=mentions("start")), Watchdog(tmp_path, 60.0, 0.1):
        results.append(threading.Event().wait(60))
    assert results == [], "the wait was not interrupted"
    assert signal.getsignal(signal.SIGINT) == sigint_handler
    stacks = next(tmp_path.glob("stacks-*.txt")).read_text()
    assert "== driver" in stacks and "test_wait_of_the_main_thread" in stacks


def test_background_process_still_ignores_sigint(tmp_path):
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with Watchdog(tmp_path, 60.0, 60.0):
            signal.raise_signal(signal.SIGINT)
    finally:
        signal.signal(signal.SIGINT, before)


def test_process_that_ignores_interrupts_is_ended(tmp_path):
    result = subprocess.run(
        [sys.executable, "-c", IGNORES_INTERRUPTS, tmp_path], capture_output=True, timeout=60
    )
    assert result.returncode == EXIT_STATUS
    assert b"interrupt ignored" in result.stdout
    assert b" 2 s" in result.stderr  # GRACE_S


@pytest.mark.parametrize("state", ["stopped", "holds the GIL"])
def test_frozen_driver_is_killed_by_the_guard(tmp_path, state):
    command = [sys.executable, "-c", FROZEN, tmp_path, state]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert result.returncode == -signal.SIGKILL
    assert re.search(rb"driver \(process \d+\)", result.stderr)
    (answer,) = (tmp_path / "stacks").glob("*.txt")
    assert ("in native_code" in answer.read_text()) == (state != "stopped")


def test_moving_driver_is_not_killed_by_the_guard(tmp_path):
    command = [sys.executable, "-c", MOVING, tmp_path]
    result = subprocess.run(command, capture_output=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, b"finished in order\n"), result.stderr
    assert not re.search(rb"driver \(process \d+\)", result.stderr)


@pytest.mark.parametrize("end", ["os.kill(os.getpid(), 9)", "os._exit(1)"])
def test_guard_reports_a_sudden_end_of_its_driver_and_ends(end):
    """Ray's native code calls _exit(1) in a driver whose node process has ended."""
    code = (
        "from verl.utils.driver_guard import DriverGuard; import os; guard = DriverGuard(600.0)\n"
        f"{end}\n"
    )
    # The call returns when the guard, too, has closed standard error.
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60)
    assert result.returncode in (1, -signal.SIGKILL)
    assert re.search(rb"driver \(process \d+\)", result.stderr)


def test_heartbeat_of_a_child_process_counts(dog, clock, caught_signals, tmp_path, monkeypatch):
    monkeypatch.setattr(progress, "_heartbeat_files", [])
    (tmp_path / "stacks").mkdir()
    monkeypatch.setenv(STACKS_DIR, str(tmp_path / "stacks"))
    child = (
        "import sys; from verl.utils import progress; progress.enable_heartbeat_file(); "
        "progress.record_heartbeat('brewing')"
    )
    pass_time(dog, clock, 599)
    subprocess.run([sys.executable, "-c", child], check=True)
    pass_time(dog, clock, 599)
    assert caught_signals == []
    pass_time(dog, clock, 2)
    assert caught_signals == [signal.SIGINT]


def test_heartbeat_counts_after_the_clock_was_set_back(dog, clock, caught_signals, tmp_path):
    (tmp_path / "stacks").mkdir()
    files = [tmp_path / "stacks" / f"{name}{progress.HEARTBEAT_SUFFIX}" for name in ("1", "2")]
    for file in files:
        file.touch()
    pass_time(dog, clock, 599)
    os.utime(files[0], (1000.0, 1000.0))
    pass_time(dog, clock, 599)
    assert caught_signals == []
    pass_time(dog, clock, 2)
    assert caught_signals == [signal.SIGINT]


def test_time_in_which_the_process_was_stopped_is_no_stall(dog, clock, caught_signals):
    pass_time(dog, clock, 100)
    clock.now += 24 * 3600  # Ctrl-Z, then fg
    dog.check_progress()
    pass_time(dog, clock, 600 - 100 - int(watchdog.MAX_CHECK_GAP_S) - 1)
    assert caught_signals == []
    pass_time(dog, clock, 1)
    assert caught_signals == [signal.SIGINT]
    clock.now += 24 * 3600
    dog.check_progress()
    assert caught_signals == [signal.SIGINT]


def test_no_heartbeat_is_written_without_a_watchdog(monkeypatch):
    monkeypatch.setattr(progress, "_heartbeat_files", [])
    monkeypatch.delenv(STACKS_DIR, raising=False)
    progress.enable_heartbeat_file()
    monkeypatch.setenv(STACKS_DIR, "/nowhere/at/all")
    progress.enable_heartbeat_file()
    assert progress._heartbeat_files == []


def test_nested_run_has_no_watchdog_of_its_own(tmp_path, monkeypatch):
    monkeypatch.delenv(STACKS_DIR, raising=False)
    with watchdog.watch_run(tmp_path, 60.0, 600.0) as enter:
        assert enter is not progress.record_heartbeat
        with watchdog.watch_run(tmp_path / "inner", 60.0, 600.0) as inner:
            before = progress.count_heartbeats()
            inner("episodes")
            assert progress.count_heartbeats() == before + 1
    assert not (tmp_path / "inner").exists()


def test_ended_waits_are_removed():
    with mark_as_awaited(["a", "b"]) as remaining, mark_as_awaited(["c", "b"]):
        remaining.remove("a")
        assert list_awaited_labels() == ["b", "c"]
    assert list_awaited_labels() == []


def test_process_answers_with_its_stacks_and_continues(child, tmp_path):
    process = child(ANSWERING)
    assert collect_stacks(tmp_path, tmp_path / "all.txt") == []
    text = (tmp_path / "all.txt").read_text()
    assert f"== worker (process {process.pid}" in text and "in compute_slowly" in text
    assert process.poll() is None


def test_stopped_process_is_named_and_killed(child, tmp_path):
    process = child(ANSWERING)
    process.send_signal(signal.SIGSTOP)
    silent = collect_stacks(tmp_path, tmp_path / "all.txt")
    assert len(silent) == 1
    assert silent[0].describe_process().startswith(f"worker (process {process.pid}, stopped, ")
    assert "in compute_slowly" not in (tmp_path / "all.txt").read_text()
    watchdog._kill_processes(silent)
    assert process.wait(30) == -signal.SIGKILL


def test_process_without_the_signal_handler_gets_no_signal(child, tmp_path):
    process = child(NO_ANSWER)
    assert collect_stacks(tmp_path, tmp_path / "all.txt") == []
    assert f"process {process.pid}" in (tmp_path / "all.txt").read_text()
    time.sleep(0.1)
    assert process.poll() is None


def test_local_stacks_come_only_from_own_processes(child, tmp_path):
    process = child(ANSWERING)
    other = tmp_path / "another-machine-1.txt"
    ended = tmp_path / f"{socket.gethostname()}-999999999.txt"
    # The process id is in use by a process without the signal handler.
    reused = tmp_path / f"{socket.gethostname()}-{os.getpid()}.txt"
    for path in (other, ended, reused):
        path.write_text("other\n")
    stacks = collect_local_stacks(tmp_path)
    assert f"== worker (process {process.pid}" in stacks and "in compute_slowly" in stacks
    assert stacks.count("==") == 1 and process.poll() is None


REMOTE = RemoteStacks("\n== node b\nin a kernel\n", ("node c does not answer",))


@pytest.mark.parametrize("answer", [REMOTE, None])
def test_remote_stacks_are_collected_without_delaying_the_end(
    clock, caught_signals, tmp_path, monkeypatch, caplog, answer
):
    monkeypatch.setattr(watchdog, "REMOTE_STACKS_S", 0.2)
    folders: list[Path] = []

    def collect_remotely(folder: Path) -> RemoteStacks:
        folders.append(folder)
        if answer is None:
            threading.Event().wait(600)
        return answer or RemoteStacks()

    dog = Watchdog(tmp_path, 60.0, 600.0, clock, collect_remotely)
    dog.check_progress()
    pass_time(dog, clock, 600)
    assert folders == [tmp_path / "stacks"] and caught_signals == [signal.SIGINT]
    written = "".join(path.read_text() for path in tmp_path.glob("stacks-*.txt"))
    assert written == (answer.stacks if answer else "")
    assert ("node c" in caplog.text) == (answer is not None)


@pytest.mark.parametrize("folder", ["", "/nowhere/at/all"])
def test_no_handler_is_installed_without_a_stacks_folder(monkeypatch, folder):
    monkeypatch.setenv(STACKS_DIR, folder)
    before = signal.getsignal(signal.SIGUSR1)
    install_stack_dump_handler("worker")
    assert signal.getsignal(signal.SIGUSR1) == before
    assert not Path("/nowhere").exists()
