"""Tests of a cluster of three nodes on this machine that loses two of them, one after the other.

- head: driver, a rank, an engine, a collector; stays.
- far: a rank, an engine, a collector; lost second, and the run ends with the reason.
- bare: a collector and its environments; lost first, and the run continues.
"""

import re

import pytest
from ray.cluster_utils import Cluster

from tests.helpers.jobs import start
from tests.helpers.refusals import list_log_lines
from tests.helpers.tiny_model import make_tiny_policy
from verl.record.tracking import read_metrics
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager, verify_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMEOUT_S = 180
STEPS = 1000  # more than are completed before the last node is lost
TRAJECTORIES_PER_STEP = 6
# Detect a lost node quickly; with its defaults Ray needs about ten seconds.
HEALTH_CHECKS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
    "worker_niceness": 0,
}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
OVERRIDES = [
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batches=1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.num_threads=1",
    "actor_rollout_ref.rollout.num_workers=2",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=3",
    "data.max_prompt_length=640",
    "data.max_response_length=384",
    "env.env_name=number_line",
    "env.history=append",
    "env.kwargs={size:4}",
    "env.max_steps=2",
    "env.max_turn_tokens=16",
    "env.num_collectors=3",
    "env.rollout.n=2",
    "env.val_tasks=2",
    "trainer.n_gpus_per_node=1",
    "trainer.nnodes=2",
    "trainer.num_threads=1",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
]
COLLECTORS = "agent_system.multi_turn_rollout.collector_group"


@pytest.fixture
def cluster():
    """Start three nodes. One has no CPU, so neither a rank nor an engine fits there."""
    cluster = Cluster(
        initialize_head=True,
        head_node_args={**NODE, "num_cpus": 1, "_system_config": HEALTH_CHECKS},
    )
    far = cluster.add_node(**NODE, num_cpus=1)
    bare = cluster.add_node(**NODE, num_cpus=0)
    yield cluster, far, bare
    cluster.shutdown()


def count_lost_collectors(run, step: int) -> float:
    """Return the recorded number of collectors that were lost up to ``step``."""
    records = [record for record in read_metrics(run) if record["step"] <= step]
    return sum(record["rollout/collectors_lost"] for record in records)


def test_lost_collector_is_replaced_and_lost_rank_ends_the_run(cluster, tmp_path):
    nodes, far, bare = cluster
    run = tmp_path / "run"
    checkpoints = CheckpointManager(run / "checkpoints")
    overrides = [
        *OVERRIDES,
        f"actor_rollout_ref.model.path={make_tiny_policy(tmp_path / 'policy')}",
        f"ray_init.address={nodes.address}",
        f"trainer.default_local_dir={run}",
    ]
    log = tmp_path / "lost.txt"
    job = start([*overrides, f"trainer.total_training_steps={STEPS}"], log)
    job.wait_for(checkpoints.find_checkpoints, TIMEOUT_S)
    nodes.remove_node(bare, allow_graceful=False)
    job.wait_for(lambda: list_log_lines(log.read_text(), COLLECTORS, "collector-"), TIMEOUT_S)
    # Saves run in the background: the step that counts the loss may not be saved yet.
    job.wait_for(lambda: count_lost_collectors(run, max(checkpoints.find_checkpoints())), TIMEOUT_S)
    nodes.remove_node(far, allow_graceful=False)
    assert job.wait(TIMEOUT_S) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert re.search(r"\S+ \([0-9a-f]{8}\)", last)
    newest = checkpoints.find_latest_valid()
    assert newest is not None
    steps = 2 + int(newest.name.rsplit("_", 1)[1])

    resumed = start([*overrides, f"trainer.total_training_steps={steps}"], tmp_path / "resumed.txt")
    resumed.finish(TIMEOUT_S)
    log_text = (tmp_path / "resumed.txt").read_text()
    assert list_log_lines(log_text, "verl.trainer.ppo.ray_trainer", newest)
    recorded = [record["step"] for record in jsonl.read(run / "metrics.jsonl")]
    assert recorded == list(range(1, steps + 1))
    assert count_lost_collectors(run, steps) == 1
    for step in recorded:
        # No trajectory of the lost collector is missing.
        trajectory_ids = {
            line["traj_uid"] for line in jsonl.read(run / "rollouts" / f"{step}.jsonl")
        }
        assert len(trajectory_ids) == TRAJECTORIES_PER_STEP
    verify_checkpoint(checkpoints.find_checkpoints()[steps])
