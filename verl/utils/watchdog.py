"""Watchdog thread that logs what the driver waits for and ends a stalled run.

Actions by the time without progress:

    quiet_s            log "waiting for update_actor for 60 s: actor[rank 1].update_actor";
                       log it again after 2, 4, ... times quiet_s
    stall_s            write the stacks of all processes, log a message, raise an error in the run
    stall_s + GRACE_S  end the process; if the whole driver is stopped, ``DriverGuard`` kills it

Three events count as progress. A part of a training step starts or ends (``Stopwatch``). Another
stage of the run begins (``enter_stage``). The driver or a child process records a heartbeat
(``verl.utils.progress``).
"""

import contextlib
import logging
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import psutil

from verl.utils import progress
from verl.utils.driver_guard import DriverGuard
from verl.utils.stacks import (
    STACKS_DIR,
    RemoteStacks,
    StackRequest,
    collect_stacks,
    install_stack_dump_handler,
)
from verl.utils.waits import BackgroundCall, Stopwatch, list_awaited_labels

logger = logging.getLogger(__name__)
POLL_S = 1.0  # seconds between two checks
MAX_CHECK_GAP_S = 60.0  # maximum time between two checks that counts as time without progress
GRACE_S = 120.0  # maximum time in which a stalled run can end with an error
EXIT_STATUS = 1  # of a stalled process that does not end by itself
REMOTE_STACKS_S = 60.0  # maximum time to collect the stacks of other nodes
MAX_LABELS = 8  # maximum number of awaited results in a log line


class Stalled(RuntimeError):
    """Error: the run made no progress for ``trainer.stall_timeout_s``."""


