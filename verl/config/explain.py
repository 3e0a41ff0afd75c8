"""Explanation of a config key (``--explain``): its value, help text and lines of the plan."""

from collections.abc import Iterator

from verl.config.derive import ACTOR_SECTION, compute_max_rows, count_trajectories_per_step
from verl.config.plan import make_plan
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError, Key, MissingKeyError, value_at_path
from verl.config.settings.hints import find_nearest_key, find_replacement_of_foreign_key
from verl.config.settings.keys import format_default

# Config keys -> labels of lines of the plan and of ``_iterate_update_lines``.
PLAN_LABELS_BY_KEYS = {
    ("data.train_batch_size", "env.rollout.n", "actor_rollout_ref.rollout.n"): ("one step", "rows"),
    (
        f"{ACTOR_SECTION}.ppo_mini_batch_size",
        f"{ACTOR_SECTION}.ppo_mini_batches",
        f"{ACTOR_SECTION}.ppo_epochs",
    ): ("mini-batch", "updates", "note"),
    (
        f"{ACTOR_SECTION}.ppo_micro_batch_size_per_gpu",
        f"{ACTOR_SECTION}.ppo_max_token_len_per_gpu",
        f"{ACTOR_SECTION}.use_dynamic_bsz",
    ): ("micro-batch",),
    (
        "trainer.total_epochs",
        "trainer.total_training_steps",
        "data.train_files",
    ): ("tasks", "in all", "note"),
    (
        "data.max_prompt_length",
        "data.max_response_length",
        "env.max_turn_tokens",
        "env.max_steps",
        "env.history",
    ): ("history", "one step", "rows", "sampled tokens"),
    ("env.val_tasks", "data.val_batch_size", "trainer.test_freq"): ("tasks",),
    ("trainer.save_freq",): ("checkpoints",),
}


def explain_key(cfg: PPOConfig | SFTConfig, path: str) -> str:
    """Return value, help text and allowed values of the key at dotted ``path``.

    The text also has the lines of the plan that depend on the key. Raises ``ConfigError`` for an
    unknown key and for a section.
    """
    keys = collect_all_keys(type(cfg))
    key = keys.get(path)
    if key is None:
        similar_key = find_replacement_of_foreign_key(path) or find_nearest_key(path, keys)
        fix = f"--explain {similar_key}" if similar_key else "--help lists the sections"
        message = f"--explain {path}: unknown key; allowed: any key; fix: {fix}"
        raise ConfigError(message, "unknown_key")
    if key.is_section:
        message = f"--explain {path}: a section; allowed: a key; fix: --help {path}"
        raise ConfigError(message, "unknown_key")
    try:
        value = value_at_path(cfg, path)
    except MissingKeyError:
        return f"{path}: no value, because this configuration lacks its section\n  {key.help_text}"
    lines = [f"{path}={value!r}", f"  {key.help_text}", f"  {_describe_allowed(key)}"]
    labels = next((labels for keys, labels in PLAN_LABELS_BY_KEYS.items() if path in keys), ())
    if labels and isinstance(cfg, PPOConfig):
        plan_lines = [*make_plan(cfg).iterate_labelled_lines(), *_iterate_update_lines(cfg)]
        lines += [f"  {label}: {text}" for label, text in plan_lines if label in labels]
    return "\n".join(lines)


def _describe_allowed(key: Key) -> str:
    unused_annotation = key.unused_annotation
    if unused_annotation is not None:
        refusal = f"refused: {unused_annotation.why}; instead: {unused_annotation.instead}"
        return refusal if unused_annotation.instead else f"no effect: {unused_annotation.why}"
    gpu_note = "; no effect on CPU" if key.is_gpu_only else ""
    return f"allowed: {key.describe_allowed()}; default: {format_default(key)}{gpu_note}"


def _iterate_update_lines(cfg: PPOConfig) -> Iterator[tuple[str, str]]:
    actor = cfg.actor_rollout_ref.actor
    trajectories_per_mini_batch = count_trajectories_per_step(cfg) // actor.ppo_mini_batches
    rows_per_mini_batch = -(-compute_max_rows(cfg) // actor.ppo_mini_batches)
    tasks_per_mini_batch = trajectories_per_mini_batch / cfg.env.rollout.n
    yield (
        "mini-batch",
        f"{tasks_per_mini_batch:g} tasks = {trajectories_per_mini_batch:,} trajectories, "
        f"{rows_per_mini_batch:,} rows at most",
    )
    row_length = cfg.data.max_row_tokens
    if actor.use_dynamic_bsz:
        tokens = actor.ppo_max_token_len_per_gpu
        micro_batch_text = f"{tokens:,} tokens, or {tokens // row_length} of the longest rows"
    else:
        num_rows = actor.ppo_micro_batch_size_per_gpu or 1
        micro_batch_text = f"{num_rows} rows = {num_rows * row_length:,} tokens at most"
    micro_batch_text += ", per device and pass; it changes memory and time, not gradients"
    yield "micro-batch", micro_batch_text
