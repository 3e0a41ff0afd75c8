"""Notes of the plan: keys that have another meaning in the job scripts of verl-agent."""

from collections.abc import Iterator

from verl.config.checks.batch_sizes import greedy_validation_notes
from verl.config.derive import (
    count_training_steps,
    engines_have_separate_gpus,
    is_placeholder,
    known_tasks,
    trajectories_per_step,
    uses_file_tasks,
)
from verl.config.load import guess_device
from verl.config.schema import PPOConfig

ACTOR = "actor_rollout_ref.actor"
STEPS = "trainer.total_training_steps"


def rows_at_most(cfg: PPOConfig) -> int:
    """Return the largest number of rows of a training step.

    A trajectory is one row with ``env.history=append``, one row per turn with ``window``, and
    between these with ``chat``.
    """
    trajectories = trajectories_per_step(cfg)
    return trajectories if cfg.env.history == "append" else trajectories * cfg.env.max_steps


def iterate_plan_notes(cfg: PPOConfig, tasks: int | None = None) -> Iterator[str]:
    """Yield notes about the plan, each with the override that changes it.

    Most are about numbers of steps that differ from a verl-agent script with the same keys.
    ``tasks`` is the number of training tasks; None if it is not known.
    """
    yield from _rows_per_step(cfg)
    yield from _length_of_an_epoch(cfg, tasks)
    trainer = cfg.trainer
    is_separate = trainer.device != "cpu" and engines_have_separate_gpus(cfg, "cuda")
    if is_separate and trainer.rollout_overlap == "off":
        yield (
            "GPUs of the engines are idle in updates, those of the training ranks in rollouts; "
            "to overlap them: trainer.rollout_overlap=one_step"
        )
    yield from greedy_validation_notes(cfg)
    ranks = trainer.n_gpus_per_node
    if trainer.device == "auto" and ranks > 1 and guess_device("auto") == "cpu":
        yield (
            f"there is no GPU here, so trainer.device=auto is the CPU with {ranks} ranks; "
            f"to check it for another machine: --check --on {ranks}xH100"
        )


def _rows_per_step(cfg: PPOConfig) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    rows = rows_at_most(cfg)
    size = actor.ppo_mini_batch_size
    steps = -(-rows // size)
    is_derived = actor.ppo_mini_batches == max(1, cfg.data.train_batch_size // size)
    if not is_derived or steps <= actor.ppo_mini_batches:
        return
    total = trajectories_per_step(cfg)
    divisors = [count for count in range(1, total + 1) if total % count == 0]
    num_mini_batches = max(count for count in divisors if count <= steps)
    yield (
        f"ppo_mini_batch_size={size} counts tasks; agent jobs that count rows would make up to "
        f"{steps:,} optimizer steps of {rows:,} rows: {ACTOR}.ppo_mini_batches={num_mini_batches}"
    )


def _length_of_an_epoch(cfg: PPOConfig, tasks: int | None = None) -> Iterator[str]:
    trainer = cfg.trainer
    # If the tasks are rows of files, an epoch means the same as in verl-agent.
    if trainer.total_training_steps is not None or uses_file_tasks(cfg):
        return
    if is_placeholder(cfg.data.train_files):
        yield "an epoch is one training step: data.train_files is a placeholder of one batch"
        return
    tasks = known_tasks(cfg.env) if tasks is None else tasks
    steps_per_epoch = count_training_steps(cfg, tasks) // trainer.total_epochs if tasks else None
    if steps_per_epoch == 1:
        return
    length = "all tasks"
    if steps_per_epoch:
        length = f"{steps_per_epoch:,} training steps over {tasks:,} tasks"
    yield (
        f"an epoch is {length}; in agent jobs whose data file is a placeholder it is one training "
        f"step: {STEPS}={trainer.total_epochs}"
    )
