"""The method as an extension of the configuration: ``algorithm.rlvcr`` and the keys about levels,
what follows from them, what contradicts them, and what they cost.
"""

from collections.abc import Collection, Mapping
from typing import Any

from rlvcr.settings import DemonstrationKeys, LevelKeys, RLVCRSettings
from verl import names
from verl.config.derive import scored_later
from verl.config.plugged import Extension
from verl.config.problems import Context, Problems, problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import Section

ESTIMATORS = ("rlvcr", "copo")
PREFIX = "algorithm.rlvcr"
PLAIN = {*names.AdvantageEstimator} - {*ESTIMATORS}  # none of these reads thinking credit
# Managers whose rewards sum to the return of the environment, but for their arguments.
PAYS_THE_RETURN = ("episode", "naive", "prime", "step")
DIVERSITY = 0.5  # the published weight of the levels' entropy


class MethodSection:
    """``algorithm.rlvcr`` is there in every config: it says whether the method is on."""

    def names(self) -> Collection[str]:
        """The one section."""
        return ("rlvcr",)

    def section(self, name: str) -> type[Section] | None:
        """The settings of the method."""
        return RLVCRSettings if name == "rlvcr" else None

    def present(self, values: Mapping[str, Any]) -> Collection[str]:
        """Always, whatever is written."""
        del values
        return ("rlvcr",)


def settings_of(cfg: PPOConfig) -> RLVCRSettings:
    """The settings of the method in ``cfg``."""
    return cfg.algorithm.rlvcr


def derive(cfg: PPOConfig | SFTConfig) -> None:
    """Where nothing else is said, the estimator turns the method on, and the method asks for
    levels; demonstrations with levels are of episodes that ask for them.
    """
    if isinstance(cfg, SFTConfig):
        asks = bool(cfg.data.levels)
    else:
        settings = settings_of(cfg)
        # Only null follows the estimator: a false that contradicts it stays, and is refused.
        if settings.enable is None:
            settings.enable = cfg.algorithm.adv_estimator in ESTIMATORS
        if settings.thinking_diversity_w is None:
            settings.thinking_diversity_w = DIVERSITY if settings.enable else 0.0
        if settings.max_alternative_tokens is None:
            settings.max_alternative_tokens = cfg.env.max_turn_tokens
        asks = settings.enable
    if cfg.env.levels is None:
        cfg.env.levels = asks


def check(cfg: PPOConfig | SFTConfig, _ctx: Context) -> Problems:
    """Settings of the method that contradict each other or the rest."""
    if isinstance(cfg, PPOConfig):
        yield from _switches(cfg)
        yield from _of_no_use(cfg)
        yield from _alternatives(cfg)
        yield from _executed(cfg)
        yield from _spread(cfg)


def _switches(cfg: PPOConfig) -> Problems:
    settings = settings_of(cfg)
    name = cfg.algorithm.adv_estimator
    if name in ESTIMATORS and not settings.enable:
        why = f"{name} needs scored alternatives"
        yield problem(cfg, f"{PREFIX}.enable", why, "true or null", "leave it unset")
    if settings.enable and not cfg.env.levels:
        why = "thinking credit needs a policy that is asked for levels"
        yield problem(cfg, "env.levels", why, "true or null", "leave env.levels unset")
    if settings.level_bonus_w and name == "copo":
        why = "copo multiplies advantages and adds nothing"
        fix = f"{PREFIX}.level_bonus_w=0, or algorithm.adv_estimator=rlvcr"
        yield problem(cfg, f"{PREFIX}.level_bonus_w", why, "0", fix)
    if set(settings.prompts) - set("1234"):
        fix = "remove the other keys"
        yield problem(cfg, f"{PREFIX}.prompts", "not a level", "keys 1, 2, 3, 4", fix)


