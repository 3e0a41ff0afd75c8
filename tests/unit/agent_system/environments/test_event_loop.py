"""Tests of awaited results of environments: the event loop stays open between calls."""

import asyncio
import threading

import pytest

from agent_system.environments.event_loop import await_if_needed
from tests.helpers.faulty_envs import EchoClient
from tests.helpers.refusals import mentions
from verl.utils.limits import TimeLimitError, time_limit


async def get_loop():
    return asyncio.get_running_loop()


class Later:
    """Awaitable that is no coroutine."""

    def __await__(self):
        yield from asyncio.sleep(0).__await__()
        return 3


def test_values_and_results_of_awaitables_are_returned():
    assert [await_if_needed(value) for value in (2, None, Later())] == [2, None, 3]


def test_result_is_not_awaited_inside_of_a_running_loop():
    async def await_loop() -> None:
        await_if_needed(get_loop())

    with pytest.raises(RuntimeError, check=mentions("placement=inline", "; allowed: ", "; fix: ")):
        asyncio.run(await_loop())


def test_client_of_an_environment_works_in_all_calls():
    echo = EchoClient()
    await_if_needed(echo.start())
    assert [await_if_needed(echo.ask(text)) for text in ("a", "b")] == ["a!", "b!"]
    echo.task.cancel()


def test_every_thread_has_a_loop():
    loops = []
    thread = threading.Thread(
        target=lambda: loops.extend(await_if_needed(get_loop()) for _ in range(2))
    )
    thread.start()
    thread.join()
    assert loops[0] is loops[1] is not await_if_needed(get_loop())


def test_failed_call_leaves_the_loop_usable():
    async def fail():
        raise ValueError("no such room")

    loop = await_if_needed(get_loop())
    with pytest.raises(ValueError, match="no such room"):
        await_if_needed(fail())
    assert await_if_needed(get_loop()) is loop


def test_interrupted_call_does_not_continue_in_the_next_call():
    events = []

    async def wait_long():
        try:
            await asyncio.sleep(60)
        finally:
            events.append("cancelled")

    tasks_before = asyncio.all_tasks(await_if_needed(get_loop()))
    with pytest.raises(TimeLimitError), time_limit(0.2, "waiting"):
        await_if_needed(wait_long())
    assert events == ["cancelled"]
    assert asyncio.all_tasks(await_if_needed(get_loop())) == tasks_before
