"""Tests of faulty environments in the pool: only their trajectories fail, and no process is
left.
"""

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


def run_in_pool(
    test, env_name=FAULTY, workers=2, slots=2, section=None, step_timeout_s=20.0, **kwargs
):
    """Run ``test(pool)`` in a new pool, and check that no process of it is left."""

    async def main():
        pool = EnvironmentPool(env_name, section, workers, slots, 20.0, step_timeout_s, **kwargs)
        await pool.start()
        try:
            await asyncio.wait_for(test(pool), 60)
        finally:
            await pool.close()
        await pool.close()  # a second close is allowed

    previous_children = children()
    asyncio.run(main())
    assert not children() - previous_children


async def expect_failure(kind, awaitable):
    with pytest.raises(EnvFailure) as caught:
        await awaitable
    assert caught.value.kind == kind, caught.value
    return caught.value


async def wait_until(condition, seconds=10.0):
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "the condition did not become true"
        await asyncio.sleep(0.01)


async def run_episode(pool, steps=3):
    async with pool.open_session() as env:
        await env.reset(TASK, 1)
        return [(await env.step("go"))[0].text for _ in range(steps)]


def test_many_sessions_share_few_environments():
    async def test(pool):
        episodes = await asyncio.gather(*(run_episode(pool) for _ in range(20)))
        assert episodes == [["step 1", "step 2", "step 3"]] * 20
        assert pool.counts["restarts"] == 0

    run_in_pool(test)


def test_sessions_use_all_workers_and_environments_are_reused():
    async def test(pool):
        async with pool.open_session() as a, pool.open_session() as b:
            first, second = await a.reset(TASK, 0), await b.reset(TASK, 0)
        assert first.text != second.text  # the text holds the process id
        environments = set()
        for _ in range(8):
            async with pool.open_session() as env:
                environments.add(
                    ((await env.reset(TASK, 0)).info["env"], (await env.reset(TASK, 0)).text)
                )
        assert len(environments) <= pool.max_sessions

    run_in_pool(test)


def test_sessions_of_a_group_share_a_worker():
    async def test(pool):
        async with contextlib.AsyncExitStack() as stack:
            order = ["a", "b", "a", "b", "a", None, "b", "c"]
            sessions = [
                await stack.enter_async_context(pool.open_session(group)) for group in order
            ]
            workers = [session._slot.worker for session in sessions]
        a, b = workers[:2]
        assert a is not b and workers[:7] == [a, b, a, b, a, b, b], (
            "without a group: the least busy worker"
        )
        assert workers[7] is a, "not the only worker with a free slot"
        assert not a.open_sessions and not b.open_sessions

    run_in_pool(test, slots=4)


def test_killed_worker_fails_only_its_sessions_and_is_replaced():
    async def test(pool):
        async with contextlib.AsyncExitStack() as stack:
            envs = [await stack.enter_async_context(pool.open_session()) for _ in range(4)]
            pids = [int((await env.reset(TASK, 0)).text.split()[-1]) for env in envs]
            victim = pids[0]
            os.kill(victim, signal.SIGKILL)
            for env, pid in zip(envs, pids, strict=True):
                if pid == victim:
                    failure = await expect_failure("dead", env.step("go"))
                    assert str(victim) in str(failure) or "gone" in str(failure)
                else:
                    assert (await env.step("go"))[0].text == "step 1"
            await wait_until(lambda: len(pool.worker_pids) == 2 and victim not in pool.worker_pids)
        assert len(await asyncio.gather(*(run_episode(pool) for _ in range(8)))) == 8
        assert pool.counts["restarts"] == 1

    run_in_pool(test)


@pytest.mark.parametrize("fault", ["kill", "exit"])
def test_worker_that_dies_during_a_call_fails_the_call(fault):
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await expect_failure("dead", env.step(fault))
            await expect_failure("dead", env.step("go"))
        assert await run_episode(pool) == ["step 1", "step 2", "step 3"]

    run_in_pool(test, workers=1, slots=1)


