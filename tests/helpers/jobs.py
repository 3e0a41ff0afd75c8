"""Training jobs as a user starts them: a process with a deadline and a check of leftover processes.

job = start(words, log); job.finish(240); job.left_over(30) == []
"""

import atexit
import contextlib
import os
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil

from verl.utils.processes import is_running

ROOT = Path(__file__).resolve().parents[2]
LOOK_S = 0.2  # seconds between two scans of a job's processes
TAIL = 6000  # characters of the log that an assertion shows
# Ray's agents detect at once that their node is gone. They then wait a minute for its control
# server before they exit.
AGENTS = ("ray::DashboardAgent", "ray::RuntimeEnvAgent")


class Job:
    """Running command and all processes that it started, found by repeated scans of its
    descendants.
    """

    def __init__(
        self,
        command: list[str],
        log: Path,
        cwd: Path = ROOT,
        environ: Mapping[str, str] | None = None,
    ) -> None:
        self.log = log
        environ = {
            **os.environ,
            **(environ or {}),
            # In another directory Python does not find the packages by itself.
            "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
            "HF_HUB_OFFLINE": "1",
            "TOKENIZERS_PARALLELISM": "false",
            "OMP_NUM_THREADS": "1",
        }
        with log.open("ab") as out:
            self.process = subprocess.Popen(
                command,
                cwd=cwd,
                env=environ,
                stdout=out,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # a process group, to which a test can send a signal
            )
        self._known: set[psutil.Process] = {psutil.Process(self.process.pid)}
        atexit.register(self.end)  # an interrupted test session leaves no process
        self._watcher = threading.Thread(target=self._watch, daemon=True)
        self._watcher.start()

    def _watch(self) -> None:
        while self.process.poll() is None or self.family():
            self._look()
            time.sleep(LOOK_S)

    def _look(self) -> None:
        # Orphaned grandchildren are also listed if a scan saw them before.
        children = defaultdict(list)
        for process in psutil.process_iter():  # one scan for all of them: it reads all of /proc
            with contextlib.suppress(psutil.Error):
                children[process.ppid()].append(process)
        unseen = self.family()
        while unseen:
            new_processes = set(children[unseen.pop().pid]) - self._known
            self._known |= new_processes
            unseen += new_processes

    def read_log_end(self) -> str:
        """Return the end of the job's output."""
        return self.log.read_text(errors="replace")[-TAIL:]

    def finish(self, timeout_s: float) -> None:
        """Wait for exit status 0. Otherwise end all processes and fail with the end of the log."""
        status = self.wait(timeout_s)
        assert status == 0, f"exit status {status}\n{self.read_log_end()}"

    def wait(self, timeout_s: float) -> int:
        """Return the exit status. After the timeout, end all processes and fail with the end of the
        log.
        """
        try:
            return self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.end()
            raise AssertionError(
                f"not ended after {timeout_s:g} s\n{self.read_log_end()}"
            ) from None

    def wait_for(self, condition: Callable[[], Any], timeout_s: float) -> None:
        """Wait until ``condition()`` holds. Fail if the job ends before."""
        deadline = time.monotonic() + timeout_s
        while not condition():
            if self.process.poll() is not None or time.monotonic() > deadline:
                status = self.process.poll()
                self.end()
                raise AssertionError(
                    f"the condition did not hold, exit status {status}\n{self.read_log_end()}"
                )
            time.sleep(0.02)

    def kill_driver(self) -> None:
        """Kill only the process that was started, with ``kill -9``."""
        self._look()
        self.process.kill()
        self.process.wait(30)

    def family(self) -> list[psutil.Process]:
        """Return the living processes of the job, without zombies."""
        return [process for process in list(self._known) if is_running(process)]

    def left_over(self, timeout_s: float, apart_from: tuple[str, ...] = ()) -> list[str]:
        """Describe each process of the job that still lives ``timeout_s`` after this call.

        The call returns early if no process is left. Processes whose command line begins with one
        of ``apart_from`` do not count.
        """
        deadline = time.monotonic() + timeout_s
        while survivors := [
            line
            for line in map(_describe_process, self.family())
            if line and not line.startswith(apart_from)
        ]:
            if time.monotonic() > deadline:
                return survivors
            time.sleep(LOOK_S)
        return []

    def end(self) -> None:
        """Kill all processes of the job."""
        self._look()
        for process in self.family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(self.family(), timeout=10)


def start(arguments: list[str], log: Path, environ: Mapping[str, str] | None = None) -> Job:
    """Start ``python -m verl.trainer.main_ppo *arguments``; its output is appended to ``log``."""
    return Job([sys.executable, "-m", "verl.trainer.main_ppo", *arguments], log, environ=environ)


def children() -> set[int]:
    """Return the process ids of all direct and indirect children of this process."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def _describe_process(process: psutil.Process) -> str:
    """Return command line, number and status: "ray::Worker [71, running]"; "" if it has ended."""
    try:
        command = " ".join(process.cmdline()).strip()
        return command and f"{command} [{process.pid}, {process.status()}]"
    except psutil.Error:
        return ""
