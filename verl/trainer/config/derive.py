"""Values that follow from others: written once, here, so that every worker reads final numbers and
no ``None``.
"""

import os
from typing import Any

from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.trainer.config.schema.algorithm import THINKING_ESTIMATORS
from verl.trainer.config.schema.env import EnvConfig


def _fill(target: Any, **values: Any) -> None:
    """Set the keys of ``target`` that are still ``None``."""
    for name, value in values.items():
        if getattr(target, name) is None:
            setattr(target, name, value)


def trajectories_per_iteration(cfg: PPOConfig) -> int:
    """Plays per iteration: tasks times group size."""
    return cfg.data.train_batch_size * cfg.env.rollout.n


def iterations(cfg: PPOConfig, train_tasks: int) -> int:
    """Training steps of a whole run: ``trainer.total_training_steps``, else epochs times batches
    per epoch.
    """
    trainer = cfg.trainer
    if trainer.total_training_steps is not None:
        return trainer.total_training_steps
    return trainer.total_epochs * max(1, train_tasks // cfg.data.train_batch_size)


def plays_generated(env: EnvConfig) -> bool:
    """Whether ALFWorld's games are the generated ones."""
    source = env.alfworld.source
    return source == "generated" or (source == "auto" and "ALFWORLD_DATA" not in os.environ)


def known_tasks(env: EnvConfig) -> int | None:
    """Training tasks as far as the config tells; None where only the environment knows."""
    counts = [env.train_tasks] if env.train_tasks is not None else []
    if env.env_name.split("/", 1)[0] == "alfworld" and plays_generated(env):
        counts.append(env.alfworld.train_games)
    return min(counts, default=None)


def _derive_policy(cfg: PPOConfig) -> None:
    actor, ref, rollout = (
        cfg.actor_rollout_ref.actor,
        cfg.actor_rollout_ref.ref,
        cfg.actor_rollout_ref.rollout,
    )
    mini_batches = max(1, cfg.data.train_batch_size // actor.ppo_mini_batch_size)
    _fill(
        actor,
        ppo_mini_batches=mini_batches,
        clip_ratio_low=actor.clip_ratio,
        clip_ratio_high=actor.clip_ratio,
    )
    _fill(actor, loss_scale_factor=float(cfg.data.max_response_length))
    log_prob = {
        "log_prob_micro_batch_size_per_gpu": actor.ppo_micro_batch_size_per_gpu,
        "log_prob_use_dynamic_bsz": actor.use_dynamic_bsz,
        "log_prob_max_token_len_per_gpu": actor.ppo_max_token_len_per_gpu,
    }
    _fill(
        rollout, max_model_len=cfg.data.max_prompt_length + cfg.data.max_response_length, **log_prob
    )
    _fill(ref, dtype=actor.dtype, **log_prob)


def _derive_critic(cfg: PPOConfig) -> None:
    actor, critic = cfg.actor_rollout_ref.actor, cfg.critic
    mini_batches = actor.ppo_mini_batches
    if critic.ppo_mini_batch_size is not None:
        mini_batches = max(1, cfg.data.train_batch_size // critic.ppo_mini_batch_size)
    _fill(
        critic,
        enable=cfg.algorithm.adv_estimator == "gae",
        dtype=actor.dtype,
        ppo_mini_batch_size=actor.ppo_mini_batch_size,
        ppo_mini_batches=mini_batches,
        ppo_micro_batch_size_per_gpu=actor.ppo_micro_batch_size_per_gpu,
        use_dynamic_bsz=actor.use_dynamic_bsz,
        ppo_max_token_len_per_gpu=actor.ppo_max_token_len_per_gpu,
        ppo_epochs=actor.ppo_epochs,
        loss_scale_factor=float(cfg.data.max_response_length),
    )
    _fill(
        critic,
        forward_micro_batch_size_per_gpu=critic.ppo_micro_batch_size_per_gpu,
        forward_max_token_len_per_gpu=critic.ppo_max_token_len_per_gpu,
    )
    _fill(critic.model, path=cfg.actor_rollout_ref.model.path)


def derive(cfg: Any) -> Any:
    """Fill the values of ``cfg`` that are ``None`` because they follow from others; returns ``cfg``
    itself.
    """
    if isinstance(cfg, PPOConfig):
        _derive_policy(cfg)
        _derive_critic(cfg)
        _fill(cfg.algorithm.rlvcr, enable=cfg.algorithm.adv_estimator in THINKING_ESTIMATORS)
        _fill(
            cfg.env, max_turn_tokens=cfg.data.max_response_length, levels=cfg.algorithm.rlvcr.enable
        )
    if isinstance(cfg, SFTConfig):
        _fill(cfg.env, levels=bool(cfg.data.levels))
    if isinstance(cfg, PPOConfig | SFTConfig):
        seen = cfg.env.alfworld.eval_dataset == "eval_in_distribution"
        _fill(cfg.env.alfworld, val_split="valid_seen" if seen else "valid_unseen")
    return cfg
