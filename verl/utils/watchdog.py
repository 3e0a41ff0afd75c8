"""Watchdog thread that logs what the driver waits for and ends a stalled run.

After a time without progress:

    quiet_s    log "waiting for update_actor for 60 s: actor[rank 1].update_actor", again at 120 s
    stall_s    write the stacks of all processes, log a message and raise an error in the run
    GRACE_S    later: end the process. If the whole driver is stopped, the guard process kills it.

Three events count as progress. A part of a training step starts or ends (``Stopwatch``). Another
part of the run begins (``enter_stage``). The driver, or a process that reports to it, sends a
heartbeat (``verl.utils.progress``).
"""

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil

from verl.utils import progress
from verl.utils.driver_guard import DriverGuard
from verl.utils.stacks import (
    STACKS_DIR,
    RemoteStacks,
    StackRequest,
    answer_with_stacks,
    collect_stacks,
)
from verl.utils.waits import Stopwatch, list_awaited

logger = logging.getLogger(__name__)
POLL_S = 1.0  # interval of the checks
GRACE_S = 120.0  # time for a stalled run to end with its error
EXIT_STATUS = 1
REMOTE_STACKS_S = 60.0  # time to collect the stacks of other nodes
MAX_LABELS = 8  # awaited labels in one line


class Stalled(RuntimeError):
    """The run made no progress for ``trainer.stall_timeout_s``."""


