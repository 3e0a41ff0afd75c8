"""Work done in forked children: an answer through a file, a deadline, nothing left behind."""

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
    """``work()`` to be done in a child within ``deadline`` seconds."""

    name: str
    work: Callable[[], Answer]
    deadline: float


@dataclass
class Done(Generic[Answer]):
    """What became of a job: its answer, or None where the child died or its time was up."""

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

    def seconds(self) -> float:
        return time.monotonic() - self.started


def run_jobs(jobs: Iterable[ForkJob[Answer]], workers: int) -> Iterator[Done[Answer]]:
    """Every job in a child of its own, ``workers`` at a time; results as they come."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        waiting = enumerate(jobs)
        running = [
            _start(job, Path(folder) / str(number)) for number, job in islice(waiting, workers)
        ]
        try:
            while running:
                for child, done in _ended(running):
                    running.remove(child)
                    running += [_start(job, Path(folder) / str(n)) for n, job in islice(waiting, 1)]
                    yield done
                time.sleep(0.005)
        finally:
            for child in running:
                _kill(child.pid)


def _ended(running: list[_Running[Answer]]) -> list[tuple[_Running[Answer], Done[Answer]]]:
    """The children that are done or late, with what became of them."""
    polled = [(child, _poll(child)) for child in running]
    return [(child, done) for child, done in polled if done is not None]


def run_one(name: str, work: Callable[[], Answer], deadline: float) -> Answer:
    """``work()`` done in a child. Raises ``RuntimeError`` when it died or its time was up."""
    done = next(run_jobs([ForkJob(name, work, deadline)], workers=1))
    if done.answer is None:
        how = f"was not done after {deadline:.0f} s" if done.timed_out else "died, see above"
        raise RuntimeError(f"{name} {how}")
    return done.answer


def silence() -> None:
    """Point stdout and stderr of this process to nowhere."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)


def _start(job: ForkJob[Answer], path: Path) -> _Running[Answer]:
    pid = os.fork()
    if pid:
        return _Running(job, pid, path)
    # The child: a group of its own, so that what its tests start can be ended with it.
    try:
        os.setsid()
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        answer = job.work()
        path.with_suffix(".part").write_bytes(pickle.dumps(answer))
        path.with_suffix(".part").rename(path)
    finally:
        os._exit(0)


def _poll(child: _Running[Answer]) -> Done[Answer] | None:
    ended, _ = os.waitpid(child.pid, os.WNOHANG)
    late = child.seconds() > child.job.deadline
    if not ended and not late:
        return None
    if not ended:
        _kill(child.pid)
    else:
        _kill_group(child.pid)
    answer = None
    if child.path.exists():
        answer = pickle.loads(child.path.read_bytes())  # written by our own child
        child.path.unlink()
    return Done(child.job.name, answer, late and answer is None, child.seconds())


def _kill(pid: int) -> None:
    _kill_group(pid)
    os.waitpid(pid, 0)


def _kill_group(group: int) -> None:
    try:
        os.killpg(group, signal.SIGKILL)
    except ProcessLookupError:
        return
