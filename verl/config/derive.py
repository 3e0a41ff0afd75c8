"""Derived config values: keys that are null by default and are computed from other keys."""

import contextlib
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TypeVar

from verl.config.adapter_files import (
    AdapterSettings,
    find_resumed_adapter,
    read_adapter_settings,
)
from verl.config.plugins import METHOD_PLUGINS
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.actor_rollout_ref import RolloutConfig, ValSamplingConfig
from verl.config.schema.env import EnvConfig
from verl.config.schema.model import DEFAULT_LORA_ALPHA, DEFAULT_TARGET_MODULES
from verl.config.settings import MissingKeyError, Section, value_at_path
from verl.names import ESTIMATORS, AdvantageEstimator, WeightTransfer

ConfigT = TypeVar("ConfigT", bound=Section)
ACTOR_SECTION = "actor_rollout_ref.actor"
REF_SECTION = "actor_rollout_ref.ref"
ROLLOUT_SECTION = "actor_rollout_ref.rollout"
CORRECTION_SECTION = "algorithm.rollout_correction"
# Built-in reward managers. They use the environment's rewards of turns.
TURN_REWARD_MANAGERS = ("episode", "naive", "prime", "step")
# Discounts and the built-in estimators that read them.
ESTIMATORS_WITH_DISCOUNT = {
    "algorithm.gamma": ("gae", "gigpo", "hgpo", "reinforce_plus_plus"),
    "algorithm.lam": ("gae",),
}
DEFAULT_GROUP_SIZE = 8  # trajectories per task for estimators that compare them
# Placeholder files in job scripts of verl-agent. They contain no tasks: those come from the
# environment. They only state the modality (text or images) and the batch size.
PLACEHOLDER_FILE_PATTERN = re.compile(r"(^|/)verl-agent/(text|visual)/(train|test)\.parquet$")


def count_trajectories_per_step(cfg: PPOConfig) -> int:
    """Return the number of trajectories per training step: tasks times group size."""
    return cfg.data.train_batch_size * cfg.env.rollout.n


def compute_max_rows(cfg: PPOConfig) -> int:
    """Return the largest number of rows (token sequences to train on) of a training step.

    With ``env.history=append`` a trajectory is one row, otherwise it has at most one row per turn.
    With ``env.compact`` the policy may write a summary before every turn except the first. This
    turn then begins a new row. With ``env.history=chat`` the summary may be another row.
    """
    trajectories = count_trajectories_per_step(cfg)
    if cfg.env.history == "append" and not cfg.env.compact.enable:
        return trajectories
    has_summary_rows = cfg.env.history == "chat" and cfg.env.compact.enable
    return trajectories * (cfg.env.max_steps + (cfg.env.max_steps - 1) * has_summary_rows)


