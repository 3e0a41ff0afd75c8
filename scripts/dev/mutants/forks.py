"""Run functions in forked child processes, each with a deadline.

When a child ends, its process group is killed, so no process of its tests remains.
"""

import contextlib
import ctypes
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkProcess
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
FORK_CONTEXT = multiprocessing.get_context("fork")
PR_SET_PDEATHSIG = 1  # option of Linux' prctl: signal that a child gets when its parent dies
POLL_INTERVAL_S = 0.1  # time between two checks of the deadlines


@dataclass
class ForkJob(Generic[Answer]):
    """Function ``work`` to run in a child process within ``deadline`` seconds."""

    name: str
    work: Callable[[], Answer]
    deadline: float


@dataclass
class ForkResult(Generic[Answer]):
    """Result of a job. ``answer`` is None if the child died or exceeded its deadline."""

    name: str
    answer: Answer | None
    timed_out: bool
    seconds: float


@dataclass
class _RunningChild(Generic[Answer]):
    """Child process that runs ``job`` and sends its answer to ``receiver``."""

    job: ForkJob[Answer]
    process: ForkProcess
    receiver: "Connection[None, Answer]"
    started: float = field(default_factory=time.monotonic)

    def poll_result(self) -> ForkResult[Answer] | None:
        """Return the result if the child has answered or ended, or its deadline has passed."""
        seconds = time.monotonic() - self.started
        is_late = seconds > self.job.deadline
        if not (self.receiver.poll() or self.process.exitcode is not None or is_late):
            return None
        answer = None
        with contextlib.suppress(EOFError):  # the child died without an answer
            answer = self.receiver.recv() if self.receiver.poll() else None
        self.kill_group()
        return ForkResult(self.job.name, answer, is_late and answer is None, seconds)

    def kill_group(self) -> None:
        """Kill the child and the processes of its tests."""
        assert self.process.pid is not None  # the process was started
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.kill()  # the child may not have created its process group yet
        self.process.join()
        self.receiver.close()


def run_jobs(jobs: Iterable[ForkJob[Answer]], workers: int) -> Iterator[ForkResult[Answer]]:
    """Run every job in a separate child, ``workers`` at a time. Yield results as they arrive."""
    remaining_jobs = iter(jobs)
    running_children = [_start(job) for job in islice(remaining_jobs, workers)]
    try:
        while running_children:
            wait([child.receiver for child in running_children], timeout=POLL_INTERVAL_S)
            polled_results = [(child, child.poll_result()) for child in running_children]
            finished_results = [
                (child, result) for child, result in polled_results if result is not None
            ]
            for child, result in finished_results:
                running_children.remove(child)
                running_children += [_start(job) for job in islice(remaining_jobs, 1)]
                yield result
    finally:
        for child in running_children:
            child.kill_group()


def run_one_job(name: str, work: Callable[[], Answer], deadline: float) -> Answer:
    """Run ``work`` in a child process and return its result.

    Raises ``RuntimeError`` if the child died or exceeded the deadline.
    """
    result = next(run_jobs([ForkJob(name, work, deadline)], workers=1))
    if result.answer is None:
        failure_text = (
            f"did not end within {deadline:.0f} s" if result.timed_out else "died; see its output"
        )
        raise RuntimeError(f"{name} {failure_text}")
    return result.answer


def silence_output() -> None:
    """Redirect stdout and stderr of this process to /dev/null."""
    null_descriptor = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null_descriptor, 1)
    os.dup2(null_descriptor, 2)


def _start(job: ForkJob[Answer]) -> _RunningChild[Answer]:
    receiver, sender = FORK_CONTEXT.Pipe(duplex=False)
    process = FORK_CONTEXT.Process(target=_run_child, args=(job.work, sender))
    process.start()
    sender.close()
    return _RunningChild(job, process, receiver)


def _run_child(work: Callable[[], Answer], sender: "Connection[Answer, None]") -> None:
    # Create a process group, so that the processes of the tests are killed with the child.
    os.setsid()
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    try:
        sender.send(work())
    finally:
        os._exit(0)  # do not run the exit handlers that were inherited from the parent
