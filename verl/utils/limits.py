"""Limits for user-provided code: run time of a call, and memory of a process."""

import contextlib
import ctypes
import resource
import signal
import threading
import time
from collections.abc import Iterator

REPEAT_S = 1.0  # interval of further interrupts for code that catches the first one


class TimeLimit(RuntimeError):
    """A call took longer than its time limit."""


@contextlib.contextmanager
def time_limit(seconds: float, subject: str) -> Iterator[None]:
    """Interrupt the ``with`` block by a ``TimeLimit`` exception after ``seconds``.

    ``subject`` is that of the error message, for example the name of the function.
    A block that takes longer always raises ``TimeLimit``, also if it caught the interrupt,
    cancelled the alarm or raised another error. Python code is interrupted repeatedly until it
    ends. Native code outside of the main thread cannot be interrupted, and neither can code that
    catches every exception.
    Callers of such code need another deadline, such as that of the environment pool.
    """
    timeout_message = f"{subject} took over {seconds:g} s"
    deadline = time.monotonic() + seconds
    try:
        with _interrupt_repeatedly(seconds), _interrupt_by_alarm(seconds, timeout_message):
            yield
    except Exception as error:
        if time.monotonic() >= deadline:
            raise TimeLimit(timeout_message) from error
        raise
    if time.monotonic() >= deadline:
        raise TimeLimit(timeout_message)


@contextlib.contextmanager
def _interrupt_by_alarm(seconds: float, late: str) -> Iterator[None]:
    """Raise ``TimeLimit`` in the block, also during a system call; only in the main thread."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_time_limit(*_: object) -> None:
        raise TimeLimit(late)

    handler = signal.signal(signal.SIGALRM, raise_time_limit)
    timer = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        yield
    finally:
        # Restore the earlier timer. It fires later by the time spent in this block.
        signal.setitimer(signal.ITIMER_REAL, *timer)
        signal.signal(signal.SIGALRM, handler)


@contextlib.contextmanager
def _interrupt_repeatedly(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimit`` in the block every ``REPEAT_S`` after ``seconds``.

    This does not depend on the alarm, which the block may have cancelled.
    """
    block_ended, was_interrupted = threading.Event(), threading.Event()
    lock = threading.Lock()
    ident = ctypes.c_ulong(threading.get_ident())
    throw = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def interrupt_until_done() -> None:
        delay = seconds + REPEAT_S
        while not block_ended.wait(delay):
            with lock:
                if not block_ended.is_set():
                    was_interrupted.set()
                    throw(ident, ctypes.py_object(TimeLimit))
            delay = REPEAT_S

    threading.Thread(target=interrupt_until_done, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            block_ended.set()
        if was_interrupted.is_set():
            _receive_pending_exception(ident)


def _receive_pending_exception(ident: ctypes.c_ulong) -> None:
    """Receive the pending exception of this thread: it must not be raised after the block.

    ``PyThreadState_SetAsyncExc(ident, NULL)`` would cancel it, but CPython 3.11 then keeps its
    request to look for an exception. A profiler or debugger that is used later hangs because of it.
    """
    try:
        # Replace a pending exception, and raise one if there is none.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(ident, ctypes.py_object(TimeLimit))
        for _ in range(1000):  # Python code, in which the interpreter raises the exception
            time.sleep(0)
    except TimeLimit:
        pass


def limit_memory(gigabytes: float) -> None:
    """Limit the address space of this process to ``gigabytes`` (GiB), or to a lower present limit.

    An allocation beyond the limit raises ``MemoryError``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    requested_bytes = int(gigabytes * 2**30)
    # RLIM_INFINITY is -1, which min() would choose.
    limit = requested_bytes if soft == resource.RLIM_INFINITY else min(requested_bytes, soft)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))


@contextlib.contextmanager
def lift_memory_limit() -> Iterator[None]:
    """Lift the limit for processes started in the block: Node.js reserves more than it uses."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
