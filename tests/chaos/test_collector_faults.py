"""Tests of environment faults during a batch, through the collector: the run continues without the
failed trajectories.
"""

import asyncio

import pytest

from agent_system.environments.pool.environment_pool import PoolSession
from agent_system.multi_turn_rollout.rollout_loop import TrajectoryCollector
from tests.helpers.jobs import children
from tests.helpers.number_line_world import make_config, make_world
from tests.helpers.tiny_model import make_tiny_tokenizer

LINE = "tests.helpers.faulty_envs:LINE"
GROUPS, N = 6, 3  # on two workers: nine trajectories on each
ONE_WORKER = {"kill": "dead", "noise": "garbage", "hang": "timeout"}
ONE_TRAJECTORY = {
    "raise": "error",
    "none": "garbage",
    "half a character": "garbage",
}  # the pool tests cover more faults
FAULTS = ONE_WORKER | ONE_TRAJECTORY
FAULTY_STEP = 20  # counted over all trajectories
SHORTEST = 3  # turns of the shortest trajectory; see make_world
PATIENCE_S = 300.0  # for calls that do not hang, so that a busy machine is no fault


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def collect_with_fault(tokenizer, monkeypatch):
    """Return ``run(fault, **env)``: the rows of a batch in which the twentieth env step fails.

    The trajectories that fail must not depend on the speed of the processes. So the last turn of a
    shortest trajectory waits until the fault was sent, and only the faulty call has the short
    deadline.
    """

    def run(fault, workers=2, groups=GROUPS, **env):
        step = PoolSession.step
        step_counts: dict[PoolSession, int] = {}
        fault_sent = asyncio.Event()

        async def step_with_fault(session, action):
            step_counts[session] = step_counts.get(session, 0) + 1
            if sum(step_counts.values()) == FAULTY_STEP:
                # Waiting steps resume after this call is written, so the worker reads it first.
                fault_sent.set()
                return await step(session, fault)
            if step_counts[session] == SHORTEST:
                await fault_sent.wait()
            return await session._call_worker("step", {"action": action}, PATIENCE_S)

        monkeypatch.setattr(PoolSession, "step", step_with_fault)
        sizes = {
            "num_workers": workers,
            "envs_per_worker": GROUPS * N // workers,
            "step_timeout_s": 1.0,
            "reset_timeout_s": PATIENCE_S,
        }
        config = make_config(LINE, n=N, **sizes, **env)
        group, envs, _ = make_world(tokenizer, config)
        collector, previous_children = TrajectoryCollector(config, tokenizer), children()
        try:
            return collector.multi_turn_loop(envs.gen_batch(1, groups), group, envs)
        finally:
            collector.close()
            assert not children() - previous_children

    return run


@pytest.mark.parametrize("fault", FAULTS)
def test_only_failed_trajectories_are_dropped(collect_with_fault, fault):
    metrics = check_rows(collect_with_fault(fault, on_abort="keep_rest"), fault)
    assert metrics["rollout/left_out_group_of_aborted"] == 0
    assert metrics["rollout/env_restarts"] == (fault in ONE_WORKER)


@pytest.mark.parametrize("fault", FAULTS)
def test_groups_of_failed_trajectories_are_dropped(collect_with_fault, fault):
    metrics = check_rows(collect_with_fault(fault, on_abort="drop_group"), fault)
    assert metrics["rollout/left_out_group_of_aborted"] == (0 if fault in ONE_WORKER else N - 1)


def check_rows(data, fault):
    """Check that ``data`` holds all trajectories that were not dropped; return its metrics."""
    metrics = data.meta_info["metrics"]
    assert metrics["rollout/aborted"] == (9 if fault in ONE_WORKER else 1)
    assert metrics[f"rollout/aborted_env_{FAULTS[fault]}"] >= 1
    num_dropped = metrics["rollout/left_out_aborted"] + metrics["rollout/left_out_group_of_aborted"]
    assert len(data) == GROUPS * N - num_dropped
    assert data.non_tensor_batch["won"].all() and not data.non_tensor_batch["aborted"].any()
    return metrics


@pytest.mark.parametrize("on_abort", ["drop_group", "keep_rest"])
def test_other_tasks_replace_the_batch_of_a_dead_worker(collect_with_fault, on_abort):
    data = collect_with_fault("kill", workers=1, on_abort=on_abort)
    metrics, columns = data.meta_info["metrics"], data.non_tensor_batch
    assert (
        metrics["rollout/aborted_env_dead"]
        == metrics["rollout/left_out_aborted"]
        == GROUPS * N
        == len(data)
    )
    assert columns["won"].all() and {uid.split("-")[2] for uid in columns["uid"]} == {"1"}
