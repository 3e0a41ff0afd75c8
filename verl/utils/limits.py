"""Bounds for code of others: how long a call may take, how much memory a process may have."""

import contextlib
import resource
import signal
import sys
import threading
from collections.abc import Iterator

AGAIN_S = 1.0  # what swallowed the first alarm gets another one


class TimeLimit(RuntimeError):
    """A call took longer than it was given."""


@contextlib.contextmanager
def time_limit(seconds: float, what: str) -> Iterator[None]:
    """Let the block raise ``TimeLimit``, which names ``what``, once it has run for ``seconds``.

    Python alone can be stopped, and in the main thread: elsewhere the block runs unbounded, and the
    deadline of whoever waits for it is all there is.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def expired(*_: object) -> None:
        raise TimeLimit(f"{what} took over {seconds:g} s")

    handler = signal.signal(signal.SIGALRM, expired)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, AGAIN_S)
    try:
        yield
    finally:
        # What was armed before goes on; it rings later by the time that was spent here.
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


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
