"""Small training job into which faults are injected.

It has a training rank, a Hugging Face engine, a collector and an environment worker.
"""

from pathlib import Path

from tests.helpers.jobs import ROOT
from tests.helpers.tiny_model import make_tiny_policy

FOLDER = ROOT / "build" / "chaos"
RESULTS_DIR = ROOT / "docs" / "chaos"  # results in git, so that another machine can continue
NUM_STEPS = 2  # training steps
TRAJECTORIES_PER_STEP = 2  # trajectories per step: data.train_batch_size=1 times env.rollout.n=2
# Seconds without progress after which the watchdog ends the run. Without a fault nothing takes so
# long. After the fault the watchdog's clock runs faster (inject.py), so this takes a few seconds.
STALL_TIMEOUT_S = 600
OVERRIDES = (
    "actor_rollout_ref.actor.dtype=float32",
    "actor_rollout_ref.actor.ppo_mini_batches=1",
    "actor_rollout_ref.rollout.name=hf",
    "actor_rollout_ref.rollout.dtype=float32",
    "actor_rollout_ref.rollout.num_threads=1",
    # With greedy decoding a random policy would end no turn, and only ended turns have an action.
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
FAULT_OVERRIDES = (
    "actor_rollout_ref.model.external_lib=scripts.dev.chaos.inject",
    "env.env_name=scripts.dev.chaos.process_env:LINE",
    "env.num_workers=1",
    "env.reset_timeout_s=5",
    "env.step_timeout_s=5",
    f"trainer.stall_timeout_s={STALL_TIMEOUT_S}",
    f"trainer.test_freq={NUM_STEPS}",
    f"trainer.total_training_steps={NUM_STEPS}",
    "trainer.waiting_log_s=60",
)


def make_policy() -> Path:
    """Return the directory of the job's policy, which is tiny. Make it if it does not exist."""
    directory = FOLDER / "policy"
    return directory if (directory / "config.json").exists() else make_tiny_policy(directory)
