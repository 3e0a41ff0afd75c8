"""Names that registries resolve (estimators, losses, engines), and modules of the user's own that
add to them.
"""

import importlib
from collections.abc import Collection, Iterable

from verl.config.derive import grades_files
from verl.config.plugins import METHODS
from verl.config.problems import Context, Problems, problem, unknown_name
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Section, lookup
from verl.names import ENGINES, ESTIMATORS, POLICY_LOSSES

ENGINE = "actor_rollout_ref.rollout.name"
EXTERNAL_LIB = "actor_rollout_ref.model.external_lib"

BASELINES = "reward_baselines"
REWARD_PARTS_FROM = "custom_reward_function.path=FILE, whose function returns a dictionary"

# Columns of the batch that every estimator may read; the others depend on the config.
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


def import_external(configs: Iterable[Section]) -> bool:
    """Import the modules that ``configs`` name as ``external_lib``; whether there are any.

    Raises ConfigError for one that is not there.
    """
    libraries = [
        cfg.actor_rollout_ref.model.external_lib for cfg in configs if isinstance(cfg, PPOConfig)
    ]
    named = list(dict.fromkeys(filter(None, libraries)))
    for name in named:
        try:
            importlib.import_module(name)
        # Any other error is a mistake inside the module, whose author needs the traceback.
        except (ModuleNotFoundError, TypeError, ValueError) as error:
            # The others are Python's own, about a name that no module has (.x, the empty name).
            if not isinstance(error, ModuleNotFoundError) and name.strip(".") == name:
                raise
            where = "a module that python finds (PYTHONPATH, the current directory), or null"
            raise ConfigError(
                f"{EXTERNAL_LIB}={name!r}: {error}; allowed: {where}; fix: mend the name"
            ) from error
    return bool(named)


def check_names(cfg: PPOConfig, ctx: Context) -> Problems:
    """Estimator, policy loss and engine are registered."""
    names = ctx.names
    loss = "actor_rollout_ref.actor.policy_loss.loss_mode"
    for key, registered, shipped in (
        ("algorithm.adv_estimator", names.estimators, ESTIMATORS),
        (loss, names.policy_losses, POLICY_LOSSES),
        (ENGINE, names.engines, ENGINES),
    ):
        known = _known(cfg, registered, shipped)
        name = lookup(cfg, key)
        if key == ENGINE and known is not None:
            # An engine may also be named by its place.
            known = [*known, name if ":" in name else "module:Class"]
        if known is not None and name not in known:
            yield unknown_name(cfg, key, name, known)


def _known(
    cfg: PPOConfig, registered: Collection[str] | None, shipped: Collection[str]
) -> Collection[str] | None:
    """Names to check against; None where a module that has not been imported may add to them."""
    if registered is not None:
        return registered
    return None if lookup(cfg, EXTERNAL_LIB) else shipped


def batch_columns(cfg: PPOConfig) -> dict[str, str]:
    """Columns that depend on the config: each with "" where it will be there, else how to get
    it.
    """
    algorithm = cfg.algorithm
    actor = "actor_rollout_ref.actor"
    use_kl = f"{actor}.use_kl_loss=true or algorithm.use_kl_in_reward=true"
    bypass = "algorithm.rollout_correction.bypass_mode"
    reference = lookup(cfg, f"{actor}.use_kl_loss") or algorithm.use_kl_in_reward
    graded = cfg.custom_reward_function.path or grades_files(cfg)
    columns = {
        "reward_parts": "" if graded else REWARD_PARTS_FROM,
        "values": "" if cfg.critic.enable else "critic.enable=true",
        "ref_log_prob": "" if reference else use_kl,
        "entropys": f"{bypass}=false" if lookup(cfg, bypass) else "",
        BASELINES: (
            "algorithm.filter_groups.enable=false" if algorithm.filter_groups.enable else ""
        ),
    }
    for plugin in METHODS:
        columns.update(plugin.columns(cfg))
    return columns


def compares_with_greedy_play(cfg: PPOConfig, ctx: Context) -> bool:
    """Whether the estimator reads what greedy plays earn; where no names were looked up, remax is
    the one known to.
    """
    name = cfg.algorithm.adv_estimator
    known = ctx.names.estimators
    return name == "remax" if known is None else BASELINES in known.get(name, ())


def check_columns(cfg: PPOConfig, ctx: Context) -> Problems:
    """The batch will hold what the estimator declares as its inputs."""
    columns = batch_columns(cfg)
    # Where no names were looked up, nothing is known about the inputs of estimators.
    for column in (ctx.names.estimators or {}).get(cfg.algorithm.adv_estimator, ()):
        if column in COLUMNS or columns.get(column) == "":
            continue
        allowed = "estimators whose inputs this run has"
        fix = (
            columns.get(column)
            or f"an input of that name; there are {', '.join(sorted({*COLUMNS, *columns}))}"
        )
        yield problem(
            cfg,
            "algorithm.adv_estimator",
            f"needs '{column}', which the batch will lack",
            allowed,
            fix,
        )
