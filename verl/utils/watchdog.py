"""No silent stall: a thread that says what the driver waits for, and ends a run that stands still.

    quiet_s    "waiting for update_actor since 60 s: actor[rank 1].update_actor", again at 120 s ...
    stall_s    stacks of all processes, a sentence, and the run ends as with any other error
    GRACE_S    ... and at once where it could not be ended so; by the guard (``verl.utils.guard``)
               where the whole driver stands still

A run moves when a part of a step begins or ends (``Stopwatch``), when the run goes on from one
stage to the next (``enter``), and when anything comes further (``verl.utils.progress``), in the
driver or in a process that reports to it.
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
from verl.utils.guard import Guard
from verl.utils.stacks import STACKS_DIR, Asked, Elsewhere, answer_with_stacks, collect_stacks
from verl.utils.timing import Stopwatch
from verl.utils.waits import awaited

logger = logging.getLogger(__name__)
LOOK_S = 1.0  # between two looks
GRACE_S = 120.0  # for a stalled run to end in order
EXIT_STATUS = 1
ELSEWHERE_S = 60.0  # for processes of other machines to say where they are
NAMED = 8  # things waited for that a line names


class Stalled(RuntimeError):
    """Nothing moved for ``trainer.stall_timeout_s``."""


class Watchdog:
    """Watches the block that it is the context of, from a thread of its own.

    Args:
        logs: stacks are written here, as ``stacks-<time>.txt``.
        quiet_s: seconds without movement after which a line is logged, then after twice as many.
        stall_s: seconds without movement after which the run is ended; None: never.
        clock: gives seconds.

    The block raises ``Stalled`` where the watchdog has ended it, from whatever it raised then. The
    process ends with ``EXIT_STATUS`` where the block does not end within ``GRACE_S``.
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
        self._seen: tuple[object, ...] = ()
        self._moved = clock()
        self._next_s = quiet_s
        self._verdict: str | None = None
        self._over = threading.Event()
        self._guard: Guard | None = None
        self._listens = False  # to its own signal, in a process that was started to ignore it
        self._elsewhere: Callable[[Path], Elsewhere] = _nobody
        self._thread = threading.Thread(target=self._run, name="watchdog", daemon=True)

    def enter(self, stage: str) -> None:
        """The run is in ``stage`` from now on."""
        self._stage = stage

    def follow(self, parts: Stopwatch) -> None:
        """Name what ``parts`` measures rather than the stage, while it measures anything."""
        self._parts = parts

    def ask_also(self, elsewhere: Callable[[Path], Elsewhere]) -> None:
        """Have ``elsewhere``, given the directory in which processes answer, say what stacks those
        of other machines have, and which machines are silent.
        """
        self._elsewhere = elsewhere

    def __enter__(self) -> "Watchdog":
        self._answers.mkdir(parents=True, exist_ok=True)
        os.environ[STACKS_DIR] = str(self._answers)
        if self._stall_s is not None:
            answer_with_stacks("driver")
            self._listen()
            self._guard = Guard(self._stall_s + GRACE_S)
        self._thread.start()
        return self

    def __exit__(self, _: object, error: BaseException | None, *__: object) -> None:
        self._over.set()
        self._thread.join()
        if self._guard is not None:
            self._guard.close()
        if self._listens:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.environ.pop(STACKS_DIR, None)
        shutil.rmtree(self._answers, ignore_errors=True)
        if self._verdict is not None:
            raise Stalled(self._verdict) from error

    def look(self) -> None:
        """Look once whether the run has moved, and say or do what is due."""
        now = self._clock()
        parts = self._parts
        reported = progress.last_reported(self._answers)
        seen = (self._stage, parts.changes, progress.moves(), reported)
        if self._verdict is not None:
            if now - self._moved >= GRACE_S:
                logger.critical("the run did not end within %g s: ending the process", GRACE_S)
                os._exit(EXIT_STATUS)
        elif seen != self._seen:
            self._seen = seen
            self._moved = now
            self._next_s = self._quiet_s
        else:
            self._stands_still(parts.under_way[-1:] or [self._stage], now)

    def _listen(self) -> None:
        # A shell starts what it puts in the background deaf to SIGINT. It stays deaf to others'.
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
            self._listens = True
            signal.signal(signal.SIGINT, self._hear)

    def _hear(self, *_: object) -> None:
        if self._verdict is not None:
            raise KeyboardInterrupt

    def _run(self) -> None:
        while not self._over.wait(LOOK_S):
            if self._guard is not None:
                self._guard.beat()
            try:
                self.look()
            except OSError:  # of a file of another process; the next look may find it
                logger.warning("the watchdog could not look", exc_info=True)

    def _ask_elsewhere(self, target: Path) -> list[str]:
        silent: list[str] = []

        def ask() -> None:
            heard = self._elsewhere(self._answers)
            silent.extend(heard.silent)
            with target.open("a", encoding="utf-8") as file:
                file.write(heard.told)

        # Who asks other machines may fail or hang as they do, and the run has to end all the same.
        asking = threading.Thread(target=ask, name="stacks elsewhere", daemon=True)
        asking.start()
        asking.join(ELSEWHERE_S)
        return silent

    def _stands_still(self, where: list[str], now: float) -> None:
        seconds = now - self._moved
        labels = _listed(awaited())
        if seconds >= self._next_s:
            logger.info("waiting for %s since %.0f s%s", where[0], seconds, labels)
            self._next_s *= 2
        if self._stall_s is not None and seconds >= self._stall_s:
            self._moved = now  # from here on the grace counts
            self._end(f"{where[0]} stands still since {seconds:.0f} s{labels}")

    def _end(self, what: str) -> None:
        path = self._logs / f"stacks-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        silent: list[Asked] = []
        try:
            silent = collect_stacks(self._answers, path)
        except OSError:  # a full disk, perhaps: the run has to end all the same
            logger.warning("the stacks could not be written", exc_info=True)
        stopped = [f"{one.described()} does not run" for one in silent]
        found = "; ".join([what, *stopped, *self._ask_elsewhere(path)])
        self._verdict = f"{found} (trainer.stall_timeout_s={self._stall_s:g}; stacks: {path})"
        logger.critical("%s", self._verdict)
        _kill(silent)
        main = threading.main_thread().ident
        if main is not None:
            # A KeyboardInterrupt, the one exception that Ray passes on while it waits; sent to the
            # thread, so that a system call returns.
            signal.pthread_kill(main, signal.SIGINT)


@contextlib.contextmanager
def watched(logs: Path, quiet_s: float, stall_s: float | None) -> Iterator[Callable[[str], None]]:
    """A watchdog around the block, which is given its ``enter``. In a process that a watched run
    has started, that run's watchdog hears of the stages.
    """
    if STACKS_DIR in os.environ:
        yield progress.move
        return
    with Watchdog(logs, quiet_s, stall_s) as watchdog:
        yield watchdog.enter


def _listed(labels: list[str]) -> str:
    if not labels:
        return ""
    more = f" and {len(labels) - NAMED} more" if len(labels) > NAMED else ""
    return f": {', '.join(labels[:NAMED])}{more}"


def _nobody(_answers: Path) -> Elsewhere:
    return Elsewhere()


def _kill(silent: list[Asked]) -> None:
    # What is stopped hears no request to end, and would outlive the run.
    for one in silent:
        try:
            one.process.kill()
        except psutil.NoSuchProcess:
            logger.debug("%s is gone", one.name)