def _of_no_use(cfg: PPOConfig) -> Problems:
    """Settings that nothing would read: an arm of a comparison that says it is another, and is
    not.
    """
    settings = settings_of(cfg)
    if settings.combine == "additive" and settings.price_in == "gate":
        key = f"{PREFIX}.price_in"
        why = f"{PREFIX}.combine=additive has no gate that a price could stand behind"
        yield problem(cfg, key, why, "won, all", f"{key}=won, or {PREFIX}.combine=gated")
    fix = "algorithm.adv_estimator=rlvcr, or leave it out"
    if settings.epsilon_levels and not settings.enable:
        why = "levels are drawn in plays whose thoughts are scored, and none are"
        yield problem(cfg, f"{PREFIX}.epsilon_levels", why, "0", fix)
    # An estimator of somebody's own may read what scored thoughts add to the batch.
    if settings.enable and cfg.algorithm.adv_estimator not in PLAIN:
        return
    if settings.level_bonus_w:
        why = "no estimator without thinking credit reads it"
        yield problem(cfg, f"{PREFIX}.level_bonus_w", why, "0", fix)
    if settings.permute:
        why = "there is no thinking credit to deal anew"
        yield problem(cfg, f"{PREFIX}.permute", why, "false", fix)
    if settings.credit != "scored":
        why = "there is no thinking credit that could come from elsewhere"
        yield problem(cfg, f"{PREFIX}.credit", why, "scored", fix)


def _alternatives(cfg: PPOConfig) -> Problems:
    settings = settings_of(cfg)
    key = f"{PREFIX}.alternatives"
    one = settings.alternatives == "one"
    if one and (settings.combine == "reweight" or cfg.algorithm.adv_estimator == "copo"):
        why = "reweighting scales the scores of all four thoughts, and one leaves two unknown"
        fix = f"{key}=all, or combine: additive, gated, success"
        yield problem(cfg, key, why, "all", fix)
    if settings.enable and one and settings.mode == "mean_std_norm":
        why = (
            f"with {PREFIX}.mode=mean_std_norm the spread of two scores is half their distance, so "
            "every advantage would be 1.5 or -1.5, however close"
        )
        yield problem(cfg, key, why, "all", f"{key}=all, or {PREFIX}.mode=mean_norm")
    judge = scored_later(cfg)
    if settings.enable and settings.expand == "mixed_groups" and judge:
        key = f"{PREFIX}.expand"
        why = f"groups are compared by what environments pay, before {judge} scores plays"
        yield problem(cfg, key, why, "all", f"{key}=all")
    if settings.enable and settings.step_fraction == 0:
        fix = f"{PREFIX}.step_fraction=1.0, or algorithm.adv_estimator=grpo"
        why = "no step would be scored"
        yield problem(cfg, f"{PREFIX}.step_fraction", why, "more than 0, at most 1", fix)


def _executed(cfg: PPOConfig) -> Problems:
    settings = settings_of(cfg)
    if not settings.enable or settings.credit == "scored":
        return
    key = f"{PREFIX}.credit"
    if cfg.algorithm.adv_estimator == "copo" or settings.combine == "reweight":
        why = "factors of the advantage are made of scores, and executed alternatives add to it"
        fix = f"{key}=scored, or algorithm.adv_estimator=rlvcr with additive, gated or success"
        yield problem(cfg, key, why, "scored", fix)
    if settings.executed_share == 0:
        share = f"{PREFIX}.executed_share"
        why = f"{key}={settings.credit} needs steps at which another level is executed"
        yield problem(cfg, share, why, "more than 0, at most 1", f"{share}=0.25")
    if settings.credit == "corrected" and settings.combine == "gated":
        why = "behind a gate a thought is blamed in lost plays, which returns are not asked about"
        fix = f"{PREFIX}.combine=success, or {key}=scored or executed"
        yield problem(cfg, key, why, "scored, executed", fix)
    if settings.epsilon_levels:
        why = "executed alternatives play on as the policy chooses, where drawn levels do not"
        yield problem(cfg, f"{PREFIX}.epsilon_levels", why, "0", f"{PREFIX}.epsilon_levels=0")
    if cfg.algorithm.filter_groups.enable:
        # The play's own return would decide whether its difference to a branch counts.
        filtered = "algorithm.filter_groups.enable"
        why = "groups are kept by their returns, and executed alternatives need those of all groups"
        yield problem(cfg, key, why, "scored", f"{key}=scored, or {filtered}=false")
    for changed in _paid_later(cfg):
        why = f"executed alternatives compare what environments pay, and {changed} changes it later"
        yield problem(cfg, key, why, "scored", f"{key}=scored, or leave out {changed}")


