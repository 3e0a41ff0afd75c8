"""Event loop of a thread, in which code without a loop awaits the results of environments."""

import asyncio
import contextlib
import inspect
import threading
from typing import Any


class _ThreadLoop(threading.local):
    """Event loop of the current thread. It stays open: clients of environments are bound to it."""

    def __init__(self) -> None:
        self.loop = asyncio.new_event_loop()


_THREAD_LOOP = _ThreadLoop()


def is_loop_running() -> bool:
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        return False
    return True


def await_if_needed(value: object) -> Any:
    """Return ``value``, or the result of awaiting it in the event loop of this thread.

    Raises ``RuntimeError`` if this thread already runs an event loop, as that of a collector does.
    """
    if not inspect.isawaitable(value):
        return value
    if is_loop_running():
        if inspect.iscoroutine(value):
            value.close()  # otherwise Python warns that it was never awaited
        raise RuntimeError(
            "asynchronous code cannot be awaited in an environment with placement=inline; "
            "allowed: thread, locked, process; fix: set placement=process for the environment"
        )

    # A task needs a coroutine, and not every awaitable is one.
    async def await_value() -> Any:
        return await value

    loop = _THREAD_LOOP.loop
    task = loop.create_task(await_value())
    try:
        return loop.run_until_complete(task)
    except BaseException:
        # An interrupt, such as a time limit, leaves the task unfinished. Without the
        # cancellation it would continue in the next call.
        if not task.done():
            task.cancel()
            with contextlib.suppress(Exception, asyncio.CancelledError):
                loop.run_until_complete(task)
        raise
