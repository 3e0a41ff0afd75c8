"""Checks of registered names (estimators, policy losses, engines) and of estimators' inputs."""

import importlib
from collections.abc import Collection, Iterable

from verl.config.derive import grades_file_tasks
from verl.config.plugins import METHODS
from verl.config.problems import CheckContext, Problems, build_problem, unknown_name_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Section, value_at_path
from verl.names import ENGINES, ESTIMATORS, POLICY_LOSSES

ENGINE = "actor_rollout_ref.rollout.name"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"

BASELINE_COLUMN = "reward_baselines"
REWARD_PARTS_FROM = "custom_reward_function.path=FILE, whose function returns a dictionary"

# Columns that every batch has; the others depend on the config.
COLUMNS = (
    "prompts",
    "responses",
    "input_ids",
    "attention_mask",
    "position_ids",
    "response_mask",
    "step_ids",
    "rollout_log_probs",
    "old_log_probs",
    "token_level_scores",
    "token_level_rewards",
    "uid",
    "traj_uid",
    "data_source",
    "task_id",
    "anchor_obs",
    "is_action_valid",
    "step_rewards",
    "step_index",
    "episode_rewards",
    "episode_lengths",
    "won",
    "aborted",
    "truncated",
    "steps",
)


def import_external_libs(configs: Iterable[Section]) -> bool:
    """Import the modules named as ``external_lib``; return True if there are any."""
    libraries = [
        cfg.actor_rollout_ref.model.external_lib for cfg in configs if isinstance(cfg, PPOConfig)
    ]
    named = list(dict.fromkeys(filter(None, libraries)))
    for name in named:
        try:
            importlib.import_module(name)
        # Other errors are mistakes inside the module and keep their traceback.
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            # Python raises TypeError and ValueError for invalid module names (.x, the empty name).
            if not isinstance(error, ModuleNotFoundError) and name.strip(".") == name:
                raise
            allowed = "a module that Python can import (PYTHONPATH, the current directory), or null"
            raise ConfigError(
                f"{EXTERNAL_LIB}={name!r}: {error}; allowed: {allowed}; fix: correct the name"
            ) from error
    return bool(named)


def check_names(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that estimator, policy loss and engine are registered."""
    names = ctx.names
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    for key, registered, shipped in (
        ("algorithm.adv_estimator", names.estimators, ESTIMATORS),
        (loss, names.policy_losses, POLICY_LOSSES),
        (ENGINE, names.engines, ENGINES),
    ):
        known_names = _known_names(cfg, registered, shipped)
        name = value_at_path(cfg, key)
        if key == ENGINE and known_names is not None:
            # An engine can also be named by its import path.
            known_names = [*known_names, name if ":" in name else "module:Class"]
        if known_names is not None and name not in known_names:
            yield unknown_name_problem(cfg, key, name, known_names)


def _known_names(
    cfg: PPOConfig, registered: Collection[str] | None, shipped: Collection[str]
) -> Collection[str] | None:
    """Return the known names; None if a module that is not imported yet may register more."""
    if registered is not None:
        return registered
    return None if value_at_path(cfg, EXTERNAL_LIB) else shipped


def batch_columns(cfg: PPOConfig) -> dict[str, str]:
    """Map each batch column that depends on the config to the override that would add it.

    The text is "" if the batch has the column with this config.
    """
    algorithm = cfg.algorithm
    use_kl = "actor_rollout_ref.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true"
    has_reference = cfg.actor_rollout_ref.actor.use_kl_loss or algorithm.use_kl_in_reward
    is_graded = cfg.custom_reward_function.path or grades_file_tasks(cfg)
    bypasses = algorithm.rollout_correction.bypass_mode
    filters = algorithm.filter_groups.enable
    columns = {
        "reward_parts": "" if is_graded else REWARD_PARTS_FROM,
        "values": "" if cfg.critic.enable else "critic.enable=true",
        "ref_log_prob": "" if has_reference else use_kl,
        "entropys": "algorithm.rollout_correction.bypass_mode=false" if bypasses else "",
        BASELINE_COLUMN: "algorithm.filter_groups.enable=false" if filters else "",
    }
    for plugin in METHODS:
        columns.update(plugin.columns(cfg))
    return columns


def estimator_uses_greedy_baseline(cfg: PPOConfig, ctx: CheckContext) -> bool:
    """Return True if the estimator uses the returns of greedy trajectories as baselines."""
    name = cfg.algorithm.adv_estimator
    registry = ctx.names.estimators
    return name == "remax" if registry is None else BASELINE_COLUMN in registry.get(name, ())


def check_columns(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that the batch will have the columns that the estimator declares as inputs."""
    columns = batch_columns(cfg)
    # If the registries were not read, the inputs of estimators are not known.
    for column in (ctx.names.estimators or {}).get(cfg.algorithm.adv_estimator, ()):
        if column in COLUMNS or columns.get(column) == "":
            continue
        allowed = "estimators whose inputs are in the batch"
        fix = (
            columns.get(column)
            or f"use an existing column: {', '.join(sorted({*COLUMNS, *columns}))}"
        )
        why = f"needs '{column}', which the batch will lack"
        yield build_problem(cfg, "algorithm.adv_estimator", why, allowed, fix)