def test_hung_step_ends_at_its_deadline_and_the_worker_is_replaced():
    async def test(pool):
        async with pool.open_session() as hangs, pool.open_session() as neighbour:
            await hangs.reset(TASK, 0)
            await neighbour.reset(TASK, 0)
            waiting = asyncio.create_task(run_episode(pool))
            hanging_step, neighbour_step = (
                asyncio.create_task(hangs.step("hang")),
                asyncio.create_task(neighbour.step("go")),
            )
            await expect_failure("timeout", hanging_step)
            await expect_failure("dead", neighbour_step)
            assert await waiting == ["step 1", "step 2", "step 3"]
        assert pool.counts["failed_timeout"] == 1 and pool.counts["failed_dead"] == 1

    run_in_pool(test, workers=1, slots=2, step_timeout_s=0.7)


def test_deadline_of_a_call_excludes_calls_before_it():
    async def test(pool):
        # 12 environments of one process have steps of 0.1 s. The last call waits 1.2 s and still
        # meets its deadline of 0.6 s.
        episodes = await asyncio.gather(*(run_episode(pool, steps=1) for _ in range(12)))
        assert len(episodes) == 12

    run_in_pool(test, "tests.helpers.faulty_envs:SLOW", workers=1, slots=12, step_timeout_s=0.6)


@pytest.mark.parametrize(
    ("fault", "kind"), [("raise", "error"), ("hang", "timeout"), ("kill", "dead")]
)
def test_faults_in_reset_fail_the_session(fault, kind):
    async def test(pool):
        async with pool.open_session() as env:
            await expect_failure(kind, env.reset({**TASK, "fault": fault}, 0))
        assert await run_episode(pool) == ["step 1", "step 2", "step 3"]

    async def main():
        pool = EnvironmentPool(FAULTY, {}, 1, 1, reset_timeout_s=0.7, step_timeout_s=10)
        await pool.start()
        await test(pool)
        await pool.close()

    asyncio.run(asyncio.wait_for(main(), 60))


def test_exception_fails_one_session_and_keeps_the_worker():
    async def test(pool):
        pids = pool.worker_pids
        async with pool.open_session() as env, pool.open_session() as neighbour:
            await env.reset(TASK, 0)
            await neighbour.reset(TASK, 0)
            failure = await expect_failure("error", env.step("raise"))
            assert "ValueError('the environment broke')" in str(failure)
            await expect_failure("error", env.step("go"))  # no episode is running
            assert (await neighbour.step("go"))[0].text == "step 1"
            assert (await env.reset(TASK, 0)).text.startswith("start")
        assert pool.worker_pids == pids and pool.counts["restarts"] == 0

    run_in_pool(test, workers=1)


@pytest.mark.parametrize("fault", sorted(RETURNS))
def test_invalid_returns_fail_and_keep_the_worker(fault):
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await expect_failure("garbage", env.step(fault))
        assert await run_episode(pool) and pool.counts["restarts"] == 0

    run_in_pool(test, workers=1, slots=1)


def test_noise_on_the_socket_fails_and_ends_the_worker():
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await expect_failure("garbage", env.step("noise"))
        assert await run_episode(pool) and pool.counts["restarts"] == 1

    run_in_pool(test, workers=1, slots=1)


def test_prints_of_an_environment_are_harmless():
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset({**TASK, "fault": "print"}, 0)
            assert (await env.step("print"))[0].text == "step 1"

    run_in_pool(test, workers=1, slots=1)


def test_printed_output_is_bounded(monkeypatch):
    monkeypatch.setattr(pool_processes, "MAX_OUTPUT_BYTES", 60)

    async def test(pool):
        (worker,) = pool._workers
        for _ in range(20):
            async with pool.open_session() as env:
                await env.reset({**TASK, "fault": "print"}, 0)
                await env.step("print")
        size = os.fstat(worker._output_file.fileno()).st_size
        assert size < 120 and "printed by the environment" in worker._read_last_output()

    run_in_pool(test, workers=1, slots=1)


