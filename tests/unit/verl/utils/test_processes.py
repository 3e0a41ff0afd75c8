"""Tests that all descendants of a process are killed, in any session."""

import os
import signal
import subprocess
import sys
import time
import uuid

import psutil
import pytest

from verl.utils.processes import OWNER_VARIABLE, kill_descendants, wait_and_kill

CHILD = "import time; print(os.getpid(), flush=True); time.sleep(60)"
DETACHMENTS = {
    "own session": "subprocess.Popen([sys.executable, '-c', child], start_new_session=True)",
    "double fork": "os.fork() or (os.setsid(), os.fork() or exec(child))",
}


def is_running(pid):
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("detachment", DETACHMENTS)
@pytest.mark.parametrize("worker_dies", [False, True])
def test_descendants_in_other_sessions_are_killed(detachment, worker_dies):
    owner = uuid.uuid4().hex
    child = f"import os; {CHILD}"
    end = "os._exit(0)" if worker_dies else "time.sleep(60)"
    start = DETACHMENTS[detachment]
    code = f"import os, subprocess, sys, time; child = {child!r}; {start}; time.sleep(1); {end}"
    worker = subprocess.Popen(
        [sys.executable, "-c", code],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, OWNER_VARIABLE: owner},
    )
    assert worker.stdout is not None
    pid = int(worker.stdout.readline())
    try:
        if worker_dies:
            worker.wait()
        kill_descendants(worker.pid, owner)
        deadline = time.monotonic() + 10
        while is_running(pid) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert not is_running(pid)
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()


def test_only_processes_that_do_not_end_are_killed():
    endless, short = (
        subprocess.Popen([sys.executable, "-c", f"import time; time.sleep({seconds})"])
        for seconds in (600, 0)
    )
    processes = [psutil.Process(endless.pid), psutil.Process(short.pid)]
    short.wait(60)
    assert wait_and_kill(processes, timeout_s=0.2) == processes[:1]
    assert endless.wait(60) == -signal.SIGKILL
    assert wait_and_kill(processes, timeout_s=60) == []


def test_zombie_counts_as_ended():
    child = subprocess.Popen([sys.executable, "-c", ""])
    process = psutil.Process(child.pid)
    assert wait_and_kill([process], timeout_s=60) == [], "it has ended, and nobody waited for it"
    child.wait()
