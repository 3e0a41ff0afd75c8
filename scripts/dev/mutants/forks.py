"""Run functions in forked child processes, with a deadline and a result file for each.

A child's process group is killed at its end, so no process remains.
"""

import ctypes
import os
import pickle
import signal
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Generic, TypeVar

Answer = TypeVar("Answer")
PR_SET_PDEATHSIG = 1


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
class _Running(Generic[Answer]):
    job: ForkJob[Answer]
    pid: int
    path: Path
    started: float = field(default_factory=time.monotonic)

    def elapsed_seconds(self) -> float:
        return time.monotonic() - self.started


def run_jobs(jobs: Iterable[ForkJob[Answer]], workers: int) -> Iterator[ForkResult[Answer]]:
    """Run every job in a separate child, ``workers`` at a time. Yield results as they arrive."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        numbered_jobs = enumerate(jobs)
        children = _start_next(numbered_jobs, workers, Path(folder))
        try:
            yield from _run_until_empty(children, numbered_jobs, Path(folder))
        finally:
            for child in children:
                _kill(child.pid)


def _run_until_empty(
    running: list[_Running[Answer]],
    waiting: Iterator[tuple[int, ForkJob[Answer]]],
    folder: Path,
) -> Iterator[ForkResult[Answer]]:
    """Yield results, and start a waiting job for each child that ends. Updates ``running``."""
    while running:
        for child, result in _collect_ended(running):
            running.remove(child)
            running += _start_next(waiting, 1, folder)
            yield result
        time.sleep(0.005)


def _start_next(
    waiting: Iterator[tuple[int, ForkJob[Answer]]], count: int, folder: Path
) -> list[_Running[Answer]]:
    return [_start(job, folder / str(job_number)) for job_number, job in islice(waiting, count)]


def _collect_ended(
    running: list[_Running[Answer]],
) -> list[tuple[_Running[Answer], ForkResult[Answer]]]:
    """Return the children that have ended or exceeded their deadline, with their results."""
    polled = [(child, _poll(child)) for child in running]
    return [(child, result) for child, result in polled if result is not None]


def run_one(name: str, work: Callable[[], Answer], deadline: float) -> Answer:
    """Run ``work`` in a child process and return its result.

    Raises ``RuntimeError`` if the child died or exceeded the deadline.
    """
    result = next(run_jobs([ForkJob(name, work, deadline)], workers=1))
    if result.answer is None:
        how = f"did not end within {deadline:.0f} s" if result.timed_out else "died; see its output"
        raise RuntimeError(f"{name} {how}")
    return result.answer


def silence_output() -> None:
    """Redirect stdout and stderr of this process to /dev/null."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _start(job: ForkJob[Answer], path: Path) -> _Running[Answer]:
    pid = os.fork()
    if pid:
        return _Running(job, pid, path)
    # The child gets a new process group, so that processes of its tests are killed with it.
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        answer = job.work()
        path.with_suffix(".part").write_bytes(pickle.dumps(answer))
        path.with_suffix(".part").rename(path)
    finally:
        os._exit(0)


def _poll(child: _Running[Answer]) -> ForkResult[Answer] | None:
    ended, _ = os.waitpid(child.pid, os.WNOHANG)
    is_late = child.elapsed_seconds() > child.job.deadline
    if not ended and not is_late:
        return None
    if not ended:
        _kill(child.pid)
    else:
        _kill_group(child.pid)
    answer = None
    if child.path.exists():
        answer = pickle.loads(child.path.read_bytes())  # written by a child of this process
        child.path.unlink()
    return ForkResult(child.job.name, answer, is_late and answer is None, child.elapsed_seconds())


def _kill(pid: int) -> None:
    _kill_group(pid)
    os.waitpid(pid, 0)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