def count_engines(cfg: PPOConfig, device: str) -> int:
    """Return the number of rollout workers, each with one engine, on ``device`` (cpu, cuda)."""
    trainer = cfg.trainer
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.num_workers:
        return rollout.num_workers
    if device != "cuda":
        return trainer.nnodes
    return max(1, sum(count_engine_gpus_by_node(cfg)) // rollout.tensor_model_parallel_size)


def count_engine_gpus_by_node(cfg: PPOConfig) -> list[int]:
    """Return the number of GPUs for engines on each node that has engines."""
    trainer = cfg.trainer
    rollout = cfg.actor_rollout_ref.rollout
    if not rollout.nnodes:
        return [trainer.n_gpus_per_node] * trainer.nnodes
    return [rollout.n_gpus_per_node or trainer.n_gpus_per_node] * rollout.nnodes


def engines_have_separate_gpus(cfg: PPOConfig, device: str) -> bool:
    """Return True if the engines of a run on ``device`` have GPUs without training ranks."""
    return device == "cuda" and cfg.actor_rollout_ref.rollout.nnodes > 0


def count_max_engines_per_node(cfg: PPOConfig, device: str) -> int:
    """Return the largest number of rollout workers on one node."""
    num_nodes = len(count_engine_gpus_by_node(cfg)) if device == "cuda" else cfg.trainer.nnodes
    return -(-count_engines(cfg, device) // num_nodes)


def resolve_weight_transfer(cfg: PPOConfig, device: str) -> WeightTransfer:
    """Return the transport of weights from trainer to engines of a run on ``device``."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.weight_transfer != "auto":
        return rollout.weight_transfer
    if device == "cuda" and rollout.name == "vllm":
        return choose_vllm_transfer_backend(cfg)
    return "store"


def choose_vllm_transfer_backend(cfg: PPOConfig) -> WeightTransfer:
    """Return the weight transport of vLLM: ``nccl`` if engines have separate GPUs, else ``ipc``."""
    return "nccl" if engines_have_separate_gpus(cfg, "cuda") else "ipc"


def is_policy_missing(cfg: PPOConfig) -> bool:
    """Return True if the policy is missing and supervised training (cold start) must create it."""
    path = cfg.actor_rollout_ref.model.path
    return cfg.cold_start.enable and path is not None and not Path(path).exists()


def are_placeholder_files(files: Sequence[str]) -> bool:
    """Return True if all ``files`` are placeholders, such as ``verl-agent/text/train.parquet``.

    Job scripts of verl-agent name these files although an environment provides the tasks.
    """
    return bool(files) and all(PLACEHOLDER_FILE_PATTERN.search(file) for file in files)


def map_keys_copied_to_env_section(cfg: PPOConfig) -> Mapping[str, str]:
    """Map each key that is copied into the environment's section to its name in the section.

    Example: ``data.train_files`` to ``train_files``. Empty unless tasks are rows of files.
    """
    env_settings = cfg.env.active_section
    return {} if env_settings is None else env_settings.data_keys


def uses_file_tasks(cfg: PPOConfig) -> bool:
    """Return True if the tasks are rows of files."""
    return bool(map_keys_copied_to_env_section(cfg))


def trains_on_files(cfg: PPOConfig) -> bool:
    """Return True if the job trains on prompts in files."""
    return bool(cfg.data.train_files) and not are_placeholder_files(cfg.data.train_files)


def has_file_task_grader(cfg: PPOConfig) -> bool:
    """Return True if tasks are rows of files and a user-provided function computes the rewards."""
    key = map_keys_copied_to_env_section(cfg).get("custom_reward_function.path")
    return key is not None and bool(value_at_path(cfg.env.active_section, key))


def find_post_rollout_reward_key(cfg: PPOConfig) -> str | None:
    """Return the key of the model or function that scores trajectories after rollouts, if any."""
    return "reward_model.enable" if cfg.reward_model.enable else _find_trajectory_function_key(cfg)


def _find_trajectory_function_key(cfg: PPOConfig) -> str | None:
    has_trajectory_function = cfg.custom_reward_function.path and not uses_file_tasks(cfg)
    return "custom_reward_function.path" if has_trajectory_function else None


def find_key_replacing_turn_rewards(cfg: PPOConfig) -> str | None:
    """Return the key that replaces the rewards of turns by one score per trajectory, or None."""
    if cfg.reward_model.enable and cfg.reward_model.rule_weight == 0:
        return "reward_model.rule_weight"
    # A user-provided reward manager may compute rewards of turns from the function.
    if cfg.reward_model.reward_manager not in TURN_REWARD_MANAGERS:
        return None
    return _find_trajectory_function_key(cfg)


def find_keys_ignored_with_rule_weight_0(cfg: PPOConfig) -> dict[str, str]:
    """Return the keys that ``reward_model.rule_weight=0`` makes ineffective, with the reasons."""
    if not cfg.reward_model.enable or cfg.reward_model.rule_weight != 0:
        return {}
    why = "reward_model.rule_weight is 0; reward_model.rule_weight=1 adds it to the model's score"
    keys = (
        "actor_rollout_ref.actor.use_invalid_action_penalty",
        "reward_model.reward_kwargs",
        "custom_reward_function.path",
    )
    return {key: why for key in keys if value_at_path(cfg, key)}


def find_unused_discounts(cfg: PPOConfig) -> dict[str, str]:
    """Return the discounts other than 1 that the estimator does not read, each with the reason."""
    estimator = cfg.algorithm.adv_estimator
    if estimator not in {*AdvantageEstimator}:  # user-provided
        return {}
    return {
        key: f"{estimator} does not read it; these estimators do: {', '.join(reading_estimators)}"
        for key, reading_estimators in ESTIMATORS_WITH_DISCOUNT.items()
        if estimator not in reading_estimators and value_at_path(cfg, key) != 1
    }


def find_greedy_override(sampling: ValSamplingConfig | RolloutConfig) -> str | None:
    """Return the setting (``key=value``) that makes ``sampling`` greedy; None if it is random."""
    if not sampling.do_sample:
        return "do_sample=false"
    if sampling.temperature == 0:
        return "temperature=0"
    return "top_k=1" if sampling.top_k == 1 else None


def can_drop_or_truncate_prompts(cfg: PPOConfig) -> bool:
    """Return True if the environment can drop tasks with too long prompts, or truncate prompts."""
    env_settings = cfg.env.active_section
    return env_settings is not None and env_settings.can_drop_or_truncate_prompts


def choose_default_group_size(cfg: PPOConfig) -> int:
    """Return the default number of trajectories per task: 8 if they are compared, else 1."""
    algorithm = cfg.algorithm
    if ESTIMATORS.get(algorithm.adv_estimator) or algorithm.filter_groups.enable:
        return DEFAULT_GROUP_SIZE
    return 1


def count_training_steps(cfg: PPOConfig, train_tasks: int) -> int:
    """Return the number of training steps of a whole run.

    Example: 2 epochs over 100 tasks in batches of 16 are 12 steps. With a placeholder file of
    verl-agent, an epoch has one step.
    """
    trainer = cfg.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if are_placeholder_files(cfg.data.train_files):
        return trainer.total_epochs
    return trainer.total_epochs * max(1, train_tasks // cfg.data.train_batch_size)


def count_tasks_of_env_section(env: EnvConfig, split: str) -> int | None:
    """Return the number of tasks of ``split`` if section ``env.<name>`` states it, or None."""
    env_settings = env.active_section
    return None if env_settings is None else env_settings.count_configured_tasks(split)


def count_known_train_tasks(env: EnvConfig) -> int | None:
    """Return the number of training tasks if the config states it, or None."""
    # env.train_tasks is an upper limit: the environment may have fewer tasks.
    task_counts = [env.train_tasks, count_tasks_of_env_section(env, "train")]
    return min((count for count in task_counts if count is not None), default=None)


def count_mini_batches(cfg: PPOConfig, size: int) -> int:
    """Return the number of mini-batches of ``size`` tasks in a training step."""
    return max(1, cfg.data.train_batch_size // size)


def _count_critic_mini_batches(cfg: PPOConfig) -> int | None:
    mini_batch_size = cfg.critic.ppo_mini_batch_size
    if mini_batch_size is None:
        return cfg.actor_rollout_ref.actor.ppo_mini_batches
    return count_mini_batches(cfg, mini_batch_size)


# Keys of rollout and ref -> keys of the actor, whose values are their defaults.
LOG_PROB_SOURCES = {
    "log_prob_micro_batch_size_per_gpu": "ppo_micro_batch_size_per_gpu",
    "log_prob_use_dynamic_bsz": "use_dynamic_bsz",
    "log_prob_max_token_len_per_gpu": "ppo_max_token_len_per_gpu",
}
# Pairs of a key and the source of its value if it is null: another key, or a function of the
# config. The order matters: the critic's number of mini-batches is derived before their size.
PPO_DERIVATION_RULES: tuple[tuple[str, str | Callable[[PPOConfig], object]], ...] = (
    ("env.rollout.n", choose_default_group_size),
    (
        f"{ACTOR_SECTION}.ppo_mini_batches",
        lambda cfg: count_mini_batches(cfg, cfg.actor_rollout_ref.actor.ppo_mini_batch_size),
    ),
    (f"{ACTOR_SECTION}.clip_ratio_low", f"{ACTOR_SECTION}.clip_ratio"),
    (f"{ACTOR_SECTION}.clip_ratio_high", f"{ACTOR_SECTION}.clip_ratio"),
    (f"{ACTOR_SECTION}.loss_scale_factor", lambda cfg: float(cfg.data.max_response_length)),
    (f"{ROLLOUT_SECTION}.max_model_len", "data.max_row_tokens"),
    *(
        (f"{section}.{name}", f"{ACTOR_SECTION}.{source_name}")
        for section in (ROLLOUT_SECTION, REF_SECTION)
        for name, source_name in LOG_PROB_SOURCES.items()
    ),
    (f"{REF_SECTION}.dtype", f"{ACTOR_SECTION}.dtype"),
    (f"{CORRECTION_SECTION}.rollout_rs_threshold", f"{CORRECTION_SECTION}.rollout_is_threshold"),
    (
        f"{CORRECTION_SECTION}.rollout_rs_threshold_lower",
        lambda cfg: 1 / cfg.algorithm.rollout_correction.rollout_rs_threshold,
    ),
    ("critic.enable", lambda cfg: cfg.algorithm.adv_estimator == "gae"),
    ("critic.dtype", f"{ACTOR_SECTION}.dtype"),
    ("critic.ppo_mini_batches", _count_critic_mini_batches),
    ("critic.ppo_mini_batch_size", f"{ACTOR_SECTION}.ppo_mini_batch_size"),
    ("critic.ppo_micro_batch_size_per_gpu", f"{ACTOR_SECTION}.ppo_micro_batch_size_per_gpu"),
    ("critic.use_dynamic_bsz", f"{ACTOR_SECTION}.use_dynamic_bsz"),
    ("critic.ppo_max_token_len_per_gpu", f"{ACTOR_SECTION}.ppo_max_token_len_per_gpu"),
    ("critic.ppo_epochs", f"{ACTOR_SECTION}.ppo_epochs"),
    ("critic.loss_scale_factor", lambda cfg: float(cfg.data.max_response_length)),
    ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    ("critic.model.path", "actor_rollout_ref.model.path"),
    ("reward_model.dtype", f"{ACTOR_SECTION}.dtype"),
    ("reward_model.rule_weight", lambda cfg: 0.0 if cfg.reward_model.enable else 1.0),
    ("env.max_turn_tokens", "data.max_response_length"),
)
SFT_DERIVATION_RULES: tuple[tuple[str, Callable[[SFTConfig], object]], ...] = (
    ("data.history", lambda cfg: "chat" if cfg.env.history == "chat" else "append"),
    (
        "data.env_loss_weight",
        lambda cfg: 0.0 if cfg.data.history == "chat" or cfg.data.train_files else 0.5,
    ),
)


def derive_values(cfg: ConfigT) -> ConfigT:
    """Compute each derived value of ``cfg`` that is ``None``; return ``cfg`` itself.

    A value that depends on a refused key is not computed.
    """
    if isinstance(cfg, PPOConfig):
        for path, rule in PPO_DERIVATION_RULES:
            _derive_missing_value(cfg, path, rule)
        # A function that reads a refused key raises MissingKeyError. The values that it sets stay
        # null.
        for fill_values in (_choose_importance_weights, _copy_gdpo_rewards, _fill_lora_settings):
            with contextlib.suppress(MissingKeyError):
                fill_values(cfg)
    if isinstance(cfg, SFTConfig):
        for path, rule in SFT_DERIVATION_RULES:
            _derive_missing_value(cfg, path, rule)
    if isinstance(cfg, PPOConfig | SFTConfig):
        for plugin in METHOD_PLUGINS:
            with contextlib.suppress(MissingKeyError):
                plugin.derive(cfg)
    return cfg


def _derive_missing_value(cfg: ConfigT, path: str, rule: str | Callable[[ConfigT], object]) -> None:
    section_path, _, name = path.rpartition(".")
    # MissingKeyError means that the section or this key was refused, which another check reports.
    try:
        section = value_at_path(cfg, section_path)
        if getattr(section, name) is not None:
            return
    except MissingKeyError:
        return
    try:
        setattr(section, name, value_at_path(cfg, rule) if isinstance(rule, str) else rule(cfg))
    except MissingKeyError:
        # Delete the key: checks skip a missing key, but would report a null as a second mistake.
        section.__dict__.pop(name, None)


def _choose_importance_weights(cfg: PPOConfig) -> None:
    """Replace ``rollout_is=auto`` by ``token`` (an importance weight per token) or null (none).

    It becomes ``token`` if the log-probs of engine and trainer can be compared, and differ because
    the engine is less precise or has older weights. The default is not null, because a user sets
    null to disable the weights.
    """
    correction = cfg.algorithm.rollout_correction
    if correction.rollout_is != "auto":
        return
    # Text without token ids, which allow_retokenized permits, has no rollout log-probs.
    has_comparable_log_probs = not correction.bypass_mode and not cfg.env.allow_retokenized
    is_engine_less_precise = cfg.actor_rollout_ref.rollout.dtype != "float32"
    is_off_policy = cfg.trainer.rollout_overlap != "off"
    correction.rollout_is = (
        "token" if has_comparable_log_probs and (is_engine_less_precise or is_off_policy) else None
    )


def _fill_lora_settings(cfg: PPOConfig) -> None:
    """Set rank, alpha and target modules that are unset to those of the adapter to start from.

    A run that continues from a checkpoint does not read this adapter: the checkpoint has the
    values.
    """
    model = cfg.actor_rollout_ref.model
    adapter, resumed = AdapterSettings(0, DEFAULT_LORA_ALPHA, ()), None
    if model.lora_adapter_path:
        with contextlib.suppress(MissingKeyError):
            resumed = find_resumed_adapter(cfg.trainer)
        with contextlib.suppress(ValueError):  # find_lora_problems reports an invalid adapter
            adapter = resumed[1] if resumed else read_adapter_settings(model.lora_adapter_path)
    model.lora_rank = model.lora_rank or adapter.rank
    if model.lora_alpha is None:
        model.lora_alpha = adapter.alpha
    if model.target_modules is None:
        model.target_modules = adapter.target_modules or DEFAULT_TARGET_MODULES


def _copy_gdpo_rewards(cfg: PPOConfig) -> None:
    algorithm = cfg.algorithm
    weights = cfg.reward_model.weights
    if not algorithm.gdpo_reward_keys and not algorithm.gdpo_reward_weights:
        algorithm.gdpo_reward_keys = list(weights)
        algorithm.gdpo_reward_weights = list(weights.values())
