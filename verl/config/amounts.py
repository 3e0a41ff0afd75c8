"""What amounts of a config come to in tasks, trajectories, rows, tokens and optimizer steps, and
where they mean something else than in published jobs of this family.
"""

from collections.abc import Callable, Iterator

from verl.config.checks.sampling import greedy_validation_notes
from verl.config.derive import (
    GROUP_SIZE,
    default_group_size,
    have_own_gpus,
    is_placeholder,
    iterations,
    known_tasks,
    plays_files,
    trajectories_per_iteration,
)
from verl.config.load import guess_device
from verl.config.schema import PPOConfig
from verl.names import ESTIMATORS

ACTOR = "actor_rollout_ref.actor"
STEPS = "trainer.total_training_steps"


def rows_at_most(cfg: PPOConfig) -> int:
    """Rows of an iteration: one per play, or one per step where prompts are rendered anew."""
    played = trajectories_per_iteration(cfg)
    return played if cfg.env.history == "append" else played * cfg.env.max_steps


def notes(cfg: PPOConfig, tasks: int | None = None) -> Iterator[str]:
    """Where a number of the plan is not what published jobs would make of it, and how to get
    that; ``tasks`` are those to train on, where they are known.
    """
    yield from _rows_per_step(cfg)
    yield from _length_of_an_epoch(cfg, tasks)
    yield from _idle_gpus(cfg)
    yield from greedy_validation_notes(cfg)
    yield from _ranks_without_gpus(cfg)


def _ranks_without_gpus(cfg: PPOConfig) -> Iterator[str]:
    trainer = cfg.trainer
    ranks = trainer.n_gpus_per_node
    if trainer.device == "auto" and ranks > 1 and guess_device("auto") == "cpu":
        yield (
            f"no GPU is here, so trainer.device=auto is the CPU with {ranks} ranks; "
            f"for the machine that it is meant for: --check --on {ranks}xH100"
        )


def _idle_gpus(cfg: PPOConfig) -> Iterator[str]:
    trainer = cfg.trainer
    own = trainer.device != "cpu" and have_own_gpus(cfg, "cuda")
    if own and trainer.rollout_overlap == "off":
        yield (
            "GPUs of the engines wait for updates, those of the ranks for plays: "
            "trainer.rollout_overlap=one_step"
        )


