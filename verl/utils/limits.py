"""Bounds for code of others: how long a call may take, how much memory a process may have."""

import contextlib
import ctypes
import resource
import signal
import sys
import threading
import time
from collections.abc import Iterator

AGAIN_S = 1.0  # what swallowed the first alarm gets another one


class TimeLimit(RuntimeError):
    """A call took longer than it was given."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Let the block raise ``TimeLimit``, which names ``what``, once it has run for ``seconds``.

    A block that was late raises it also where it caught the exception, cancelled the alarm or
    raised another error: the clock decides. Python code is interrupted until it ends. Native code
    in another thread than the main one runs on, and so does code that catches everything: its
    caller needs a deadline of its own, as the environment pool has.
    """
    late = f"{what} took over {seconds:g} s"
    deadline = time.monotonic() + seconds
    try:
        with _interrupted_again(seconds), _alarm(seconds, late):
            yield
    except Exception as error:
        if time.monotonic() >= deadline:
            raise TimeLimit(late) from error
        raise
    if time.monotonic() >= deadline:
        raise TimeLimit(late)


@contextlib.contextmanager
def _alarm(seconds: float, late: str) -> Iterator[None]:
    """Interrupt the block after ``seconds``, also a system call; in the main thread alone."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(*_: object) -> None:
        raise TimeLimit(late)

    handler = signal.signal(signal.SIGALRM, expired)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        # What was armed before goes on; it rings later by the time that was spent here.
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _interrupted_again(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimit`` in the block ``AGAIN_S`` after its time was up and every ``AGAIN_S`` from
    then on, whatever it did to the alarm.
    """
    done = threading.Event()
    lock = threading.Lock()
    ident = ctypes.c_ulong(threading.get_ident())
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def watch() -> None:
        delay = seconds + AGAIN_S
        while not done.wait(delay):
            with lock:
                if not done.is_set():
                    throw(ident, ctypes.py_object(TimeLimit))
            delay = AGAIN_S

    threading.Thread(target=watch, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            done.set()
            throw(ident, None)  # one that is on its way must not arrive behind the block


def limit_memory(gigabytes: float) -> None:
    """From now on this process may have ``gigabytes`` of address space, or less where it had less;
    beyond them it gets a ``MemoryError``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    wanted = int(gigabytes * 2**30)
    resource.setrlimit(resource.RLIMIT_AS, (min(wanted, _finite(soft)), hard))


@contextlib.contextmanager
def memory_unlimited() -> Iterator[None]:
    """Lift the bound of ``limit_memory`` in the block: what is started there has none of its own,
    and Node reserves more address space than it ever uses.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def _finite(limit: int) -> int:
    # No limit is -1 to the kernel.
    return sys.maxsize if limit == resource.RLIM_INFINITY else limit