def test_spare_worker_replaces_a_slow_start():
    async def test(pool):
        await wait_until(lambda: pool._spare_worker is not None)
        spare = pool._spare_worker.process_id
        os.kill(pool.worker_pids[0], signal.SIGKILL)
        await wait_until(lambda: pool.worker_pids == [spare])
        assert await run_episode(pool)
        await wait_until(
            lambda: pool._spare_worker is not None and pool._spare_worker.process_id != spare
        )

    run_in_pool(test, workers=1, slots=1, section={"start_s": 1.2})


def test_cancelled_trajectories_leave_a_usable_environment():
    async def test(pool):
        async def step_slowly():
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                await env.step("nap")

        task = asyncio.create_task(step_slowly())
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await run_episode(pool) == ["step 1", "step 2", "step 3"]

    run_in_pool(test, "tests.helpers.faulty_envs:SLOW", workers=1, slots=1)


def test_coroutine_environments_run_concurrently_in_one_process():
    async def test(pool):
        order = []

        async def run_step(name, action):
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                await env.step(action)
                order.append(name)

        await asyncio.gather(run_step("slow", "sleep"), run_step("quick", "go"))
        assert order == ["quick", "slow"]
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            await expect_failure("timeout", env.step("hang"))
        assert await run_episode(pool)

    run_in_pool(test, "tests.helpers.faulty_envs:ASYNC", workers=1, slots=2, step_timeout_s=1.0)


@pytest.mark.parametrize("placement", ["inline", "thread", "locked"])
def test_placements_inside_the_process(placement):
    async def test(pool):
        episodes = await asyncio.gather(*(run_episode(pool) for _ in range(6)))
        assert episodes == [["step 1", "step 2", "step 3"]] * 6
        for fault, kind in [("raise", "error"), ("none", "garbage"), ("hang", "timeout")]:
            async with pool.open_session() as env:
                assert "start" in (await env.reset(TASK, 0)).text
                await expect_failure(kind, env.step(fault))
            assert await run_episode(pool)

    run_in_pool(
        test,
        "tests.helpers.faulty_envs:LOCAL",
        workers=1,
        slots=2,
        step_timeout_s=0.5,
        placement=placement,
    )


def test_locked_class_gets_one_call_at_a_time():
    async def test(pool):
        async def step_after(delay_s):
            async with pool.open_session() as env:
                await env.reset(TASK, 0)
                await asyncio.sleep(delay_s)
                return (await env.step("overlap"))[3]["overlap"]

        assert not any(await asyncio.gather(*(step_after(0.0) for _ in range(4))))

    run_in_pool(test, "tests.helpers.faulty_envs:OVERLAP", workers=1, slots=4, placement="locked")


def test_hanging_call_in_a_locked_class_delays_the_others(monkeypatch):
    go_on = threading.Event()
    for name, value in {"go_on": go_on, "steps_begun": 0, "closed": 0}.items():
        monkeypatch.setattr(OverlapEnv, name, value)

    async def test(pool):
        async with (
            pool.open_session() as hangs,
            pool.open_session() as neighbour,
            pool.open_session() as late,
        ):
            for env in (hangs, neighbour, late):
                await env.reset(TASK, 0)
            hanging_step = asyncio.create_task(hangs.step("hang"))
            neighbour_step = asyncio.create_task(neighbour.step("go"))
            await expect_failure("timeout", hanging_step)
            await expect_failure("timeout", neighbour_step)
            for _ in range(3):
                await expect_failure(
                    "timeout", late.step("go")
                )  # at its own deadline, after any number of failures
            assert OverlapEnv.steps_begun == 1, "a call that timed out in the queue was executed"
            go_on.set()
            observation = await neighbour.reset(TASK, 0)
            assert (
                observation.text.startswith("start")
                and not (await neighbour.step("go"))[3]["overlap"]
            )
            await wait_until(lambda: OverlapEnv.closed == 3)
        assert pool.counts["failed_timeout"] == 5

    try:
        run_in_pool(
            test,
            "tests.helpers.faulty_envs:OVERLAP",
            workers=1,
            slots=3,
            step_timeout_s=0.3,
            placement="locked",
        )
    finally:
        go_on.set()


