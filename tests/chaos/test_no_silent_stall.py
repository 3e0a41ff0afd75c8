"""Parts of a job are stopped at one of its stages: the job ends by
its deadline, with a sentence that names the part.
"""

import re

import pytest

from tests.helpers.jobs import start
from tests.helpers.tiny_model import make_tiny_policy
from verl.utils.checkpoint import CheckpointManager

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
# Without movement, by the clock of ``struck_parts``: no honest part takes as long, and once a part
# was struck it is over in four seconds.
STALL_S = 200
DEADLINE_S = 240  # a machine that is busy with other jobs starts Ray slowly
GONE_S = 30
WORDS = [
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batches=1",
    "actor_rollout_ref.model.external_lib=tests.helpers.struck_parts",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.num_threads=1",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=1",
    "data.max_prompt_length=640",
    "data.max_response_length=384",
    "env.env_name=number_line",
    "env.history=append",
    "env.kwargs={size:4}",
    "env.max_steps=2",
    "env.max_turn_tokens=16",
    "env.rollout.n=2",
    "env.val_tasks=2",
    "trainer.num_threads=1",
    "trainer.save_freq=1",
    "trainer.total_training_steps=2",
    "trainer.val_before_train=false",
    "trainer.waiting_log_s=60",
    f"trainer.stall_timeout_s={STALL_S}",
]
# Where and how -> what the last sentence says of it.
STOPPED = {
    "engine play": r"gen stands still since \d+ s: collector-0; RolloutWorker \(process \d+, stop",
    "rank update": r"update_actor stands .*: actor\[rank 0\].update_actor; ActorWorker\[rank 0\]",
    "rank save": r"save_checkpoint stands .*: actor\[rank 0\].save_checkpoint; ActorWorker",
}


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


@pytest.fixture
def ended(policy, tmp_path, monkeypatch):
    """``ended(place, deed)``: what a job said in which that happened, once all of it is gone."""

    def run(place: str, deed: str) -> str:
        monkeypatch.setenv("STRIKE", f"{place}:{deed}")
        monkeypatch.setenv("STRUCK", str(tmp_path / "struck"))
        where = [
            f"actor_rollout_ref.model.path={policy}",
            f"trainer.default_local_dir={tmp_path}/run",
        ]
        job = start([*WORDS, *where], tmp_path / "log.txt")
        assert job.wait(DEADLINE_S) == 1
        assert job.left_over(GONE_S) == []
        assert CheckpointManager(tmp_path / "run" / "checkpoints").latest_valid() is None
        return (tmp_path / "log.txt").read_text()

    return run


@pytest.mark.parametrize("place", STOPPED)
def test_a_stopped_part_is_named_and_its_stacks_are_asked_for(ended, tmp_path, place):
    said = ended(place, "stop")
    assert "waiting for" in said
    assert re.search(f"Stalled: {STOPPED[place]}", said), said[-4000:]
    stacks = "".join(path.read_text() for path in (tmp_path / "run/logs").glob("stacks-*.txt"))
    assert "did not answer" in stacks and "== driver" in stacks
    # Others, which run, have answered.
    assert stacks.count("most recent call first") > stacks.count("did not answer")
