"""Runs each kind of training for two steps: a tiny policy on the number line.

All but one of the jobs use the engine ``hf``.
"""

import math
from functools import partial
from pathlib import Path

import pytest

from tests.helpers.engine_cases import make_hybrid_policy
from tests.helpers.jobs import start
from tests.helpers.number_line_policy import write_line_policy
from tests.helpers.smoke_job import NEEDS_VLLM
from verl.record.tracking import read_metrics
from verl.utils import jsonl

pytestmark = [pytest.mark.slow, pytest.mark.timeout(420)]
TIMEOUT_S = 240
GONE_S = 20
STEPS = 2
COMMON = [
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.optim.lr=1e-3",
    "actor_rollout_ref.actor.ppo_mini_batches=2",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.num_threads=1",
    "data.train_batch_size=4",
    "data.max_prompt_length=640",
    "data.max_response_length=384",
    "env.env_name=number_line",
    "env.history=append",
    "env.kwargs={size:4}",
    "env.levels=true",
    "env.max_steps=4",
    "env.max_turn_tokens=48",
    "env.rollout.n=4",
    "env.val_tasks=4",
    "trainer.num_threads=1",
    f"trainer.total_training_steps={STEPS}",
    "trainer.val_before_train=false",
]
DRIFT = "training/rollout_log_probs_diff_max"


@pytest.fixture(scope="module")
def policy(tmp_path_factory) -> Path:
    """Write a policy that mostly follows the output format."""
    return write_line_policy(tmp_path_factory.mktemp("line_policy"))


def run_job(
    policy: Path, directory: Path, *overrides: str, max_drift: float = 1e-3
) -> tuple[list[dict], list[dict]]:
    """Run ``STEPS`` steps with ``overrides``; return metrics per step and the rows of the last
    step.

    Log-probs of engine and trainer may differ by ``max_drift`` nats.
    """
    path_overrides = [
        f"actor_rollout_ref.model.path={policy}",
        f"trainer.default_local_dir={directory}/run",
    ]
    job = start([*COMMON, *path_overrides, *overrides], directory / "log.txt")
    job.finish(TIMEOUT_S)
    assert job.left_over(GONE_S) == []
    metrics = read_metrics(directory / "run")
    assert [record["step"] for record in metrics] == list(range(1, STEPS + 1))
    for record in metrics:
        # The log-probs differ only if other weights generated than are trained.
        assert record[DRIFT] < max_drift or record["training/staleness"] > 0
    return metrics, list(jsonl.read(directory / "run" / "rollouts" / f"{STEPS}.jsonl"))


@pytest.fixture
def run_variant(policy, tmp_path):
    """Return a function that runs a job with ``COMMON`` and more overrides."""
    return partial(run_job, policy, tmp_path)


def are_finite(metrics: list[dict], *names: str) -> bool:
    """Return True if every step has a finite number under each of ``names``."""
    return all(math.isfinite(record[name]) for record in metrics for name in names)


def test_gae_trains_a_critic(run_variant):
    metrics, rows = run_variant(
        "algorithm.adv_estimator=gae", "algorithm.lam=0.95", "critic.optim.lr=1e-3"
    )
    assert are_finite(
        metrics, "critic/vf_loss", "critic/grad_norm", "critic/values/mean", "actor/pg_loss"
    )
    assert metrics[-1]["actor/grad_norm"] > 0
    assert any(step["advantage"] for row in rows for step in row["steps"])


def test_lora_sends_adapters_and_needs_no_second_model(run_variant, tmp_path):
    metrics, _ = run_variant(
        "algorithm.adv_estimator=gae",
        "critic.optim.lr=1e-3",
        "critic.model.lora_rank=2",
        "actor_rollout_ref.model.lora_rank=4",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "algorithm.use_kl_in_reward=true",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=2",
    )
    assert are_finite(metrics, "critic/vf_loss", "actor/pg_loss", "actor/kl_loss")
    assert abs(metrics[0]["actor/reward_kl_penalty"]) < 1e-4, (
        "the reference differs from the initial policy"
    )
    assert metrics[1]["actor/kl_loss"] > 0
    sent = [record["perf/weight_sync_bytes"] for record in metrics]
    weights = tmp_path / "run/checkpoints/global_step_2/actor"
    stored = sum(path.stat().st_size for path in weights.glob("shard-*.safetensors"))
    assert 0 < sent[0] == sent[1] < stored / 4