def test_late_environment_is_not_used_by_later_sessions():
    async def test(pool):
        async with pool.open_session() as env:
            await expect_failure("timeout", env.reset(TASK, 0))
        pool.section["start_s"] = 0  # the slots share this section
        async with pool.open_session() as env:
            first = (await env.reset(TASK, 0)).info["env"]
            await asyncio.sleep(0.5)  # the late environment is created meanwhile
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
def test_timeout_and_stop_iteration_of_an_environment_are_errors(placement, kind_of_env, fault):
    async def test(pool):
        async with pool.open_session() as env, pool.open_session() as neighbour:
            await env.reset(TASK, 0)
            await neighbour.reset(TASK, 0)
            failed, (observation, *_) = await asyncio.gather(
                expect_failure("error", env.step(fault)), neighbour.step("go")
            )
            assert observation.text == "step 1" and (
                "TimeoutError" in str(failed) or "StopIteration" in str(failed)
            )
            assert (await neighbour.step("go"))[0].text == "step 2"
        assert pool.counts["failed_timeout"] == pool.counts["restarts"] == 0

    run_in_pool(
        test, f"tests.helpers.faulty_envs:{kind_of_env}", workers=1, slots=2, placement=placement
    )


@pytest.mark.parametrize("placement", ["thread", "locked"])
def test_environment_that_exits_does_not_end_its_thread(placement):
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            assert "SystemExit" in str(await expect_failure("error", env.step("leave")))
        assert await run_episode(pool) == ["step 1", "step 2", "step 3"]

    run_in_pool(test, "tests.helpers.faulty_envs:LOCAL", workers=1, slots=1, placement=placement)


def test_unknown_placement_is_refused():
    with pytest.raises(ValueError, check=mentions("inline", "thread", "locked", "process")):
        EnvironmentPool(FAULTY, placement="moon")


def test_environment_that_cannot_start_ends_the_run():
    previous_children = children()

    async def start(section):
        await EnvironmentPool(FAULTY, section, 2, 1).start()

    with pytest.raises(WorkerStartError, match="no such engine"):
        asyncio.run(start({"fail_start": True}))
    with pytest.raises(env_registry.MissingExtraError, check=mentions("no_such_engine")):
        asyncio.run(start({"missing": True}))
    assert not children() - previous_children


def test_start_after_its_deadline_is_refused():
    async def start():
        await EnvironmentPool(FAULTY, {"start_s": 30}, 1, 1, start_timeout_s=0.5).start()

    previous_children = children()
    with pytest.raises(WorkerStartError, check=mentions("0.5 s")):
        asyncio.run(start())
    assert not children() - previous_children


def test_children_of_a_worker_end_with_it():
    async def test(pool):
        async with pool.open_session() as env:
            await env.reset(TASK, 0)
            grandchild = (await env.step("child"))[3]["child"]
            assert psutil.pid_exists(grandchild)
            await expect_failure("timeout", env.step("hang"))
            await wait_until(lambda: not is_alive(grandchild))

    run_in_pool(test, workers=1, slots=1, step_timeout_s=0.5)


def is_alive(pid):
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


def test_workers_end_with_a_killed_parent():
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
    assert len(pids) == 2 and all(is_alive(pid) for pid in pids)
    parent.kill()
    parent.wait(timeout=10)
    asyncio.run(wait_until(lambda: not any(is_alive(pid) for pid in pids)))


def test_images_and_numbers_arrive_unchanged():
    async def test(pool):
        async with pool.open_session() as env:
            observation = await env.reset(TASK, 0)
            assert observation.image.shape == (2, 3, 3) and observation.image.dtype.name == "uint8"
            assert observation.image.sum() == 153 and observation.info["score"] == 7

    run_in_pool(test, "tests.helpers.faulty_envs:IMAGE", workers=1, slots=1)