def _by_size(cfg: PPOConfig) -> bool:
    """Whether the number of mini-batches follows from their size."""
    actor = cfg.actor_rollout_ref.actor
    return actor.ppo_mini_batches == max(1, cfg.data.train_batch_size // actor.ppo_mini_batch_size)


def _rows_per_step(cfg: PPOConfig) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    rows = rows_at_most(cfg)
    size = actor.ppo_mini_batch_size
    steps = -(-rows // size)
    if not _by_size(cfg) or steps <= actor.ppo_mini_batches:
        return
    played = trajectories_per_iteration(cfg)
    number = max(count for count in range(1, played + 1) if played % count == 0 and count <= steps)
    yield (
        f"ppo_mini_batch_size={size} counts tasks; agent jobs that count rows would make up to "
        f"{steps:,} optimizer steps of {rows:,} rows: {ACTOR}.ppo_mini_batches={number}"
    )


def _length_of_an_epoch(cfg: PPOConfig, tasks: int | None = None) -> Iterator[str]:
    trainer = cfg.trainer
    # Of rows in files an epoch is what it is in published jobs.
    if trainer.total_training_steps is not None or plays_files(cfg):
        return
    if is_placeholder(cfg.data.train_files):
        yield "an epoch is one iteration, as where data.train_files is a placeholder of one batch"
        return
    tasks = known_tasks(cfg.env) if tasks is None else tasks
    each = iterations(cfg, tasks) // trainer.total_epochs if tasks else None
    if each == 1:
        return
    length = f"{each:,} iterations over {tasks:,} tasks" if each else "all tasks"
    yield (
        f"an epoch is {length}; agent jobs whose data file is a placeholder count one iteration: "
        f"{STEPS}={trainer.total_epochs}"
    )


# ---- key by key ------------------------------------------------------------------------------


def _batch(cfg: PPOConfig) -> Iterator[str]:
    tasks = cfg.data.train_batch_size
    group = cfg.env.rollout.n
    played = trajectories_per_iteration(cfg)
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    yield f"{tasks} tasks x {group} plays = {played:,} trajectories per iteration"
    yield f"{rows_at_most(cfg):,} rows at most, {row:,} tokens each at most"


def _group(cfg: PPOConfig) -> Iterator[str]:
    yield from _batch(cfg)
    name = cfg.algorithm.adv_estimator
    if name in ESTIMATORS:
        yield f"unset it is {default_group_size(cfg)} for {name}; published jobs: 1"
    else:
        yield f"unset it is {GROUP_SIZE} if {name} compares the plays of a task, else 1"


def _mini_batch(cfg: PPOConfig) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    played = trajectories_per_iteration(cfg) // actor.ppo_mini_batches
    rows = -(-rows_at_most(cfg) // actor.ppo_mini_batches)
    tasks = played / cfg.env.rollout.n
    yield f"an optimizer step sees {tasks:g} tasks = {played:,} trajectories, {rows:,} rows at most"
    updates = actor.ppo_mini_batches * actor.ppo_epochs
    yield (
        f"ppo_mini_batches {actor.ppo_mini_batches} x ppo_epochs {actor.ppo_epochs} = "
        f"{updates} optimizer steps per iteration"
    )
    if not _by_size(cfg):
        yield "ppo_mini_batches says how many there are; ppo_mini_batch_size is not read"
    yield from _rows_per_step(cfg)


def _micro_batch(cfg: PPOConfig) -> Iterator[str]:
    actor = cfg.actor_rollout_ref.actor
    row = cfg.data.max_prompt_length + cfg.data.max_response_length
    if actor.use_dynamic_bsz:
        tokens = actor.ppo_max_token_len_per_gpu
        yield f"micro-batches are formed by tokens: {tokens:,} per device and pass"
        yield f"a row has {row:,} tokens at most: {tokens // row} of the longest fit"
    else:
        size = actor.ppo_micro_batch_size_per_gpu or 1
        yield f"{size} rows = {size * row:,} tokens at most per device and pass"
    yield "it changes memory and time, and no gradient"


def _schedule(cfg: PPOConfig) -> Iterator[str]:
    tasks = known_tasks(cfg.env)
    trainer = cfg.trainer
    actor = cfg.actor_rollout_ref.actor
    known = (
        trainer.total_training_steps is not None or tasks or is_placeholder(cfg.data.train_files)
    )
    if known:
        rounds = iterations(cfg, tasks or 0)
        updates = rounds * actor.ppo_mini_batches * actor.ppo_epochs
        played = rounds * trajectories_per_iteration(cfg)
        yield f"{rounds:,} iterations, {played:,} trajectories, {updates:,} optimizer steps in all"
    if trainer.total_training_steps is not None:
        yield f"{STEPS}={trainer.total_training_steps} decides; total_epochs is not read"
    yield from _length_of_an_epoch(cfg)


def _row(cfg: PPOConfig) -> Iterator[str]:
    data = cfg.data
    env = cfg.env
    prompt = data.max_prompt_length
    response = data.max_response_length
    yield f"a row has {prompt:,} + {response:,} = {prompt + response:,} tokens at most"
    if env.history == "append":
        yield f"a row is a play: the response holds up to {env.max_steps} turns"
    else:
        yield "a row is a step: the response is one turn, the prompt shows the steps before"
    yield f"a turn has {env.max_turn_tokens} tokens at most; a play {env.max_steps} steps"


def _panel(cfg: PPOConfig) -> Iterator[str]:
    plays = cfg.actor_rollout_ref.rollout.val_kwargs.n
    size = "all" if cfg.env.val_tasks is None else f"at most {cfg.env.val_tasks}"
    yield f"{size} tasks x {plays} plays, all at once, per validation"


def _every(cfg: PPOConfig) -> Iterator[str]:
    played = trajectories_per_iteration(cfg)
    yield f"counted in iterations, of {played:,} trajectories each; -1: never"


MEANINGS: dict[str, Callable[[PPOConfig], Iterator[str]]] = {
    "data.train_batch_size": _batch,
    "env.rollout.n": _group,
    "actor_rollout_ref.rollout.n": _group,
    f"{ACTOR}.ppo_mini_batch_size": _mini_batch,
    f"{ACTOR}.ppo_mini_batches": _mini_batch,
    f"{ACTOR}.ppo_epochs": _mini_batch,
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": _micro_batch,
    f"{ACTOR}.ppo_max_token_len_per_gpu": _micro_batch,
    f"{ACTOR}.use_dynamic_bsz": _micro_batch,
    "trainer.total_epochs": _schedule,
    STEPS: _schedule,
    "data.train_files": _schedule,
    "data.max_prompt_length": _row,
    "data.max_response_length": _row,
    "env.max_turn_tokens": _row,
    "env.max_steps": _row,
    "env.history": _row,
    "env.val_tasks": _panel,
    "data.val_batch_size": _panel,
    "trainer.test_freq": _every,
    "trainer.save_freq": _every,
}
