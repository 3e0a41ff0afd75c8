"""Notes of the plan: keys that have another meaning in the job scripts of verl-agent."""

from collections.abc import Iterator

from verl.config import derive
from verl.config.load import guess_device
from verl.config.schema import PPOConfig
from verl.config.schema.actor_rollout_ref import ValSamplingConfig

VAL_SAMPLING_KEY = "actor_rollout_ref.rollout.val_kwargs"
KEYS_IGNORED_BY_GREEDY = ("temperature", "top_p", "top_k")  # keys that greedy validation ignores
RANDOM_SAMPLING_FIX = f"{VAL_SAMPLING_KEY}.do_sample=true {VAL_SAMPLING_KEY}.temperature=1.0"


def iterate_plan_notes(cfg: PPOConfig, tasks: int | None = None) -> Iterator[str]:
    """Yield notes for the printed plan of a run with ``tasks`` training tasks (None if unknown).

    Most notes state a number of steps that differs from a verl-agent script with the same keys.
    They name the override that changes it.
    """
    yield from _iterate_row_notes(cfg)
    yield from _iterate_epoch_notes(cfg, tasks)
    trainer = cfg.trainer
    has_separate_gpus = trainer.device != "cpu" and derive.engines_have_separate_gpus(cfg, "cuda")
    if has_separate_gpus and trainer.rollout_overlap == "off":
        yield (
            "GPUs of the engines are idle in updates, those of the training ranks in rollouts; "
            "to overlap them: trainer.rollout_overlap=one_step"
        )
    yield from _iterate_greedy_validation_notes(cfg)
    num_ranks = trainer.n_gpus_per_node
    if trainer.device == "auto" and num_ranks > 1 and guess_device("auto") == "cpu":
        yield (
            f"there is no GPU here, so trainer.device=auto is the CPU with {num_ranks} ranks; "
            f"to check it for another machine: --check --on {num_ranks}xH100"
        )


def _iterate_row_notes(cfg: PPOConfig) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    max_rows = derive.compute_max_rows(cfg)
    mini_batch_size = actor.ppo_mini_batch_size
    row_steps = -(-max_rows // mini_batch_size)
    derived_count = derive.count_mini_batches(cfg, mini_batch_size)
    if actor.ppo_mini_batches != derived_count or row_steps <= derived_count:
        return
    num_trajectories = derive.count_trajectories_per_step(cfg)
    divisors = [count for count in range(1, num_trajectories + 1) if num_trajectories % count == 0]
    num_mini_batches = max(count for count in divisors if count <= row_steps)
    yield (
        f"ppo_mini_batch_size={mini_batch_size} counts tasks; agent jobs that count rows would "
        f"make up to {row_steps:,} optimizer steps of {max_rows:,} rows: "
        f"{derive.ACTOR_SECTION}.ppo_mini_batches={num_mini_batches}"
    )


def _iterate_epoch_notes(cfg: PPOConfig, tasks: int | None) -> Iterator[str]:
    trainer = cfg.trainer
    # If the tasks are rows of files, an epoch means the same as in verl-agent.
    if trainer.total_training_steps is not None or derive.uses_file_tasks(cfg):
        return
    if derive.are_placeholder_files(cfg.data.train_files):
        yield "an epoch is one training step: data.train_files is a placeholder of one batch"
        return
    epoch_length = "all tasks"
    if tasks:
        steps_per_epoch = derive.count_training_steps(cfg, tasks) // trainer.total_epochs
        if steps_per_epoch == 1:
            return
        epoch_length = f"{steps_per_epoch:,} training steps over {tasks:,} tasks"
    yield (
        f"an epoch is {epoch_length}; in agent jobs whose data file is a placeholder it is one "
        f"training step: trainer.total_training_steps={trainer.total_epochs}"
    )


def _iterate_greedy_validation_notes(cfg: PPOConfig) -> Iterator[str]:
    val_sampling = cfg.actor_rollout_ref.rollout.val_kwargs
    greedy_key = derive.find_greedy_override(val_sampling)
    if greedy_key is None:
        return
    val_sampling_fields = ValSamplingConfig.model_fields
    for setting_name in KEYS_IGNORED_BY_GREEDY:
        value = getattr(val_sampling, setting_name)
        if value != val_sampling_fields[setting_name].default and not greedy_key.startswith(
            setting_name
        ):
            why = f"has no effect, because validation is greedy ({greedy_key})"
            yield f"{VAL_SAMPLING_KEY}.{setting_name}={value} {why}: {RANDOM_SAMPLING_FIX}"
