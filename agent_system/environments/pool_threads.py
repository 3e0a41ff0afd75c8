"""Environments that run in the caller's process: inline, in a thread each, or in one thread for all.

A thread cannot be killed: one that hangs is abandoned (it is a daemon) and a fresh one takes its place.
"""

import asyncio
import inspect
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from agent_system.environments import pool_wire as wire
from agent_system.environments.base import Env, EnvPackage
from agent_system.environments.failure import EnvFailure


class DaemonThread:
    """Runs functions one after another in a thread that never keeps the process alive."""

    def __init__(self) -> None:
        self.waiting = 0  # calls submitted and not finished
        self.abandoned = False
        self._lock = threading.Lock()
        self._jobs: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._run, daemon=True, name="environment").start()

    def submit(self, function: Callable[..., Any], *args: Any) -> asyncio.Future:
        """Queue ``function(*args)``; the future belongs to the caller's running loop."""
        loop = asyncio.get_running_loop()
        future = loop.create_future()
        with self._lock:
            self.waiting += 1
        self._jobs.put((function, args, loop, future))
        return future

    def stop(self) -> None:
        """End the thread after what is queued."""
        self._jobs.put(None)

    def abandon(self) -> None:
        """Give up a thread that hangs: should it ever come back, it fails what is queued and ends."""
        self.abandoned = True
        self.stop()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            function, args, loop, future = job
            result, error = None, None
            try:
                if self.abandoned:
                    raise RuntimeError("the call before this one hung")
                result = function(*args)
            except Exception as raised:  # the environment boundary
                error = raised
            with self._lock:
                self.waiting -= 1
            if not loop.is_closed():
                loop.call_soon_threadsafe(_settle, future, result, error)


def _settle(future: asyncio.Future, result: Any, error: Exception | None) -> None:
    if future.done():
        return
    if error is None:
        future.set_result(result)
    else:
        future.set_exception(error)


_SHARED: dict[str, DaemonThread] = {}  # of ``locked`` environments, by package name, for the whole process
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
    _env: Env | None = None
    _thread: DaemonThread | None = None

    def lend(self, by: int) -> None:
        """Count a session that begins (1) or ends (-1)."""
        self.load += by

    async def call(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Make one call within ``timeout_s``. Raises ``EnvFailure``.

        An inline environment cannot be interrupted: a blocking call past its deadline fails once it returns.
        """
        began = time.perf_counter()
        try:
            result = await self._play(op, args, timeout_s)
            if time.perf_counter() - began > timeout_s and self.placement == "inline":
                raise TimeoutError
            self.seconds = time.perf_counter() - began
            return wire.check_reset(result) if op == "reset" else wire.check_step(result)
        except TimeoutError:
            self._forget(hung=True)
            raise EnvFailure("timeout", f"{op} took over {timeout_s:g} s") from None
        except wire.GarbageReturn as error:
            self._forget()
            raise EnvFailure("garbage", str(error)) from error
        except Exception as error:  # the environment boundary
            self._forget()
            raise EnvFailure("error", f"{op}: {error!r}") from error

    async def _play(self, op: str, args: dict[str, Any], timeout_s: float) -> Any:
        if self.placement == "inline":
            result = self._begin(op, args)
            return await asyncio.wait_for(result, timeout_s) if inspect.isawaitable(result) else result
        thread = self._runner()
        ahead = thread.waiting  # each of them has its own deadline
        result = await asyncio.wait_for(thread.submit(self._begin, op, args), timeout_s * (ahead + 1))
        return await asyncio.wait_for(result, timeout_s) if inspect.isawaitable(result) else result

    def _begin(self, op: str, args: dict[str, Any]) -> Any:
        if self._env is None:
            if op == "step":
                raise RuntimeError("step before reset")
            self._env = self.package.make(self.section)
        return self._env.reset(args["task"], args["seed"]) if op == "reset" else self._env.step(args["action"])

    def _runner(self) -> DaemonThread:
        if self.placement == "locked":
            with _SHARED_LOCK:
                shared = _SHARED.get(self.package.name)
                if shared is None or shared.abandoned:
                    shared = _SHARED[self.package.name] = DaemonThread()
                self._thread = shared
        elif self._thread is None:
            self._thread = DaemonThread()
        return self._thread

    def _forget(self, hung: bool = False) -> None:
        """Drop the environment; a thread that hangs in it is left to itself."""
        env, self._env = self._env, None
        thread, self._thread = self._thread, None
        if thread is None:
            _close_quietly(env)
        elif hung:
            thread.abandon()
        else:
            thread.submit(_close_quietly, env)  # where it was made: it may not tolerate another thread
            if self.placement == "thread":
                thread.stop()

    async def close(self) -> None:
        """Close the environment and end its thread."""
        self.alive = False
        self._forget()


def _close_quietly(env: Env | None) -> None:
    try:
        if env is not None:
            env.close()
    except Exception:  # the environment boundary: nothing is left to lose
        return