class Watchdog:
    """Context manager that watches the progress of its ``with`` block from a thread.

    The first log line follows after ``quiet_s`` seconds without progress, others after 2, 4, ...
    times ``quiet_s``. After ``stall_s`` seconds (None: never) the watchdog writes the stacks to a
    file in ``logs`` and interrupts the block. At its exit the block raises ``Stalled``. If the
    block does not end within ``GRACE_S``, the process exits with ``EXIT_STATUS``. ``clock`` returns
    seconds. ``collect_remote_stacks`` collects the stacks of other nodes into a directory.
    """

    def __init__(
        self,
        logs: Path,
        quiet_s: float,
        stall_s: float | None,
        clock: Callable[[], float] = time.monotonic,
        collect_remote_stacks: Callable[[Path], RemoteStacks] | None = None,
    ) -> None:
        self._logs_folder = logs
        self._stacks_folder = logs / "stacks"
        self._quiet_s = quiet_s
        self._stall_s = stall_s
        self._clock = clock
        self._stage = "start"
        self._stopwatch = Stopwatch()
        self._last_progress_state: tuple[object, ...] = ()
        self._last_progress_time = self._last_check_time = clock()
        self._next_log_after_s = quiet_s
        self._stall_message: str | None = None
        self._end_event = threading.Event()
        self._driver_guard: DriverGuard | None = None
        self._handles_sigint = False  # True if the watchdog replaced an ignored SIGINT
        self._collect_remote_stacks = collect_remote_stacks
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def enter_stage(self, stage: str) -> None:
        """Record that ``stage`` begins, which counts as progress. Log lines name the stage."""
        self._stage = stage

    def follow_stopwatch(self, stopwatch: Stopwatch) -> None:
        """Count changes of the stopwatch's parts as progress, and log its running part."""
        self._stopwatch = stopwatch

    def __enter__(self) -> "Watchdog":
        self._stacks_folder.mkdir(parents=True, exist_ok=True)
        os.environ[STACKS_DIR] = str(self._stacks_folder)
        if self._stall_s is not None:
            install_stack_dump_handler("driver")
            self._install_sigint_handler()
            self._driver_guard = DriverGuard(self._stall_s + GRACE_S)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._end_event.set()
        self._thread.join()
        if self._driver_guard is not None:
            self._driver_guard.close()
        if self._handles_sigint:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.pop(STACKS_DIR, None)
        shutil.rmtree(self._stacks_folder, ignore_errors=True)
        if self._stall_message is not None:
            raise Stalled(self._stall_message) from error

    def check_progress(self) -> None:
        """Check for progress once, and log or end a run without progress."""
        current_time = self._clock()
        # Checks are rare only if this process was stopped, for example by Ctrl-Z. The run could not
        # make progress then.
        check_gap_s = current_time - self._last_check_time
        self._last_progress_time += max(0.0, check_gap_s - MAX_CHECK_GAP_S)
        self._last_check_time = current_time
        stopwatch = self._stopwatch
        progress_state = (
            self._stage,
            stopwatch.changes,
            progress.count_heartbeats(),
            progress.read_heartbeat_times(self._stacks_folder),
        )
        if self._stall_message is not None:
            if current_time - self._last_progress_time >= GRACE_S:
                logger.critical("the run did not end within %g s: exiting the process", GRACE_S)
                os._exit(EXIT_STATUS)
        elif progress_state != self._last_progress_state:
            self._last_progress_state = progress_state
            self._last_progress_time = current_time
            self._next_log_after_s = self._quiet_s
        else:
            self._log_or_end_run(stopwatch.running_parts[-1:] or [self._stage], current_time)

    def _install_sigint_handler(self) -> None:
        # A shell starts background jobs with SIGINT ignored, but _end_run needs SIGINT. The new
        # handler ignores SIGINT until the watchdog ends the run.
        is_main_thread = threading.current_thread() is threading.main_thread()
        if is_main_thread and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            self._handles_sigint = True
            signal.signal(signal.SIGINT, self._handle_sigint)

    def _handle_sigint(self, *_: object) -> None:
        if self._stall_message is not None:
            raise KeyboardInterrupt

    def _run(self) -> None:
        while not self._end_event.wait(POLL_S):
            if self._driver_guard is not None:
                self._driver_guard.send_heartbeat()
            try:
                self.check_progress()
            except OSError:  # for example a heartbeat file was removed; the next check may succeed
                logger.warning("the watchdog could not check for progress", exc_info=True)

    def _append_remote_stacks(self, target: Path) -> tuple[str, ...]:
        if self._collect_remote_stacks is None:
            return ()
        collect = partial(self._collect_remote_stacks, self._stacks_folder)
        try:
            # Limit the time: nodes may hang, but the run must end.
            remote_stacks = BackgroundCall(collect, "stacks elsewhere").get_result(REMOTE_STACKS_S)
            with target.open("a", encoding="utf-8") as file:
                file.write(remote_stacks.stacks)
        except Exception:  # for example a node is lost
            logger.warning("the stacks of other nodes could not be collected", exc_info=True)
            return ()
        return remote_stacks.silent_nodes

    def _log_or_end_run(self, waiting_parts: list[str], current_time: float) -> None:
        stalled_s = current_time - self._last_progress_time
        awaited_text = _format_awaited_labels(list_awaited_labels())
        if stalled_s >= self._next_log_after_s:
            logger.info("waiting for %s for %.0f s%s", waiting_parts[0], stalled_s, awaited_text)
            self._next_log_after_s *= 2
        if self._stall_s is not None and stalled_s >= self._stall_s:
            self._last_progress_time = current_time  # GRACE_S is measured from now
            self._end_run(
                f"{waiting_parts[0]} made no progress for {stalled_s:.0f} s{awaited_text}"
            )

    def _end_run(self, cause: str) -> None:
        path = self._logs_folder / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        unanswered_requests: list[StackRequest] = []
        try:
            unanswered_requests = collect_stacks(self._stacks_folder, path)
        except OSError:  # for example a full disk, in which case the run must end too
            logger.warning("the stacks could not be written", exc_info=True)
        stopped_processes = [
            f"{request.describe_process()} does not run" for request in unanswered_requests
        ]
        message = "; ".join([cause, *stopped_processes, *self._append_remote_stacks(path)])
        self._stall_message = (
            f"{message} (trainer.stall_timeout_s={self._stall_s:g}; stacks: {path})"
        )
        logger.critical("%s", self._stall_message)
        _kill_processes(unanswered_requests)
        main_thread_id = threading.main_thread().ident
        if main_thread_id is not None:
            # SIGINT raises KeyboardInterrupt, the only exception that Ray propagates while it
            # waits. Send the signal to the main thread, so that a blocking system call returns.
            signal.pthread_kill(main_thread_id, signal.SIGINT)


@contextlib.contextmanager
def watch_run(logs: Path, quiet_s: float, stall_s: float | None) -> Iterator[Callable[[str], None]]:
    """Run a watchdog during the block. Yield its ``enter_stage``, to call when a stage begins.

    In a child process, whose parent runs the watchdog, yield ``record_heartbeat`` instead.
    """
    if STACKS_DIR in os.environ:
        yield progress.record_heartbeat
        return
    with Watchdog(logs, quiet_s, stall_s) as watchdog:
        yield watchdog.enter_stage


def _format_awaited_labels(labels: list[str]) -> str:
    if not labels:
        return ""
    suffix = f" and {len(labels) - MAX_LABELS} more" if len(labels) > MAX_LABELS else ""
    return f": {', '.join(labels[:MAX_LABELS])}{suffix}"


def _kill_processes(requests: list[StackRequest]) -> None:
    # Kill stopped processes: they do not react to SIGTERM and would remain after the run.
    for request in requests:
        with contextlib.suppress(psutil.NoSuchProcess):
            request.process.kill()
