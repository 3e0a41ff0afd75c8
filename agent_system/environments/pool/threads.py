"""Environments in the caller's process: inline, in one thread each, or in one shared thread.

A thread cannot be killed. If an environment hangs in its thread, the thread is abandoned (it is a
daemon), and the slot gets a new one. A shared thread is never replaced. If an environment hangs in
it, its ``interrupt()`` is called if it exists. Until the call returns, later calls wait, and each
of them fails at its deadline.
"""

import asyncio
import contextlib
import functools
import inspect
import queue
import threading
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from agent_system.environments.env import Env, EnvFailure, get_failure_kind
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool import wire as wire
from verl.utils.limits import USER_CODE_ERRORS, describe_error

T = TypeVar("T")


class _DeadlineError(Exception):
    """Error for a call that exceeded its deadline; ``was_running`` is False if it was queued.

    The class is no subclass of ``TimeoutError``, because environments may raise that themselves.
    """

    was_running = False


class DaemonThread:
    """Daemon thread that runs functions one after another."""

    def __init__(self) -> None:
        # Calls that have neither finished nor exceeded their deadline.
        self._pending_futures: set[Future[Any]] = set()
        # Functions with the futures of their results. None ends the thread.
        self._queued_calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]
        self._queued_calls = queue.SimpleQueue()
        threading.Thread(target=self._run_calls, daemon=True, name="environment").start()

    async def call(self, timeout_s: float, function: Callable[..., Any], *args: object) -> Any:
        """Run ``function(*args)`` in the thread and return its result.

        The call must finish within ``timeout_s * (1 + number of pending calls)`` seconds, because
        the pending calls run first. A call that is still queued at its deadline is never made.
        Raises ``_DeadlineError``.
        """
        total_timeout_s = timeout_s * (len(self._pending_futures) + 1)
        future = self.queue_call(function, *args)
        self._pending_futures.add(future)
        future.add_done_callback(self._pending_futures.discard)
        try:
            return await _await_within(total_timeout_s, asyncio.wrap_future(future))
        except _DeadlineError as deadline_error:
            self._pending_futures.discard(future)
            deadline_error.was_running = future.running()
            raise

    def queue_call(self, function: Callable[..., Any], *args: object) -> "Future[Any]":
        future: Future[Any] = Future()
        self._queued_calls.put((functools.partial(function, *args), future))
        return future

    def stop(self) -> None:
        """End the thread after the queued calls."""
        self._queued_calls.put(None)

    def _run_calls(self) -> None:
        while (call := self._queued_calls.get()) is not None:
            function, future = call
            # The caller may have cancelled the call while it was queued.
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(function())
            # Boundary to the environment. SystemExit must not end the thread either.
            except BaseException as error:
                # An asyncio future does not accept ``StopIteration``.
                is_accepted = isinstance(error, Exception) and not isinstance(error, StopIteration)
                future.set_exception(error if is_accepted else RuntimeError(describe_error(error)))


async def _await_within(timeout_s: float, awaitable: Awaitable[T]) -> T:
    """Return the result of ``awaitable``, or raise ``_DeadlineError`` after ``timeout_s``."""
    timeout_context = asyncio.timeout(timeout_s)
    try:
        async with timeout_context:
            return await awaitable
    except TimeoutError:
        if timeout_context.expired():
            raise _DeadlineError from None
        raise


# Threads of ``locked`` environments in this process, by package name.
_SHARED_THREADS: dict[str, DaemonThread] = {}
_SHARED_THREADS_LOCK = threading.Lock()


@dataclass(slots=True, eq=False)
class LocalSlot:
    """Slot of the pool: one environment in this process.

    The environment is made at the first reset, and again at the first reset after a failure.
    """

    package: EnvPackage
    section: dict[str, Any]  # settings of the environment as plain values
    placement: str
    is_alive: bool = True
    open_sessions: Counter[str | None] = field(default_factory=Counter)  # by group
    # Empty, or one element: the environment. A failure replaces the list by a new one. If ``make``
    # is still running, it later appends its environment to the old list, which nothing uses.
    _envs: list[Env] = field(default_factory=list)
    _thread: DaemonThread | None = None

    async def call(self, method: str, args: dict[str, Any], timeout_s: float) -> Any:
        """Call ``reset`` or ``step`` of the environment. Raises ``EnvFailure``.

        An inline call cannot be interrupted. If it takes longer than ``timeout_s``, it fails when
        it returns.
        """
        start_s = time.perf_counter()
        try:
            result = await self._execute_call(method, args, timeout_s)
            # A deadline ends calls in threads. A call without a thread is checked afterwards.
            if time.perf_counter() - start_s > timeout_s and self.placement == "inline":
                raise _DeadlineError
            return wire.check_reset(result) if method == "reset" else wire.check_step(result)
        except _DeadlineError:
            self._drop_env()
            raise EnvFailure("timeout", f"{method} took over {timeout_s:g} s") from None
        except wire.InvalidEnvReplyError as error:
            self._drop_env()
            raise EnvFailure("garbage", str(error)) from error
        except USER_CODE_ERRORS as error:  # the environment boundary
            self._drop_env()
            error_text = describe_error(error)
            raise EnvFailure(get_failure_kind(error), f"{method}: {error_text}") from error

    async def _execute_call(self, method: str, args: dict[str, Any], timeout_s: float) -> Any:
        if self.placement == "inline":
            result = self._call_env(method, args, self._envs)
        else:
            result = await self._call_in_thread(method, args, timeout_s)
        return await _await_within(timeout_s, result) if inspect.isawaitable(result) else result

    async def _call_in_thread(self, method: str, args: dict[str, Any], timeout_s: float) -> Any:
        try:
            return await self._get_thread().call(
                timeout_s, self._call_env, method, args, self._envs
            )
        except _DeadlineError as deadline_error:
            if deadline_error.was_running and self._envs:
                interrupt = getattr(self._envs[0], "interrupt", None)
                if interrupt is not None:
                    interrupt()
            raise

    def _call_env(self, method: str, args: dict[str, Any], envs: list[Env]) -> Any:
        if not envs:
            if method == "step":
                raise RuntimeError("step before reset")
            envs.append(self.package.make(self.package.read_settings(self.section)))
        if method == "reset":
            return envs[0].reset(args["task"], args["seed"])
        return envs[0].step(args["action"])

    def _get_thread(self) -> DaemonThread:
        if self.placement == "locked":
            with _SHARED_THREADS_LOCK:
                if self.package.name not in _SHARED_THREADS:
                    _SHARED_THREADS[self.package.name] = DaemonThread()
                self._thread = _SHARED_THREADS[self.package.name]
        elif self._thread is None:
            self._thread = DaemonThread()
        return self._thread

    def _drop_env(self) -> None:
        """Remove the environment from the slot; its thread closes it after the running call."""
        # Use a new list: a ``make`` that is still running must not fill this slot later.
        envs, self._envs = self._envs, []
        thread = self._thread
        self._thread = None
        if thread is None:
            close_envs_quietly(envs)
            return
        thread.queue_call(close_envs_quietly, envs)
        # A shared thread serves other slots too and continues.
        if self.placement == "thread":
            thread.stop()

    async def close(self) -> None:
        """Close the environment, and end its thread unless it is shared."""
        self.is_alive = False
        self._drop_env()


def close_envs_quietly(envs: list[Env]) -> None:
    for env in envs:
        with contextlib.suppress(*USER_CODE_ERRORS):  # of an environment that is discarded
            env.close()
