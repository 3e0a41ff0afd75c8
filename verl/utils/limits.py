"""Limits for user-provided code: run time of a call, memory of a process, and its exceptions."""

import contextlib
import ctypes
import resource
import signal
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

from verl.config.settings.errors import names_fix

# Exceptions of user-provided code that are reported as its failure. SystemExit would otherwise end
# this process as if it were complete.
USER_CODE_ERRORS = (Exception, SystemExit)
# Beginnings of the file names of code that is not user-provided: "<frozen importlib._bootstrap>",
# libraries, and the packages of this repository.
_LIBRARY_PREFIXES = (
    "<",
    *(sysconfig.get_path(name) for name in ("stdlib", "purelib", "platlib")),
    *(f"{Path(__file__).parents[2] / name}/" for name in ("verl", "agent_system", "rlvcr")),
)
REPEAT_S = 1.0  # seconds between interrupts, which are repeated if the code catches the first one


class TimeLimitError(RuntimeError):
    """Error: a call took longer than its time limit."""


def describe_error(error: BaseException, to_text: Callable[[object], str] = repr) -> str:
    """Return ``to_text(error)`` (repr or str), or the type if this method of user code raises."""
    try:
        return to_text(error)
    except Exception:
        return f"{type(error).__name__} (its message cannot be read: __{to_text.__name__}__ raises)"


def describe_raised_error(error: BaseException) -> str:
    """Return ``error``, and file and line of the code that raised it, for an error message.

    The line is that of user-provided code if there is any. It is omitted if the message has a fix.
    """
    text = describe_error(error)
    if names_fix(text):
        return text
    return text + (describe_user_line(error) or _format_line(_list_frames(error)[-1]))


def describe_user_line(error: BaseException) -> str:
    """Return ``" in FILE, line N"``: the last line of user-provided code that raised ``error``.

    The result is empty if there is no such line. The cause of ``error`` is searched first.
    """
    text = describe_user_line(error.__cause__) if error.__cause__ is not None else ""
    user_frames = [
        frame for frame in _list_frames(error) if not frame.filename.startswith(_LIBRARY_PREFIXES)
    ]
    return text or (_format_line(user_frames[-1]) if user_frames else "")


def _list_frames(error: BaseException) -> list[traceback.FrameSummary]:
    return list(traceback.extract_tb(error.__traceback__))


def _format_line(frame: traceback.FrameSummary) -> str:
    return f" in {frame.filename}, line {frame.lineno}"


@contextlib.contextmanager
def time_limit(seconds: float, subject: str) -> Iterator[None]:
    """Raise ``TimeLimitError`` in the ``with`` block after ``seconds``.

    ``subject``, for example the name of a function, is the subject of the error message. A block
    that takes longer always raises ``TimeLimitError`` at its end, even if it caught the
    interrupt, cancelled the alarm or raised another error. Python code is interrupted repeatedly.

    Two kinds of code cannot be interrupted: native code outside of the main thread, and code that
    catches every exception. They need another limit, such as that of the environment pool.
    """
    timeout_message = f"{subject} took over {seconds:g} s"
    deadline = time.monotonic() + seconds
    try:
        with _interrupt_repeatedly(seconds), _interrupt_by_alarm(seconds, timeout_message):
            yield
    except Exception as error:
        if time.monotonic() >= deadline:
            raise TimeLimitError(timeout_message) from error
        raise
    if time.monotonic() >= deadline:
        raise TimeLimitError(timeout_message)


@contextlib.contextmanager
def _interrupt_by_alarm(seconds: float, timeout_message: str) -> Iterator[None]:
    """Raise ``TimeLimitError`` by a signal, which also ends system calls; main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def raise_time_limit(*_: object) -> None:
        raise TimeLimitError(timeout_message)

    previous_handler = signal.signal(signal.SIGALRM, raise_time_limit)
    previous_timer = signal.setitimer(signal.ITIMER_REAL, seconds, REPEAT_S)
    try:
        yield
    finally:
        # Restore the previous timer. It is delayed by the time spent in this block.
        signal.setitimer(signal.ITIMER_REAL, *previous_timer)
        signal.signal(signal.SIGALRM, previous_handler)


@contextlib.contextmanager
def _interrupt_repeatedly(seconds: float) -> Iterator[None]:
    """Raise ``TimeLimitError`` every ``REPEAT_S`` seconds after ``seconds``.

    The exceptions come from another thread, so they also work if the block cancels SIGALRM.
    """
    block_ended, was_interrupted = threading.Event(), threading.Event()
    lock = threading.Lock()
    thread_id = ctypes.c_ulong(threading.get_ident())
    raise_in_thread = ctypes.pythonapi.PyThreadState_SetAsyncExc

    def interrupt_until_done() -> None:
        delay_s = seconds + REPEAT_S
        while not block_ended.wait(delay_s):
            with lock:
                if not block_ended.is_set():
                    was_interrupted.set()
                    raise_in_thread(thread_id, ctypes.py_object(TimeLimitError))
            delay_s = REPEAT_S

    threading.Thread(target=interrupt_until_done, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            block_ended.set()
        if was_interrupted.is_set():
            _receive_pending_exception(thread_id)


def _receive_pending_exception(thread_id: ctypes.c_ulong) -> None:
    """Raise and catch a pending asynchronous exception of this thread.

    Otherwise it would be raised after the time-limited block. Cancelling it (by setting NULL) would
    leave a flag of CPython 3.11 set, which makes a later profiler or debugger hang.
    """
    try:
        # Set an exception. It replaces a pending one, so that exactly one is raised below.
        ctypes.pythonapi.PyThreadState_SetAsyncExc(thread_id, ctypes.py_object(TimeLimitError))
        for _ in range(1000):  # the interpreter raises the exception while it runs this loop
            time.sleep(0)
    except TimeLimitError:
        pass


def limit_memory(gigabytes: float) -> None:
    """Limit the address space of this process to ``gigabytes`` (GiB), or to a lower existing limit.

    An allocation beyond the limit raises ``MemoryError``.
    """
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    requested_bytes = int(gigabytes * 2**30)
    # RLIM_INFINITY is -1, so min() must not be used with it.
    new_limit = (
        requested_bytes
        if soft_limit == resource.RLIM_INFINITY
        else min(requested_bytes, soft_limit)
    )
    resource.setrlimit(resource.RLIMIT_AS, (new_limit, hard_limit))


@contextlib.contextmanager
def lift_memory_limit() -> Iterator[None]:
    """Remove the memory limit for child processes that the block starts, such as Node.js."""
    soft_limit, hard_limit = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (hard_limit, hard_limit))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft_limit, hard_limit))
