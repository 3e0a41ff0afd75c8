"""A cluster of three nodes on this machine loses two of them, one after the other.

home   driver, a rank, an engine, a collector      stays
far    a rank, an engine, a collector              lost second: the run ends and says why
bare   a collector and its environments            lost first: the run goes on
"""

import re

import pytest
from ray.cluster_utils import Cluster

from tests.helpers.jobs import start
from tests.helpers.tiny_model import make_tiny_policy
from verl.record.tracking import read_metrics
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager, verify_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
TIMEOUT_S = 180
STEPS = 1000  # more than are taken before the last node is lost
PLAYS = 6
# So that a lost node is noticed soon; by default it takes Ray about ten seconds.
NOTICE = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 500,
    "health_check_timeout_ms": 2000,
    "health_check_failure_threshold": 2,
    "worker_niceness": 0,
}
NODE = {"object_store_memory": 80 * 2**20, "include_dashboard": False}
WORDS = [
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
LOST = "died; its unfinished trajectories start again"


@pytest.fixture
def cluster():
    """Three nodes of which one has no CPU to give: neither a rank nor an engine fits there."""
    cluster = Cluster(
        initialize_head=True, head_node_args={**NODE, "num_cpus": 1, "_system_config": NOTICE}
    )
    far = cluster.add_node(**NODE, num_cpus=1)
    bare = cluster.add_node(**NODE, num_cpus=0)
    yield cluster, far, bare
    cluster.shutdown()


def lost_until(run, step: int) -> float:
    """The collectors lost in the iterations up to ``step``, as the run recorded them."""
    records = [record for record in read_metrics(run) if record["step"] <= step]
    return sum(record["rollout/collectors_lost"] for record in records)


def test_environments_may_be_lost_and_ranks_end_the_run_which_goes_on_where_it_was(
    cluster, tmp_path
):
    nodes, far, bare = cluster
    run = tmp_path / "run"
    checkpoints = CheckpointManager(run / "checkpoints")
    words = [
        *WORDS,
        f"actor_rollout_ref.model.path={make_tiny_policy(tmp_path / 'policy')}",
        f"ray_init.address={nodes.address}",
        f"trainer.default_local_dir={run}",
    ]
    log = tmp_path / "lost.txt"
    job = start([*words, f"trainer.total_training_steps={STEPS}"], log)
    job.wait_for(checkpoints.find_checkpoints, TIMEOUT_S)
    nodes.remove_node(bare, allow_graceful=False)
    job.wait_for(lambda: LOST in log.read_text(), TIMEOUT_S)
    # Saves go on beside the next iterations: the step that counts the loss may not be saved yet.
    job.wait_for(lambda: lost_until(run, max(checkpoints.find_checkpoints())), TIMEOUT_S)
    nodes.remove_node(far, allow_graceful=False)
    assert job.wait(TIMEOUT_S) == 1
    last = log.read_text().strip().splitlines()[-1]
    assert re.search(r"the node \S+ \(\w+\) of the cluster is gone$", last)
    newest = checkpoints.find_latest_valid()
    assert newest is not None
    steps = 2 + int(newest.name.rsplit("_", 1)[1])

    again = start([*words, f"trainer.total_training_steps={steps}"], tmp_path / "again.txt")
    again.finish(TIMEOUT_S)
    assert f"resumed from {newest}" in (tmp_path / "again.txt").read_text()
    recorded = [record["step"] for record in jsonl.read(run / "metrics.jsonl")]
    assert recorded == list(range(1, steps + 1))
    assert lost_until(run, steps) == 1
    for step in recorded:
        # None of the lost plays is missing.
        plays = {line["traj_uid"] for line in jsonl.read(run / "rollouts" / f"{step}.jsonl")}
        assert len(plays) == PLAYS
    verify_checkpoint(checkpoints.find_checkpoints()[steps])