class Watchdog:
    """Context manager that watches the progress of its ``with`` block from a thread.

    Args:
        logs: directory for the stacks, ``stacks-<time>.txt``.
        quiet_s: seconds without progress before a log line; the next ones follow after 2, 4, ...
            times as many.
        stall_s: seconds without progress before the run is ended; None: never.
        clock: function that returns seconds.

    A block that the watchdog ends raises ``Stalled`` from the exception that it raised. The process
    exits with ``EXIT_STATUS`` if the block does not end within ``GRACE_S``.
    """

    def __init__(
        self,
        logs: Path,
        quiet_s: float,
        stall_s: float | None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._logs = logs
        self._answers = logs / "stacks"
        self._quiet_s = quiet_s
        self._stall_s = stall_s
        self._clock = clock
        self._stage = "start"
        self._parts = Stopwatch()
        self._last_seen: tuple[object, ...] = ()
        self._progress_time = clock()
        self._next_s = quiet_s
        self._stall_message: str | None = None
        self._over = threading.Event()
        self._guard: DriverGuard | None = None
        self._handles_sigint = False  # true if SIGINT was ignored before the watchdog's handler
        self._collect_remote_stacks: Callable[[Path], RemoteStacks] | None = None
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def enter_stage(self, stage: str) -> None:
        """Record that part ``stage`` of the run begins, which is progress; log lines name it."""
        self._stage = stage

    def follow_stopwatch(self, parts: Stopwatch) -> None:
        """Treat starts and ends of the stopwatch's parts as progress, and log its running part."""
        self._parts = parts

    def set_remote_stacks(self, collect_remote_stacks: Callable[[Path], RemoteStacks]) -> None:
        """Set the function that collects the stacks of other nodes into a directory."""
        self._collect_remote_stacks = collect_remote_stacks

    def __enter__(self) -> "Watchdog":
        self._answers.mkdir(parents=True, exist_ok=True)
        os.environ[STACKS_DIR] = str(self._answers)
        if self._stall_s is not None:
            answer_with_stacks("driver")
            self._install_sigint_handler()
            self._guard = DriverGuard(self._stall_s + GRACE_S)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._over.set()
        self._thread.join()
        if self._guard is not None:
            self._guard.close()
        if self._handles_sigint:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.pop(STACKS_DIR, None)
        shutil.rmtree(self._answers, ignore_errors=True)
        if self._stall_message is not None:
            raise Stalled(self._stall_message) from error

    def check_progress(self) -> None:
        """Check once for progress; log a line, end the run or exit the process if it is time."""
        current_time = self._clock()
        stopwatch = self._parts
        reported = progress.find_last_heartbeat(self._answers)
        progress_state = (self._stage, stopwatch.changes, progress.count_heartbeats(), reported)
        if self._stall_message is not None:
            if current_time - self._progress_time >= GRACE_S:
                logger.critical("the run did not end within %g s: exiting the process", GRACE_S)
                os._exit(EXIT_STATUS)
        elif progress_state != self._last_seen:
            self._last_seen = progress_state
            self._progress_time = current_time
            self._next_s = self._quiet_s
        else:
            self._handle_no_progress(stopwatch.running_parts[-1:] or [self._stage], current_time)

    def _install_sigint_handler(self) -> None:
        # A shell starts background jobs with SIGINT ignored. SIGINT of others is still ignored.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            self._handles_sigint = True
            signal.signal(signal.SIGINT, self._handle_sigint)

    def _handle_sigint(self, *_: object) -> None:
        if self._stall_message is not None:
            raise KeyboardInterrupt

    def _run(self) -> None:
        while not self._over.wait(POLL_S):
            if self._guard is not None:
                self._guard.send_heartbeat()
            try:
                self.check_progress()
            except OSError:  # a file of another process has vanished; the next check may succeed
                logger.warning("the watchdog could not check for progress", exc_info=True)

    def _append_remote_stacks(self, target: Path) -> list[str]:
        silent: list[str] = []
        collect = self._collect_remote_stacks
        if collect is None:
            return silent

        def collect_and_write() -> None:
            remote_stacks = collect(self._answers)
            silent.extend(remote_stacks.silent_nodes)
            with target.open("a", encoding="utf-8") as file:
                file.write(remote_stacks.stacks)

        # Collecting from other nodes may fail or hang as they do. The run must end nevertheless.
        thread = threading.Thread(target=collect_and_write, name="stacks elsewhere", daemon=True)
        thread.start()
        thread.join(REMOTE_STACKS_S)
        return silent

    def _handle_no_progress(self, where: list[str], now: float) -> None:
        seconds = now - self._progress_time
        labels = _format_labels(list_awaited())
        if seconds >= self._next_s:
            logger.info("waiting for %s for %.0f s%s", where[0], seconds, labels)
            self._next_s *= 2
        if self._stall_s is not None and seconds >= self._stall_s:
            self._progress_time = now  # GRACE_S starts here
            self._end_run(f"{where[0]} made no progress for {seconds:.0f} s{labels}")

    def _end_run(self, cause: str) -> None:
        path = self._logs / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        silent: list[StackRequest] = []
        try:
            silent = collect_stacks(self._answers, path)
        except OSError:  # for example a full disk; the run must end nevertheless
            logger.warning("the stacks could not be written", exc_info=True)
        stopped_processes = [f"{request.describe_process()} does not run" for request in silent]
        message = "; ".join([cause, *stopped_processes, *self._append_remote_stacks(path)])
        self._stall_message = (
            f"{message} (trainer.stall_timeout_s={self._stall_s:g}; stacks: {path})"
        )
        logger.critical("%s", self._stall_message)
        _kill_processes(silent)
        main = threading.main_thread().ident
        if main is not None:
            # SIGINT raises KeyboardInterrupt, the only exception that Ray propagates while it
            # waits. Send it to the main thread, so that a system call there returns.
            signal.pthread_kill(main, signal.SIGINT)


@contextlib.contextmanager
def watch_run(logs: Path, quiet_s: float, stall_s: float | None) -> Iterator[Callable[[str], None]]:
    """Run a watchdog around the ``with`` block, and yield its method ``enter_stage``.

    In a child process of a watched run, the function sends a heartbeat to that run's watchdog.
    """
    if STACKS_DIR in os.environ:
        yield progress.record_heartbeat
        return
    with Watchdog(logs, quiet_s, stall_s) as watchdog:
        yield watchdog.enter_stage


def _format_labels(labels: list[str]) -> str:
    if not labels:
        return ""
    suffix = f" and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
    return f": {', '.join(labels[:MAX_LABELS])}{suffix}"


def _kill_processes(silent: list[StackRequest]) -> None:
    # A stopped process does not react to a request to end and would outlive the run.
    for request in silent:
        with contextlib.suppress(psutil.NoSuchProcess):
            request.process.kill()