def test_gigpo_trains_with_a_window_of_history(run_variant):
    metrics, rows = run_variant(
        "algorithm.adv_estimator=gigpo", "env.history=window", "env.history_length=2"
    )
    assert are_finite(
        metrics, "actor/pg_loss", "actor/grad_norm", "critic/advantages/mean", "episode/reward"
    )
    assert all(len(row["steps"]) == 1 for row in rows), "a row is not one turn"
    trajectories = {row["traj_uid"] for row in rows}
    assert len(trajectories) == 16
    assert len(rows) == sum({row["traj_uid"]: row["length"] for row in rows}.values())


def test_user_module_trains_on_two_ranks_with_a_reference(run_variant):
    """Driver, collector, engine and training workers use the entries that ``external_lib``
    registers.
    """
    metrics, _ = run_variant(
        "actor_rollout_ref.model.external_lib=tests.helpers.external_lib",
        "algorithm.adv_estimator=my_estimator",
        "actor_rollout_ref.actor.policy_loss.loss_mode=my_loss",
        "actor_rollout_ref.rollout.name=my_engine",
        "env.env_name=my_line",
        "algorithm.use_kl_in_reward=true",
        "trainer.n_gpus_per_node=2",
        "trainer.save_freq=2",
        "actor_rollout_ref.actor.use_kl_loss=true",
        "actor_rollout_ref.actor.kl_loss_coef=0.01",
    )
    assert are_finite(
        metrics, "actor/kl_loss", "actor/reward_kl_penalty", "actor/pg_loss", "actor/grad_norm"
    )
    assert abs(metrics[0]["actor/reward_kl_penalty"]) < 1e-4, (
        "the reference differs from the initial policy"
    )
    assert metrics[1]["actor/kl_loss"] > 0


def run_hybrid_job(directory: Path, *overrides: str, max_drift: float) -> list[dict]:
    """Run the config of the hybrid number line and return the metrics per step.

    The policy is random, so only the entropy bonus gives a gradient.
    """
    metrics, _ = run_job(
        make_hybrid_policy(directory / "policy"),
        directory,
        "--config-name=number_line_hybrid",
        "actor_rollout_ref.actor.entropy_coeff=0.1",
        *overrides,
        max_drift=max_drift,
    )
    assert all(record["actor/grad_norm"] > 0 for record in metrics)
    assert "row by row" in (directory / "log.txt").read_text()
    return metrics


def test_hybrid_trains_with_passes_by_rows(tmp_path):
    metrics = run_hybrid_job(tmp_path, max_drift=1e-4)
    assert not any("rollout_corr/rollout_is_max" in record for record in metrics)


@NEEDS_VLLM
def test_hybrid_trains_on_corrected_rollouts_of_vllm(tmp_path):
    overrides = ["name=vllm", "dtype=bfloat16", "kv_cache_gb=0.1"]
    metrics = run_hybrid_job(
        tmp_path, *(f"actor_rollout_ref.rollout.{word}" for word in overrides), max_drift=0.3
    )
    # Weights of tokens that bfloat16 changes.
    assert all(1.01 < record["rollout_corr/rollout_is_max"] < 1.3 for record in metrics)


@pytest.fixture(scope="module")
def overlapping(policy, tmp_path_factory):
    """Run copo with rollouts that overlap with updates; return metrics and the rows of the last
    step.
    """
    overrides = ["algorithm.adv_estimator=copo", "algorithm.rlvcr.score=prob"]
    overrides.append("trainer.rollout_overlap=one_step")
    return run_job(policy, tmp_path_factory.mktemp("overlapping"), *overrides)


def test_copo_reweights_by_the_scores_of_four_thoughts(overlapping):
    metrics, rows = overlapping
    assert are_finite(
        metrics, "actor/pg_loss", "rlvcr/score_logprob", "rlvcr/level_share_1", "timing_s/step"
    )
    scored = [step["contexts"] for row in rows for step in row["steps"] if step["contexts"]]
    assert all(
        [context["original"] for context in contexts].count(True) == 1 for contexts in scored
    )
    assert max(map(len, scored)) > 1, "no thought of this policy can be scored"


def test_rollouts_overlap_with_updates(overlapping):
    metrics, rows = overlapping
    # The second batch was generated before the first update.
    assert [record["training/staleness"] for record in metrics] == [0.0, 1.0]
    assert [record["training/staleness_max"] for record in metrics] == [0.0, 1.0]
    assert metrics[1]["rollout_corr/k3_kl"] > 1e-6 > abs(metrics[0]["rollout_corr/k3_kl"])
    assert are_finite(metrics, "actor/grad_norm", "timing_s/gen")
    # The last step prefetches no batch.
    assert are_finite(metrics[:-1], "timing_s/wait_for_plays")
    assert rows
