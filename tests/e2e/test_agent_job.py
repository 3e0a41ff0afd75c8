"""Trains an agent behind an ``openai`` client: the number line, a random policy, two steps."""

import pytest

from tests.helpers.jobs import start
from tests.helpers.tiny_model import make_tiny_policy
from verl.record.tracking import read_metrics
from verl.utils import jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
TIMEOUT_S = 240
GONE_S = 20
STEPS = 2
AGENT = "tests.helpers.number_line_agents"
OVERRIDES = [
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.num_threads=1",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=4",
    "data.max_prompt_length=640",
    "data.max_response_length=384",
    "env.env_name=agent",
    f"env.agent.path={AGENT}:play_loosely",
    f"env.agent.tasks={AGENT}:short_tasks",
    "env.history=append",
    "env.max_steps=6",
    "env.max_turn_tokens=16",
    "env.num_workers=1",
    "env.rollout.n=4",
    "env.step_timeout_s=120",
    "env.val_tasks=4",
    "trainer.num_threads=1",
    f"trainer.test_freq={STEPS}",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
]


def test_agent_behind_an_openai_client_is_trained(tmp_path):
    run = tmp_path / "run"
    policy = make_tiny_policy(tmp_path / "policy", std=0.2)
    path_overrides = [f"actor_rollout_ref.model.path={policy}", f"trainer.default_local_dir={run}"]
    job = start([*OVERRIDES, *path_overrides], tmp_path / "log.txt")
    job.finish(TIMEOUT_S)
    assert job.left_over(GONE_S) == []
    metrics = read_metrics(run)
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    for record in metrics:
        assert record["rollout/aborted"] == 0.0
        # The trainer and the engine agree on the sampled tokens.
        assert record["training/rollout_log_probs_diff_max"] < 1e-3
    assert max(record["actor/grad_norm"] for record in metrics) > 0
    versions = [record["rollout/policy_version"] for record in metrics]
    assert versions[1] > versions[0], "the second batch was generated with old weights"
    assert "val/success_rate" in metrics[-1]
    rows = list(jsonl.read(run / "rollouts" / f"{STEPS}.jsonl"))
    assert len({row["traj_uid"] for row in rows}) == len(rows) == 16, "a trajectory is not one row"
    assert max(row["length"] for row in rows) > 1
