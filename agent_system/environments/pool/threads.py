"""Environments that run in the caller's process: inline, in a thread each, or in one thread for
all.

A thread cannot be killed. An environment that hangs in its own one leaves it behind (it is a
daemon) and gets another. One thread for all is never replaced: an environment that hangs in it is
asked to ``interrupt`` itself, where it can; until its call returns the calls after it wait, and
each of them is given up at its own deadline.
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
    """A deadline has passed; ``inside``: in the function itself.

    A ``TimeoutError`` is the environment's own.
    """

    inside = False


@dataclass(frozen=True, slots=True)
class _QueuedCall:
    """``function(*args)``, to be made in the thread; ``future`` is for who waits for it."""

    function: Callable[..., Any]
    args: tuple[Any, ...]
    future: asyncio.Future[Any] | None = None


class DaemonThread:
    """Runs functions one after another in a thread that never keeps the process alive."""

    def __init__(self) -> None:
        # Calls neither finished nor given up at their deadline.
        self._pending: set[asyncio.Future[Any]] = set()
        self._calls: queue.SimpleQueue[_QueuedCall | None] = queue.SimpleQueue()
        self._running: asyncio.Future[Any] | None = None
        threading.Thread(target=self._run, daemon=True, name="environment").start()

    async def call(self, timeout_s: float, function: Callable[..., Any], *args: object) -> Any:
        """``function(*args)`` within ``timeout_s``, and as much again for each call before it.
        Raises ``_Late``.

        A call that is given up before its turn is never made.
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
        """Queue ``function(*args)``, whose result nobody waits for."""
        self._calls.put(_QueuedCall(function, args))

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._calls.put(None)

    def _run(self) -> None:
        while (call := self._calls.get()) is not None:
            future = call.future
            self._running = future
            result: Any = None
            error: Exception | None = None
            try:
                # Looked at in its turn: who gave up meanwhile no longer wants it to be made.
                if future is None or not future.cancelled():
                    result = call.function(*call.args)
            # The environment boundary; SystemExit must not end the thread either.
            except BaseException as raised:
                error = _settable(raised)
            self._running = None
            if future is not None:
                self._pending.discard(future)
                with contextlib.suppress(RuntimeError):  # its loop is closed
                    future.get_loop().call_soon_threadsafe(_settle, future, result, error)


def _settable(raised: BaseException) -> Exception:
    """``raised`` as a future takes it: neither what ends a process nor ``StopIteration``."""
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
    """What ``awaitable`` comes to; it is cancelled at its deadline. Raises ``_Late``."""
    deadline = asyncio.timeout(timeout_s)
    try:
        async with deadline:
            return await awaitable
    except TimeoutError:
        if deadline.expired():
            raise _Late from None
        raise


# The threads of ``locked`` environments, by package name, for the whole process.
_SHARED: dict[str, DaemonThread] = {}
_SHARED_LOCK = threading.Lock()


@dataclass(slots=True)
class LocalSlot:
    """One environment in this process; made at its first reset, and anew after a failure."""

    package: EnvPackage
    section: dict[str, Any]
    placement: str
    seconds: float = 0.0
    alive: bool = True
    load: int = 0
    # The environment; what a late ``make`` makes goes to a list that nobody reads any more.
    _made: list[Env] = field(default_factory=list)
    _thread: DaemonThread | None = None

    def plays(self, group: str | None) -> bool:  # noqa: ARG002  as of ProcessSlot
        """Nobody else is on this slot."""
        return False

    def lend(self, group: str | None, by: int) -> None:  # noqa: ARG002  as of ProcessSlot
        """Count a session that begins (1) or ends (-1)."""
        self.load += by

    async def call(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Make one call within ``timeout_s``. Raises ``EnvFailure``.

        An inline environment cannot be interrupted: a blocking call past its deadline fails once it
        returns.
        """
        began = time.perf_counter()
        try:
            result = await self._play(op, args, timeout_s)
            # The other placements have been stopped at their deadline already.
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
            try:
                result = await self._runner().call(timeout_s, self._begin, op, args, self._made)
            except _Late as late:
                if late.inside and self._made:
                    interrupt = getattr(self._made[0], "interrupt", None)
                    if interrupt is not None:
                        interrupt()
                raise
        return await _within(timeout_s, result) if inspect.isawaitable(result) else result

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
        """Drop the environment and close it after what runs in its thread: it may tolerate no other
        one.
        """
        # A new list: a ``make`` that is still under way must not fill the slot it was taken from.
        made, self._made = self._made, []
        thread = self._thread
        self._thread = None
        if thread is None:
            _close_quietly(made)
            return
        thread.post(_close_quietly, made)
        # A shared thread serves others and stays.
        if self.placement == "thread":
            thread.stop()

    async def close(self) -> None:
        """Close the environment and end its thread."""
        self.alive = False
        self._forget()


def _close_quietly(made: list[Env]) -> None:
    for env in made:
        with contextlib.suppress(Exception):  # the environment boundary: nothing is left to lose
            env.close()
