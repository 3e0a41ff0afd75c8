"""Environments in the caller's process: inline, in one thread each, or in one shared thread.

A thread cannot be killed. If an environment hangs in its thread, the thread is abandoned (it is a
daemon), and the slot gets a new one. A shared thread is never replaced. If an environment hangs in
it, its ``interrupt()`` is called if it exists. Until the call returns, later calls wait, and each
of them fails at its deadline.
"""

import asyncio
import contextlib
import inspect
import queue
import threading
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_system.environments.env import Env
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool import wire as wire
from agent_system.environments.pool.failure import EnvFailure

T = TypeVar("T")


class _Late(Exception):
    """Exceeded deadline. ``was_running``: the function was being executed, not waiting.

    It is no ``TimeoutError``, which environments may raise themselves.
    """

    inside = False


@dataclass(frozen=True, slots=True)
class _QueuedCall:
    """Call ``function(*args)`` for a thread. ``future`` receives the result, if there is one."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any] | None = None


class DaemonThread:
    """Daemon thread that runs functions one after another."""

    def __init__(self) -> None:
        # Calls that have neither finished nor exceeded their deadline.
        self._pending: set[asyncio.Future[Any]] = set()
        self._calls: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._running: asyncio.Future[Any] | None = None
        threading.Thread(target=self._run, daemon=True, name="environment").start()

    async def call(self, timeout_s: float, function: Callable[..., Any], *args: object) -> Any:
        """Run ``function(*args)`` in the thread and return its result.

        The deadline is ``timeout_s`` times one plus the number of pending calls. A call whose
        deadline passes while it waits is never made. Raises ``_DeadlineExceeded``.
        """
        future: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        allowed_s = timeout_s * (len(self._pending) + 1)
        self._pending.add(future)
        self._calls.put(_QueuedCall(function, args, future))
        try:
            return await _within(allowed_s, future)
        except _Late as late:
            self._pending.discard(future)
            late.inside = self._running is future
            raise

    def post(self, function: Callable[..., Any], *args: object) -> None:
        """Queue ``function(*args)`` and discard its result."""
        self._calls.put(_QueuedCall(function, args))

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future = call.future
            self._running = future
            result: Any = None
            error: Exception | None = None
            try:
                # Check now: the caller may have cancelled the call while it was queued.
                if future is None or not future.cancelled():
                    result = call.function(*call.args)
            # Boundary to the environment. SystemExit must not end the thread either.
            except BaseException as raised:
                error = _settable(raised)
            self._running = None
            if future is not None:
                self._pending.discard(future)
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    future.get_loop().call_soon_threadsafe(_settle, future, result, error)


def _settable(raised: BaseException) -> Exception:
    """Return ``raised``, or a ``RuntimeError`` for an exception that a future does not accept.

    These are ``StopIteration`` and exceptions that end a process, such as ``SystemExit``.
    """
    if isinstance(raised, Exception) and not isinstance(raised, StopIteration):
        return raised
    return RuntimeError(repr(raised))


def _settle(future: asyncio.Future[Any], result: object, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


async def _within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """Return the result of ``awaitable``. Cancel it after ``timeout_s`` and raise
    ``_DeadlineExceeded``.
    """
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError:
        if deadline.expired():
            raise _Late from None
        raise


# Threads of ``locked`` environments in this process, by package name.
_SHARED: dict[str, DaemonThread] = {}
_SHARED_LOCK = threading.Lock()


@dataclass(slots=True)
class LocalSlot:
    """Slot of the pool: one environment in this process.

    It is made at the first reset, and again at the first reset after a failure.
    """

    package: EnvPackage
    section: dict[str, Any]
    placement: str
    seconds: float = 0.0
    alive: bool = True
    load: int = 0
    # Empty, or the environment. A failure replaces the list, so that a ``make`` that returns after
    # its deadline adds to an abandoned list.
    _made: list[Env] = field(default_factory=list)
    _thread: DaemonThread | None = None

    def plays(self, group: str | None) -> bool:  # noqa: ARG002  as of ProcessSlot
        """Return False: a local slot has no worker that a group could share."""
        return False

    def lend(self, group: str | None, by: int) -> None:  # noqa: ARG002  as of ProcessSlot
        """Add a session to the load (``by=1``) or remove it (-1)."""
        self.load += by

    async def call(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Call ``reset`` or ``step`` within ``timeout_s`` seconds. Raises ``EnvFailure``.

        An inline environment cannot be interrupted. If its blocking call exceeds the deadline, it
        fails when it returns.
        """
        began = time.perf_counter()
        try:
            result = await self._play(op, args, timeout_s)
            # Other placements have already raised at the deadline.
            if time.perf_counter() - began > timeout_s and self.placement == "inline":
                raise _Late
            self.seconds = time.perf_counter() - began
            return wire.check_reset(result) if op == "reset" else wire.check_step(result)
        except _Late:
            self._forget()
            raise EnvFailure("timeout", f"{op} took over {timeout_s:g} s") from None
        except wire.GarbageReturn as error:
            self._forget()
            raise EnvFailure("garbage", str(error)) from error
        except Exception as error:  # the environment boundary
            self._forget()
            raise EnvFailure("error", f"{op}: {error!r}") from error

    async def _play(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        if self.placement == "inline":
            result = self._begin(op, args, self._made)
        else:
            result = await self._call_in_thread(op, args, timeout_s)
        return await _within(timeout_s, result) if inspect.isawaitable(result) else result

    async def _call_in_thread(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await self._runner().call(timeout_s, self._begin, op, args, self._made)
        except _Late as late:
            if late.inside and self._made:
                interrupt = getattr(self._made[0], "interrupt", None)
                if interrupt is not None:
                    interrupt()
            raise

    def _begin(self, op: str, args: dict[str, Any], made: list[Env]) -> Any:
        if not made:
            if op == "step":
                raise RuntimeError("step before reset")
            made.append(self.package.make(self.package.read(self.section)))
        if op == "reset":
            return made[0].reset(args["task"], args["seed"])
        return made[0].step(args["action"])

    def _runner(self) -> DaemonThread:
        if self.placement == "locked":
            with _SHARED_LOCK:
                if self.package.name not in _SHARED:
                    _SHARED[self.package.name] = DaemonThread()
                self._thread = _SHARED[self.package.name]
        elif self._thread is None:
            self._thread = DaemonThread()
        return self._thread

    def _forget(self) -> None:
        """Remove the environment from the slot, and close it in its thread.

        Closing waits for the running call: the environment may not be thread-safe.
        """
        # Use a new list: a ``make`` that is still running must not fill this slot later.
        made, self._made = self._made, []
        thread = self._thread
        self._thread = None
        if thread is None:
            _close_quietly(made)
            return
        thread.post(_close_quietly, made)
        # A shared thread serves other slots too and continues.
        if self.placement == "thread":
            thread.stop()

    async def close(self) -> None:
        """Close the environment, and end its thread unless it is shared."""
        self.alive = False
        self._forget()


def _close_quietly(made: list[Env]) -> None:
    for env in made:
        with contextlib.suppress(Exception):  # boundary to the environment, which is discarded
            env.close()
