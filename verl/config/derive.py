"""Values that follow from others: written once, here, so that every worker reads final numbers and
no ``None``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

from verl.config.plugged import EXTENSIONS
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.env import EnvConfig
from verl.config.settings import MissingKey, Section, lookup
from verl.names import ESTIMATORS, WeightTransfer

Config = TypeVar("Config", bound=Section)
ACTOR = "actor_rollout_ref.actor"
REF = "actor_rollout_ref.ref"
ROLLOUT = "actor_rollout_ref.rollout"
CORRECTION = "algorithm.rollout_correction"
GROUP_SIZE = 8
# Job scripts for environments carry a file that says nothing but text or images and how many tasks
# make a batch, which is all it holds: what is played comes from the environment there, too.
PLACEHOLDER = re.compile(r"(^|/)verl-agent/(text|visual)/(train|test)\.parquet$")


def trajectories_per_iteration(cfg: PPOConfig) -> int:
    """Plays per iteration: tasks times group size."""
    return cfg.data.train_batch_size * cfg.env.rollout.n


def engine_count(cfg: PPOConfig, device: str) -> int:
    """Rollout workers of a run on ``device`` (``cpu``, ``cuda``)."""
    trainer = cfg.trainer
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.num_workers:
        return rollout.num_workers
    if device != "cuda":
        return trainer.nnodes
    return max(1, sum(engine_gpus(cfg)) // rollout.tensor_model_parallel_size)


def engine_gpus(cfg: PPOConfig) -> list[int]:
    """GPUs that engines are on, node by node: those of the training ranks, or their own."""
    trainer = cfg.trainer
    rollout = cfg.actor_rollout_ref.rollout
    if not rollout.nnodes:
        return [trainer.n_gpus_per_node] * trainer.nnodes
    return [rollout.n_gpus_per_node or trainer.n_gpus_per_node] * rollout.nnodes


def have_own_gpus(cfg: PPOConfig, device: str) -> bool:
    """Whether the engines of a run on ``device`` have GPUs on which nothing is trained."""
    return device == "cuda" and cfg.actor_rollout_ref.rollout.nnodes > 0


def engines_on_a_node(cfg: PPOConfig, device: str) -> int:
    """The most rollout workers that one node has."""
    nodes = len(engine_gpus(cfg)) if device == "cuda" else cfg.trainer.nnodes
    return -(-engine_count(cfg, device) // nodes)


def weight_transfer(cfg: PPOConfig, device: str) -> WeightTransfer:
    """How weights get to the engines of a run on ``device``: ``store``, ``ipc`` or ``nccl``."""
    rollout = cfg.actor_rollout_ref.rollout
    if rollout.weight_transfer != "auto":
        return rollout.weight_transfer
    return way_of_vllm(cfg) if device == "cuda" and rollout.name == "vllm" else "store"


def way_of_vllm(cfg: PPOConfig) -> WeightTransfer:
    """Its own way of weights to the GPUs of its engines: ``ipc``, or ``nccl`` to their own."""
    return "nccl" if have_own_gpus(cfg, "cuda") else "ipc"


def is_placeholder(files: Sequence[str]) -> bool:
    """Whether ``files`` are there only because a job script has to name some."""
    return bool(files) and all(PLACEHOLDER.search(file) for file in files)


def data_keys(cfg: PPOConfig) -> Mapping[str, str]:
    """Which keys of ``cfg`` the environment is handed because it plays rows of files: path of the
    key, and its name in the environment's section; none for other environments.
    """
    settings = cfg.env.settings
    return {} if settings is None else settings.data_keys


def plays_files(cfg: PPOConfig) -> bool:
    """Whether the tasks are rows of files."""
    return bool(data_keys(cfg))


def scored_later(cfg: PPOConfig) -> str | None:
    """The key of what scores plays once a whole batch is played; None where environments alone do,
    or are handed the function that does.
    """
    if cfg.reward_model.enable:
        return "reward_model.enable"
    if cfg.custom_reward_function.path and not plays_files(cfg):
        return "custom_reward_function.path"
    return None


def rules_of_no_weight(cfg: PPOConfig) -> dict[str, str]:
    """Keys that change what the rules pay where a reward model alone is heard, each with the
    reason.
    """
    if not cfg.reward_model.enable or cfg.reward_model.rule_weight != 0:
        return {}
    why = "reward_model.rule_weight is 0; reward_model.rule_weight=1 adds it to the model's score"
    keys = (
        "actor_rollout_ref.actor.use_invalid_action_penalty",
        "reward_model.reward_kwargs",
        "custom_reward_function.path",
    )
    return {key: why for key in keys if lookup(cfg, key)}


def fits_prompts(cfg: PPOConfig) -> bool:
    """Whether the tasks are rows of files that can be left out or cut where they are too long."""
    settings = cfg.env.settings
    return settings is not None and settings.fits_prompts


def default_group_size(cfg: PPOConfig) -> int:
    """Plays of a task where nothing is said: one, unless plays of a task are compared."""
    algorithm = cfg.algorithm
    compared = ESTIMATORS.get(algorithm.adv_estimator) or algorithm.filter_groups.enable
    return GROUP_SIZE if compared else 1


def iterations(cfg: PPOConfig, train_tasks: int) -> int:
    """Training steps of a whole run: ``trainer.total_training_steps``, else epochs times batches
    per epoch; a placeholder for data holds one batch.
    """
    trainer = cfg.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    if is_placeholder(cfg.data.train_files):
        return trainer.total_epochs
    return trainer.total_epochs * max(1, train_tasks // cfg.data.train_batch_size)


def declared_tasks(env: EnvConfig, split: str) -> int | None:
    """Tasks of ``split`` as far as the settings of the environment tell."""
    settings = env.settings
    return None if settings is None else settings.known_tasks(split)


def known_tasks(env: EnvConfig) -> int | None:
    """Training tasks as far as the config tells; None where only the environment knows."""
    # env.train_tasks is a limit, not a promise: a smaller environment has the last word.
    counts = [env.train_tasks, declared_tasks(env, "train")]
    return min((count for count in counts if count is not None), default=None)


def _mini_batches(cfg: PPOConfig) -> int:
    return max(1, cfg.data.train_batch_size // cfg.actor_rollout_ref.actor.ppo_mini_batch_size)


def _critic_mini_batches(cfg: PPOConfig) -> int | None:
    size = cfg.critic.ppo_mini_batch_size
    if size is None:
        return cfg.actor_rollout_ref.actor.ppo_mini_batches
    return max(1, cfg.data.train_batch_size // size)


def _row_tokens(cfg: PPOConfig) -> int:
    return cfg.data.max_prompt_length + cfg.data.max_response_length


def _response_tokens(cfg: PPOConfig) -> float:
    return float(cfg.data.max_response_length)


def _least_ratio(cfg: PPOConfig) -> float:
    return 1 / cfg.algorithm.rollout_correction.rollout_rs_threshold


# Key, and what it is where it is null: the value of another key, or what a function says. In order:
# the critic's number of mini-batches must be known before the size they have.
PPO_RULES: tuple[tuple[str, str | Callable[[PPOConfig], object]], ...] = (
    ("env.rollout.n", default_group_size),
    (f"{ACTOR}.ppo_mini_batches", _mini_batches),
    (f"{ACTOR}.clip_ratio_low", f"{ACTOR}.clip_ratio"),
    (f"{ACTOR}.clip_ratio_high", f"{ACTOR}.clip_ratio"),
    (f"{ACTOR}.loss_scale_factor", _response_tokens),
    (f"{ROLLOUT}.max_model_len", _row_tokens),
    (f"{ROLLOUT}.log_prob_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"),
    (f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    (f"{REF}.dtype", f"{ACTOR}.dtype"),
    (f"{REF}.log_prob_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    (f"{REF}.log_prob_use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"),
    (f"{REF}.log_prob_max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    (f"{CORRECTION}.rollout_rs_threshold", f"{CORRECTION}.rollout_is_threshold"),
    (f"{CORRECTION}.rollout_rs_threshold_lower", _least_ratio),
    ("critic.enable", lambda cfg: cfg.algorithm.adv_estimator == "gae"),
    ("critic.dtype", f"{ACTOR}.dtype"),
    ("critic.ppo_mini_batches", _critic_mini_batches),
    ("critic.ppo_mini_batch_size", f"{ACTOR}.ppo_mini_batch_size"),
    ("critic.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size_per_gpu"),
    ("critic.use_dynamic_bsz", f"{ACTOR}.use_dynamic_bsz"),
    ("critic.ppo_max_token_len_per_gpu", f"{ACTOR}.ppo_max_token_len_per_gpu"),
    ("critic.ppo_epochs", f"{ACTOR}.ppo_epochs"),
    ("critic.loss_scale_factor", _response_tokens),
    ("critic.forward_micro_batch_size_per_gpu", "critic.ppo_micro_batch_size_per_gpu"),
    ("critic.forward_max_token_len_per_gpu", "critic.ppo_max_token_len_per_gpu"),
    ("critic.model.path", "actor_rollout_ref.model.path"),
    ("reward_model.dtype", f"{ACTOR}.dtype"),
    ("reward_model.rule_weight", lambda cfg: 0.0 if cfg.reward_model.enable else 1.0),
    ("env.max_turn_tokens", "data.max_response_length"),
)


def derive(cfg: Config) -> Config:
    """Fill the values of ``cfg`` that are ``None`` because they follow from others; returns ``cfg``
    itself.

    A value that follows from a refused key is taken out as well.
    """
    if isinstance(cfg, PPOConfig):
        for path, rule in PPO_RULES:
            _fill(cfg, path, rule)
        _let(_choose_correction, cfg)
        _let(_choose_rewards, cfg)
    if isinstance(cfg, PPOConfig | SFTConfig):
        for extension in EXTENSIONS.values():
            _let(extension.derive, cfg)
    return cfg


def _fill(cfg: Config, path: str, rule: str | Callable[[Config], object]) -> None:
    above, _, name = path.rpartition(".")
    # MissingKey: the section, or this very key, was refused, which has been said already.
    try:
        section = lookup(cfg, above)
        if getattr(section, name) is not None:
            return
    except MissingKey:
        return
    try:
        setattr(section, name, lookup(cfg, rule) if isinstance(rule, str) else rule(cfg))
    except MissingKey:
        # Taken out, not left null: checks end at a missing key, but would complain about a null
        # that only follows from a mistake made elsewhere.
        section.__dict__.pop(name, None)


def _choose_correction(cfg: PPOConfig) -> None:
    """``rollout_is=auto``: null says off, so that here it cannot mean "not given"."""
    correction = cfg.algorithm.rollout_correction
    if correction.rollout_is != "auto":
        return
    # Of words that an agent said without their tokens, the engine's log-probs are not known.
    comparable = not correction.bypass_mode and not cfg.env.allow_retokenized
    less_precise = cfg.actor_rollout_ref.rollout.dtype != "float32"
    older = cfg.trainer.rollout_overlap != "off"
    correction.rollout_is = "token" if comparable and (less_precise or older) else None


def _choose_rewards(cfg: PPOConfig) -> None:
    """The rewards that are weighed are those that gdpo normalises, where it is told no others."""
    algorithm = cfg.algorithm
    weights = cfg.reward_model.weights
    if not algorithm.gdpo_reward_keys and not algorithm.gdpo_reward_weights:
        algorithm.gdpo_reward_keys = list(weights)
        algorithm.gdpo_reward_weights = list(weights.values())


def _let(derive_more: Callable[[Config], None], cfg: Config) -> None:
    try:
        derive_more(cfg)
    except MissingKey:
        return  # what it would have filled in stays null
