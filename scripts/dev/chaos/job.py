"""The small job that is struck: a real one, of a training rank, an engine without vLLM, a collector
and an environment worker.
"""

from pathlib import Path

from tests.helpers.jobs import ROOT
from tests.helpers.tiny_model import make_tiny_policy

FOLDER = ROOT / "build" / "chaos"
KEPT = ROOT / "docs" / "chaos"  # results, small enough for git: a second machine goes on
TOTAL = 2  # training steps
PLAYS = 2  # of each: of one task, data.train_batch_size, two, env.rollout.n
# Without movement, by the clock of ``strike``: no honest part takes as long, and once a part was
# struck it is over in seconds.
STALL_S = 600
WORDS = (
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batches=1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.num_threads=1",
    # A policy made from nothing ends no turn greedily and few otherwise, and without an end an
    # environment makes no step.
    "actor_rollout_ref.rollout.val_kwargs.do_sample=true",
    "actor_rollout_ref.rollout.val_kwargs.n=4",
    "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    "algorithm.adv_estimator=grpo",
    "data.train_batch_size=1",
    "data.max_prompt_length=640",
    "data.max_response_length=384",
    "env.history=append",
    "env.kwargs={size:4}",
    "env.max_steps=2",
    "env.max_turn_tokens=16",
    "env.rollout.n=2",
    "env.val_tasks=4",
    "trainer.num_threads=1",
    "trainer.save_freq=1",
    "trainer.val_before_train=false",
)
STRUCK_WORDS = (
    "actor_rollout_ref.model.external_lib=scripts.dev.chaos.strike",
    "env.env_name=scripts.dev.chaos.world:LINE",
    "env.num_workers=1",
    "env.reset_timeout_s=5",
    "env.step_timeout_s=5",
    f"trainer.stall_timeout_s={STALL_S}",
    f"trainer.test_freq={TOTAL}",
    f"trainer.total_training_steps={TOTAL}",
    "trainer.waiting_log_s=60",
)


def policy() -> Path:
    """A tiny policy, made where there is none yet."""
    place = FOLDER / "policy"
    return place if (place / "config.json").exists() else make_tiny_policy(place)
