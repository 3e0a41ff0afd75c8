"""Faults of environments in the middle of a batch, through the collector: the run goes on without
what they hit.
"""

import asyncio

import pytest

from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.jobs import children
from tests.helpers.play import make_config, make_world
from tests.helpers.tiny_model import make_tiny_tokenizer

LINE = "tests.helpers.faulty_envs:LINE"
GROUPS, N = 6, 3  # on two workers: nine trajectories on each
ONE_WORKER = {"kill": "dead", "noise": "garbage", "hang": "timeout"}
ONE_TRAJECTORY = {
    "raise": "error",
    "none": "garbage",
    "half a character": "garbage",
}  # tests of the pool have more
FAULTS = ONE_WORKER | ONE_TRAJECTORY
FAULTY_STEP = 20  # of all trajectories together
SHORTEST = 3  # steps of the shortest trajectory; see make_world
PATIENCE_S = 300.0  # for calls that do not hang: a busy machine is no fault


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def play(tokenizer, monkeypatch):
    """``play(fault, **env)``: the rows of a batch in which the twentieth step of an environment
    goes wrong.

    Which trajectories that hits must not depend on how fast each process runs. So nobody takes the
    last step of a shortest trajectory before the fault is on its way, and the short deadline is
    that of the faulty call alone.
    """

    def run(fault, workers=2, groups=GROUPS, **env):
        step = PoolSession.step
        asked: dict[PoolSession, int] = {}
        struck = asyncio.Event()

        async def faulty(session, action):
            asked[session] = asked.get(session, 0) + 1
            if sum(asked.values()) == FAULTY_STEP:
                struck.set()  # who waits wakes after this call is written, so it is read first
                return await step(session, fault)
            if asked[session] == SHORTEST:
                await struck.wait()
            return await session._call("step", {"action": action}, PATIENCE_S)

        monkeypatch.setattr(PoolSession, "step", faulty)
        sizes = {
            "num_workers": workers,
            "envs_per_worker": GROUPS * N // workers,
            "step_timeout_s": 1.0,
            "reset_timeout_s": PATIENCE_S,
        }
        config = make_config(LINE, n=N, **sizes, **env)
        group, envs, _ = make_world(tokenizer, config)
        collector, known = TrajectoryCollector(config, tokenizer), children()
        try:
            return collector.multi_turn_loop(envs.gen_batch(1, groups), group, envs)
        finally:
            collector.close()
            assert not children() - known

    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_only_what_a_fault_touches_is_left_out(play, fault):
    metrics = check(play(fault, on_abort="keep_rest"), fault)
    assert metrics["rollout/left_out_group_of_aborted"] == 0
    assert metrics["rollout/env_restarts"] == (fault in ONE_WORKER)


@pytest.mark.parametrize("fault", FAULTS)
def test_or_the_groups_of_what_it_touches(play, fault):
    metrics = check(play(fault, on_abort="drop_group"), fault)
    assert metrics["rollout/left_out_group_of_aborted"] == (0 if fault in ONE_WORKER else N - 1)


def check(data, fault):
    """Metrics of ``data``, which holds every trajectory that was not left out, won."""
    metrics = data.meta_info["metrics"]
    assert metrics["rollout/aborted"] == (9 if fault in ONE_WORKER else 1)
    assert metrics[f"rollout/aborted_env_{FAULTS[fault]}"] >= 1
    left_out = metrics["rollout/left_out_aborted"] + metrics["rollout/left_out_group_of_aborted"]
    assert len(data) == GROUPS * N - left_out
    assert data.non_tensor_batch["won"].all() and not data.non_tensor_batch["aborted"].any()
    return metrics


@pytest.mark.parametrize("on_abort", ["drop_group", "keep_rest"])
def test_where_a_dead_worker_took_everything_other_tasks_are_played(play, on_abort):
    data = play("kill", workers=1, on_abort=on_abort)
    metrics, columns = data.meta_info["metrics"], data.non_tensor_batch
    assert (
        metrics["rollout/aborted_env_dead"]
        == metrics["rollout/left_out_aborted"]
        == GROUPS * N
        == len(data)
    )
    assert columns["won"].all() and {uid.split("-")[2] for uid in columns["uid"]} == {"1"}
