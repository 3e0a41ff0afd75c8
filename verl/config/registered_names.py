"""Checks of registered names (estimators, policy losses, engines) and of estimators' inputs."""

import importlib
from collections.abc import Collection, Iterable

from verl.config.derive import has_file_task_grader
from verl.config.memory import has_reference
from verl.config.plugins import METHOD_PLUGINS
from verl.config.problems import CheckContext, Problems, build_conflict, build_unknown_name_problem
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Section, value_at_path
from verl.names import ENGINES, ESTIMATORS, POLICY_LOSSES

ENGINE_KEY = "actor_rollout_ref.rollout.name"
EXTERNAL_LIB_KEY = "actor_rollout_ref.model.external_lib"

REWARD_PARTS_OVERRIDE = "custom_reward_function.path=FILE, whose function returns a dictionary"

# Columns that every batch has. Other columns depend on the config.
UNCONDITIONAL_COLUMNS = (
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
    """Import the modules that key ``external_lib`` names; return True if there are any."""
    libs = [
        cfg.actor_rollout_ref.model.external_lib for cfg in configs if isinstance(cfg, PPOConfig)
    ]
    library_names = list(dict.fromkeys(filter(None, libs)))
    for name in library_names:
        try:
            importlib.import_module(name)
        except SystemExit as error:  # it would end this process without an error message
            raise ConfigError(
                f"{EXTERNAL_LIB_KEY}={name!r}: importing it raised {error!r}; allowed: a module "
                "that defines and registers names; fix: remove the call of sys.exit",
                "failed_call",
            ) from error
        # Do not catch other errors: they are mistakes in the module's code and need a traceback.
        except (ModuleNotFoundError, TypeError) as error:
            if isinstance(error, TypeError) and not name.startswith("."):
                raise
            allowed = "a module that Python can import (PYTHONPATH, the current directory), or null"
            module_name = name.removesuffix(".py").strip("./").replace("/", ".")
            fix = "correct the name"
            if module_name != name:
                fix = f"name a module, for example {module_name}"
            raise ConfigError(
                f"{EXTERNAL_LIB_KEY}={name!r}: {error}; allowed: {allowed}; fix: {fix}",
                "unknown_name",
            ) from error
    return bool(library_names)


def check_names(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that estimator, policy loss and engine are registered."""
    context_names = ctx.names
    policy_loss_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    for key, registered_names, builtin_names in (
        ("algorithm.adv_estimator", context_names.estimators, ESTIMATORS),
        (policy_loss_key, context_names.policy_losses, POLICY_LOSSES),
        (ENGINE_KEY, context_names.engines, ENGINES),
    ):
        known_names = _list_known_names(cfg, registered_names, builtin_names)
        name = value_at_path(cfg, key)
        if key == ENGINE_KEY and known_names is not None:
            # An engine can also be named by its import path.
            known_names = [*known_names, name if ":" in name else "module:Class"]
        if known_names is not None and name not in known_names:
            yield build_unknown_name_problem(cfg, key, name, known_names)


def _list_known_names(
    cfg: PPOConfig, registered_names: Collection[str] | None, builtin_names: Collection[str]
) -> Collection[str] | None:
    if registered_names is not None:
        return registered_names
    # None: external_lib was not imported yet, and may register more names.
    return None if value_at_path(cfg, EXTERNAL_LIB_KEY) else builtin_names


def map_columns_to_overrides(cfg: PPOConfig) -> dict[str, str]:
    """Map each batch column that depends on the config to the override that adds it.

    The override is "" if the batch has the column with this config.
    """
    algorithm = cfg.algorithm
    kl_override = "actor_rollout_ref.actor.use_kl_loss=true or algorithm.use_kl_in_reward=true"
    has_reward_parts = cfg.custom_reward_function.path or has_file_task_grader(cfg)
    bypass_mode = algorithm.rollout_correction.bypass_mode
    filters_groups = algorithm.filter_groups.enable
    overrides = {
        "reward_parts": "" if has_reward_parts else REWARD_PARTS_OVERRIDE,
        "values": "" if cfg.critic.enable else "critic.enable=true",
        "ref_log_prob": "" if has_reference(cfg) else kl_override,
        "entropys": "algorithm.rollout_correction.bypass_mode=false" if bypass_mode else "",
        "reward_baselines": "algorithm.filter_groups.enable=false" if filters_groups else "",
    }
    for plugin in METHOD_PLUGINS:
        overrides.update(plugin.columns(cfg))
    return overrides


def estimator_uses_greedy_baseline(cfg: PPOConfig, ctx: CheckContext) -> bool:
    """Return True if the estimator uses the returns of greedy trajectories as baselines."""
    return _estimator_reads(cfg, ctx, "reward_baselines", builtin_names=("remax",))


def estimator_uses_turn_rewards(cfg: PPOConfig, ctx: CheckContext) -> bool:
    """Return True if the estimator compares the turns of a group by rewards or success."""
    return _estimator_reads(cfg, ctx, "step_rewards", ("gigpo", "graphgpo", "hgpo"))


def _estimator_reads(
    cfg: PPOConfig, ctx: CheckContext, column: str, builtin_names: Collection[str]
) -> bool:
    """Return True if the estimator requires ``column``.

    If the registry was not read, return True for the estimators ``builtin_names``.
    """
    name = cfg.algorithm.adv_estimator
    if ctx.names.estimators is None:
        return name in builtin_names
    return column in ctx.names.estimators.get(name, ())


def check_estimator_columns(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that the batch will have the columns that the estimator declares as inputs."""
    overrides = map_columns_to_overrides(cfg)
    # If the registries were not read, the inputs of estimators are not known.
    for column in (ctx.names.estimators or {}).get(cfg.algorithm.adv_estimator, ()):
        if column in UNCONDITIONAL_COLUMNS or overrides.get(column) == "":
            continue
        allowed = "estimators whose inputs are in the batch"
        column_names = ", ".join(sorted({*UNCONDITIONAL_COLUMNS, *overrides}))
        fix = overrides.get(column) or f"use an existing column: {column_names}"
        why = f"needs '{column}', which the batch will lack"
        yield build_conflict(cfg, "algorithm.adv_estimator", why, allowed, fix)