def _paid_later(cfg: PPOConfig) -> list[str]:
    """The keys that change the return of a play after the rollout."""
    reward = cfg.reward_model
    changes = {
        scored_later(cfg) or "": True,
        "actor_rollout_ref.actor.use_invalid_action_penalty": (
            cfg.actor_rollout_ref.actor.use_invalid_action_penalty
        ),
        "algorithm.use_kl_in_reward": cfg.algorithm.use_kl_in_reward,
        # A manager of somebody's own may do anything.
        "reward_model.reward_manager": reward.reward_manager not in PAYS_THE_RETURN,
    }
    prices = {
        f"reward_model.reward_kwargs.{key}": reward.reward_kwargs.get(key)
        for key in ("token_price", "overlong_len")
    }
    return [key for key, changed in (changes | prices).items() if key and changed]


def _spread(cfg: PPOConfig) -> Problems:
    settings = settings_of(cfg)
    if settings.mode == "mean_std_norm" and settings.std_floor == 0:
        key = f"{PREFIX}.std_floor"
        why = "a near-tie of scores would become a full-size advantage"
        yield problem(cfg, key, why, "more than 0", f"{key}=0.1")
    if settings.spread_floor == 0:
        key = f"{PREFIX}.spread_floor"
        why = "rounding noise between equal thoughts would get the full range of factors"
        yield problem(cfg, key, why, "more than 0", f"{key}=0.02")


def columns(cfg: PPOConfig) -> dict[str, str]:
    """The columns that scored thoughts add to the batch."""
    settings = settings_of(cfg)
    on = "" if settings.enable else f"{PREFIX}.enable=true"
    executes = settings.credit != "scored"
    reweights = settings.combine == "reweight" or cfg.algorithm.adv_estimator == "copo"
    factor = (
        "" if settings.enable and reweights else f"{PREFIX}.enable=true {PREFIX}.combine=reweight"
    )
    return {
        "thinking_level_entropies": on,
        "thinking_token_costs": on,
        "choice_mask": on,
        "thinking_reweight": factor,
        "thinking_executed": "" if on == "" and executes else f"{PREFIX}.credit=executed",
    }


def sampled_tokens(cfg: PPOConfig, steps: int) -> dict[str, int]:
    """Tokens of alternative thoughts in ``steps`` steps, at most."""
    settings = settings_of(cfg)
    if not settings.enable:
        return {}
    # Four levels, at one of which the policy itself has thought.
    thoughts = 3 if settings.alternatives == "all" else 1
    steps_scored = steps * settings.step_fraction
    tokens = int(steps_scored * thoughts * settings.max_alternative_tokens)
    found = {} if settings.credit == "executed" else {"alternative thoughts": tokens}
    if settings.credit != "scored":
        # Where every branch is played to the last step.
        turns = steps * settings.executed_share * cfg.env.max_steps
        found["executed alternatives"] = int(turns * cfg.env.max_turn_tokens)
    return found


METHOD = Extension(
    name="method",
    sources={"algorithm": MethodSection()},
    keys={"env": LevelKeys, "data": DemonstrationKeys},
    derive=derive,
    check=check,
    columns=columns,
    sampled_tokens=sampled_tokens,
)
