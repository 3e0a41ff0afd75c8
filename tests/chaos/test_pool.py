"""Whatever an environment does, only trajectories it touches fail, and nothing is left behind."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time

import psutil
import pytest

from agent_system.environments import env_registry
from agent_system.environments.pool import processes as pool_processes
from agent_system.environments.pool.environment_pool import (
    EnvFailure,
    EnvironmentPool,
    WorkerStartError,
)
from tests.helpers.faulty_envs import RETURNS, OverlapEnv
from tests.helpers.jobs import children
from tests.helpers.refusals import mentions

FAULTY = "tests.helpers.faulty_envs:PACKAGE"
TASK = {"task_id": "t", "data_source": "faulty"}


def play(test, env_name=FAULTY, workers=2, slots=2, section=None, step_timeout_s=20.0, **kwargs):
    """Run ``test(pool)`` in a fresh pool; afterwards no process of it may be left."""

    async def main():
        pool = EnvironmentPool(env_name, section, workers, slots, 20.0, step_timeout_s, **kwargs)
        await pool.start()
        try:
            await asyncio.wait_for(test(pool), 60)
        finally:
            await pool.close()
        await pool.close()  # twice does no harm

    known = children()
    asyncio.run(main())
    assert not children() - known


async def fails(kind, awaitable):
    with pytest.raises(EnvFailure) as caught:
        await awaitable
    assert caught.value.kind == kind, caught.value
    return caught.value


async def until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it never happened"
        await asyncio.sleep(0.01)


async def one_episode(pool, steps=3):
    async with pool.open_session() as env:
        await env.reset(TASK, 1)
        return [(await env.step("go"))[0].text for _ in range(steps)]


def test_many_sessions_share_few_environments():
    async def test(pool):
        played = await asyncio.gather(*(one_episode(pool) for _ in range(20)))
        assert played == [["step 1", "step 2", "step 3"]] * 20
        assert pool.counts["restarts"] == 0

    play(test)


def test_sessions_are_spread_over_the_workers_and_environments_are_reused():
    async def test(pool):
        async with pool.open_session() as a, pool.open_session() as b:
            first, second = await a.reset(TASK, 0), await b.reset(TASK, 0)
        assert first.text != second.text  # the text holds the process id
        seen = set()
        for _ in range(8):
            async with pool.open_session() as env:
                seen.add(((await env.reset(TASK, 0)).info["env"], (await env.reset(TASK, 0)).text))
        assert len(seen) <= pool.max_sessions

    play(test)


def test_sessions_of_a_group_share_a_worker():
    async def test(pool):
        async with contextlib.AsyncExitStack() as lent:
            order = ["a", "b", "a", "b", "a", None, "b", "c"]
            sessions = [await lent.enter_async_context(pool.open_session(group)) for group in order]
            workers = [session._slot.worker for session in sessions]
        a, b = workers[:2]
        assert a is not b and workers[:7] == [a, b, a, b, a, b, b], (
            "no group: the least busy worker"
        )
        assert workers[7] is a, "the only one with a free slot"
        assert not a.groups and not b.groups and a.num_sessions == b.num_sessions == 0

    play(test, slots=4)


def test_a_killed_worker_fails_its_own_sessions_only_and_is_replaced():
    async def test(pool):
        async with contextlib.AsyncExitStack() as stack:
            envs = [await stack.enter_async_context(pool.open_session()) for _ in range(4)]
            pids = [int((await env.reset(TASK, 0)).text.split()[-1]) for env in envs]
            victim = pids[0]
            os.kill(victim, signal.SIGKILL)
            for env, pid in zip(envs, pids, strict=True):
                if pid == victim:
                    failure = await fails("dead", env.step("go"))
                    assert str(victim) in str(failure) or "gone" in str(failure)
                else:
                    assert (await env.step("go"))[0].text == "step 1"
            await until(lambda: len(pool.worker_pids) == 2 and victim not in pool.worker_pids)
        assert len(await asyncio.gather(*(one_episode(pool) for _ in range(8)))) == 8
        assert pool.counts["restarts"] == 1

    play(test)


@pytest.mark.parametrize("fault", ["kill", "exit"])
def test_a_worker_that_dies_during_a_call(fault):
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await fails("dead", env.step(fault))
            await fails("dead", env.step("go"))
        assert await one_episode(pool) == ["step 1", "step 2", "step 3"]

    play(test, workers=1, slots=1)


def test_a_hung_step_is_cut_at_its_deadline_and_waiting_sessions_get_the_replacement():
    async def test(pool):
        async with pool.open_session() as hangs, pool.open_session() as neighbour:
            await hangs.reset(TASK, 0)
            await neighbour.reset(TASK, 0)
            waiting = asyncio.create_task(one_episode(pool))
            hung, beside = (
                asyncio.create_task(hangs.step("hang")),
                asyncio.create_task(neighbour.step("go")),
            )
            await fails("timeout", hung)
            await fails("dead", beside)
            assert await waiting == ["step 1", "step 2", "step 3"]
        assert pool.counts["failed_timeout"] == 1 and pool.counts["failed_dead"] == 1

    play(test, workers=1, slots=2, step_timeout_s=0.7)


def test_a_call_does_not_pay_for_the_neighbours_before_it():
    async def test(pool):
        # 12 environments of one process, each step 0.1 s: the last waits 1.2 s and is still within
        # its 0.6 s deadline
        played = await asyncio.gather(*(one_episode(pool, steps=1) for _ in range(12)))
        assert len(played) == 12

    play(test, "tests.helpers.faulty_envs:SLOW", workers=1, slots=12, step_timeout_s=0.6)


@pytest.mark.parametrize(
    ("fault", "kind"), [("raise", "error"), ("hang", "timeout"), ("kill", "dead")]
)
def test_faults_in_reset(fault, kind):
    async def test(pool):
        async with pool.open_session() as env:
            await fails(kind, env.reset({**TASK, "fault": fault}, 0))
        assert await one_episode(pool) == ["step 1", "step 2", "step 3"]

    async def main():
        pool = EnvironmentPool(FAULTY, {}, 1, 1, reset_timeout_s=0.7, step_timeout_s=10)
        await pool.start()
        await test(pool)
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_an_exception_fails_one_session_and_keeps_the_worker():
    async def test(pool):
        pids = pool.worker_pids
        async with pool.open_session() as env, pool.open_session() as neighbour:
            await env.reset(TASK, 0)
            await neighbour.reset(TASK, 0)
            failure = await fails("error", env.step("raise"))
            assert "ValueError('the environment broke')" in str(failure)
            await fails("error", env.step("go"))  # no episode is going on
            assert (await neighbour.step("go"))[0].text == "step 1"
            assert (await env.reset(TASK, 0)).text.startswith("start")
        assert pool.worker_pids == pids and pool.counts["restarts"] == 0

    play(test, workers=1)


@pytest.mark.parametrize("fault", sorted(RETURNS))
def test_wrong_returns_are_garbage_and_keep_the_worker(fault):
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await fails("garbage", env.step(fault))
        assert await one_episode(pool) and pool.counts["restarts"] == 0

    play(test, workers=1, slots=1)


def test_noise_on_the_socket_is_garbage_and_costs_the_worker():
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await fails("garbage", env.step("noise"))
        assert await one_episode(pool) and pool.counts["restarts"] == 1

    play(test, workers=1, slots=1)


def test_prints_of_an_environment_are_harmless():
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset({**TASK, "fault": "print"}, 0)
            assert (await env.step("print"))[0].text == "step 1"

    play(test, workers=1, slots=1)


def test_prints_of_days_do_not_pile_up(monkeypatch):
    monkeypatch.setattr(pool_processes, "MAX_OUTPUT_BYTES", 60)

    async def test(pool):
        (worker,) = pool._workers
        for _ in range(20):
            async with pool.open_session() as env:
                await env.reset({**TASK, "fault": "print"}, 0)
                await env.step("print")
        size = os.fstat(worker._output.fileno()).st_size
        assert size < 120 and "printed by the environment" in worker._last_output()

    play(test, workers=1, slots=1)


def test_a_spare_stands_in_for_workers_that_start_slowly():
    async def test(pool):
        await until(lambda: pool._spare is not None)
        spare = pool._spare.process_id
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        await until(lambda: pool.worker_pids == [spare])
        assert await one_episode(pool)
        await until(lambda: pool._spare is not None and pool._spare.process_id != spare)

    play(test, workers=1, slots=1, section={"start_s": 1.2})


def test_cancelled_trajectories_leave_a_usable_environment():
    async def test(pool):
        async def hangs():
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                await env.step("nap")

        task = asyncio.create_task(hangs())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await one_episode(pool) == ["step 1", "step 2", "step 3"]

    play(test, "tests.helpers.faulty_envs:SLOW", workers=1, slots=1)


def test_coroutine_environments_play_side_by_side_in_one_process():
    async def test(pool):
        order = []

        async def one(name, action):
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                await env.step(action)
                order.append(name)

        await asyncio.gather(one("slow", "sleep"), one("quick", "go"))
        assert order == ["quick", "slow"]
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await fails("timeout", env.step("hang"))
        assert await one_episode(pool)

    play(test, "tests.helpers.faulty_envs:ASYNC", workers=1, slots=2, step_timeout_s=1.0)


@pytest.mark.parametrize("placement", ["inline", "thread", "locked"])
def test_placements_inside_the_process(placement):
    async def test(pool):
        played = await asyncio.gather(*(one_episode(pool) for _ in range(6)))
        assert played == [["step 1", "step 2", "step 3"]] * 6
        for fault, kind in [("raise", "error"), ("none", "garbage"), ("hang", "timeout")]:
            async with pool.open_session() as env:
                assert "start" in (await env.reset(TASK, 0)).text
                await fails(kind, env.step(fault))
            assert await one_episode(pool)

    play(
        test,
        "tests.helpers.faulty_envs:LOCAL",
        workers=1,
        slots=2,
        step_timeout_s=0.5,
        placement=placement,
    )


def test_one_call_at_a_time_where_the_class_is_locked():
    async def test(pool):
        async def one(begins):
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                await asyncio.sleep(begins)
                return (await env.step("overlap"))[3]["overlap"]

        assert not any(await asyncio.gather(*(one(0.0) for _ in range(4))))

    play(test, "tests.helpers.faulty_envs:OVERLAP", workers=1, slots=4, placement="locked")


def test_a_call_that_hangs_in_a_locked_class_holds_up_the_others_until_it_returns(monkeypatch):
    go_on = threading.Event()
    for name, value in {"go_on": go_on, "steps_begun": 0, "closed": 0}.items():
        monkeypatch.setattr(OverlapEnv, name, value)

    async def test(pool):
        async with (
            pool.open_session() as hangs,
            pool.open_session() as beside,
            pool.open_session() as late,
        ):
            for env in (hangs, beside, late):
                await env.reset(TASK, 0)
            hung = asyncio.create_task(hangs.step("hang"))
            waits = asyncio.create_task(beside.step("go"))
            await fails("timeout", hung)
            await fails("timeout", waits)
            for _ in range(3):
                await fails(
                    "timeout", late.step("go")
                )  # at its own deadline, however many have failed before
            assert OverlapEnv.steps_begun == 1, "what was given up before its turn is not played"
            go_on.set()
            observation = await beside.reset(TASK, 0)
            assert (
                observation.text.startswith("start") and not (await beside.step("go"))[3]["overlap"]
            )
            await until(lambda: OverlapEnv.closed == 3)
        assert pool.counts["failed_timeout"] == 5

    try:
        play(
            test,
            "tests.helpers.faulty_envs:OVERLAP",
            workers=1,
            slots=3,
            step_timeout_s=0.3,
            placement="locked",
        )
    finally:
        go_on.set()


def test_what_a_late_make_brings_is_no_later_sessions_environment():
    async def test(pool):
        async with pool.open_session() as env:
            await fails("timeout", env.reset(TASK, 0))
        pool.section["start_s"] = 0  # the slots' own section
        async with pool.open_session() as env:
            first = (await env.reset(TASK, 0)).info["env"]
            await asyncio.sleep(0.5)  # the late one is made meanwhile
            assert (await env.reset(TASK, 0)).info["env"] == first

    async def main():
        pool = await EnvironmentPool(
            FAULTY, {"start_s": 0.6}, 1, 1, 0.3, placement="thread"
        ).start()
        await test(pool)
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


@pytest.mark.parametrize("placement", ["inline", "thread", "locked", "process"])
@pytest.mark.parametrize("kind_of_env", ["LOCAL", "ASYNC"])
@pytest.mark.parametrize("fault", ["time out", "run dry"])
def test_what_an_environment_raises_is_no_hang(placement, kind_of_env, fault):
    async def test(pool):
        async with pool.open_session() as env, pool.open_session() as neighbour:
            await env.reset(TASK, 0)
            await neighbour.reset(TASK, 0)
            failed, (observation, *_) = await asyncio.gather(
                fails("error", env.step(fault)), neighbour.step("go")
            )
            assert observation.text == "step 1" and (
                "TimeoutError" in str(failed) or "StopIteration" in str(failed)
            )
            assert (await neighbour.step("go"))[0].text == "step 2"
        assert pool.counts["failed_timeout"] == pool.counts["restarts"] == 0

    play(test, f"tests.helpers.faulty_envs:{kind_of_env}", workers=1, slots=2, placement=placement)


@pytest.mark.parametrize("placement", ["thread", "locked"])
def test_an_environment_that_exits_does_not_take_its_thread_along(placement):
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            assert "SystemExit" in str(await fails("error", env.step("leave")))
        assert await one_episode(pool) == ["step 1", "step 2", "step 3"]

    play(test, "tests.helpers.faulty_envs:LOCAL", workers=1, slots=1, placement=placement)


def test_a_placement_that_does_not_exist_is_refused():
    with pytest.raises(ValueError, check=mentions("inline", "thread", "locked", "process")):
        EnvironmentPool(FAULTY, placement="moon")


def test_an_environment_that_cannot_start_ends_the_run_with_its_reason():
    known = children()

    async def start(section):
        await EnvironmentPool(FAULTY, section, 2, 1).start()

    with pytest.raises(WorkerStartError, match="no such engine"):
        asyncio.run(start({"fail_start": True}))
    with pytest.raises(env_registry.MissingExtra, check=mentions("no_such_engine")):
        asyncio.run(start({"missing": True}))
    assert not children() - known


def test_a_start_past_its_deadline_is_refused():
    async def start():
        await EnvironmentPool(FAULTY, {"start_s": 30}, 1, 1, start_timeout_s=0.5).start()

    known = children()
    with pytest.raises(WorkerStartError, check=mentions("0.5 s")):
        asyncio.run(start())
    assert not children() - known


def test_what_a_worker_started_goes_with_it():
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            grandchild = (await env.step("child"))[3]["child"]
            assert psutil.pid_exists(grandchild)
            await fails("timeout", env.step("hang"))
            await until(lambda: not alive(grandchild))

    play(test, workers=1, slots=1, step_timeout_s=0.5)


def alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_workers_die_with_a_killed_parent():
    code = textwrap.dedent(f"""
        import asyncio
        from agent_system.environments.pool.environment_pool import EnvironmentPool
        async def main():
            pool = await EnvironmentPool({FAULTY!r}, {{}}, 2, 1).start()
            async with pool.open_session() as env:
                await env.reset({TASK!r}, 0)
                print(*pool.worker_pids, flush=True)
                await env.step("hang")
        asyncio.run(main())
    """)
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pids = [int(pid) for pid in parent.stdout.readline().split()]
    assert len(pids) == 2 and all(alive(pid) for pid in pids)
    parent.kill()
    parent.wait(timeout=10)
    asyncio.run(until(lambda: not any(alive(pid) for pid in pids)))


def test_images_and_numbers_arrive_as_they_were():
    async def test(pool):
        async with pool.open_session() as env:
            observation = await env.reset(TASK, 0)
            assert observation.image.shape == (2, 3, 3) and observation.image.dtype.name == "uint8"
            assert observation.image.sum() == 153 and observation.info["score"] == 7

    play(test, "tests.helpers.faulty_envs:IMAGE", workers=1, slots=1)
