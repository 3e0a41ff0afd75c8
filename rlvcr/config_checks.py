"""Plugin of the config schema: derived values and checks of the keys of RLVCR."""

from rlvcr.records import PRICE_SHARES, THINKING_ADVANTAGES
from rlvcr.settings import RLVCRPPOConfig, RLVCRSFTConfig, get_rlvcr_settings
from verl import names
from verl.config.derive import find_post_rollout_reward_key
from verl.config.plugins import MethodPlugin
from verl.config.problems import CheckContext, Problems, build_conflict, build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import value_at_path

THINKING_ESTIMATORS = ("rlvcr", "copo")
LEVEL_GROUPS_ESTIMATOR = "level_groups"  # uses thinking levels, samples no alternative thoughts
KEY_PREFIX = "algorithm.rlvcr"
# Built-in estimators that do not use thinking advantages.
ESTIMATORS_WITHOUT_THINKING = {*names.AdvantageEstimator} - {*THINKING_ESTIMATORS}
DEFAULT_DIVERSITY_W = 0.5  # weight of the level entropy in the published method


def derive_method_keys(cfg: PPOConfig | SFTConfig) -> None:
    """Give ``env.levels`` and the keys of ``algorithm.rlvcr`` that are null their derived values.

    ``enable`` becomes true for the estimators of ``THINKING_ESTIMATORS``. ``env.levels`` becomes
    true if alternative thoughts, ``level_groups`` or the demonstrations need levels.
    """
    if isinstance(cfg, SFTConfig):
        uses_levels = bool(value_at_path(cfg, "data.levels"))
    else:
        settings = get_rlvcr_settings(cfg.algorithm)
        # Derive the value only if it is null. The checks refuse an explicit false for
        # THINKING_ESTIMATORS.
        if settings.enable is None:
            settings.enable = cfg.algorithm.adv_estimator in THINKING_ESTIMATORS
        if settings.thinking_diversity_w is None:
            settings.thinking_diversity_w = DEFAULT_DIVERSITY_W if settings.enable else 0.0
        if settings.max_alternative_tokens is None:
            settings.max_alternative_tokens = cfg.env.max_turn_tokens
        uses_levels = settings.enable or cfg.algorithm.adv_estimator == LEVEL_GROUPS_ESTIMATOR
    if cfg.env.levels is None:
        cfg.env.levels = uses_levels


def check_method_keys(cfg: PPOConfig | SFTConfig, _ctx: CheckContext) -> Problems:
    """Yield a problem for each setting in ``algorithm.rlvcr`` that contradicts another setting."""
    if isinstance(cfg, PPOConfig):
        yield from _check_required_keys(cfg)
        yield from _check_ignored_keys(cfg)
        yield from _check_alternative_thoughts(cfg)
        yield from _check_posterior_credit(cfg)
        yield from _check_group_prices(cfg)
        yield from _check_success_tolerance(cfg)
        yield from _check_std_floors(cfg)


def _check_required_keys(cfg: PPOConfig) -> Problems:
    settings = get_rlvcr_settings(cfg.algorithm)
    estimator = cfg.algorithm.adv_estimator
    if estimator in THINKING_ESTIMATORS and not settings.enable:
        why = f"{estimator} needs scored alternative thoughts"
        yield build_conflict(cfg, f"{KEY_PREFIX}.enable", why, "true or null", "leave it unset")
    if settings.enable and not cfg.env.levels:
        why = "thinking advantages need a policy that chooses thinking levels"
        yield build_conflict(cfg, "env.levels", why, "true or null", "leave env.levels unset")
    if estimator == LEVEL_GROUPS_ESTIMATOR and not cfg.env.levels:
        why = "level_groups compares thoughts of a policy that chooses thinking levels"
        yield build_conflict(cfg, "env.levels", why, "true or null", "leave env.levels unset")
    if settings.level_bonus_w and estimator == "copo":
        why = "copo multiplies advantages, and the bonus would be added"
        fix = f"{KEY_PREFIX}.level_bonus_w=0, or algorithm.adv_estimator=rlvcr"
        yield build_conflict(cfg, f"{KEY_PREFIX}.level_bonus_w", why, "0", fix)
    if set(settings.prompts) - set("1234"):
        key, why = f"{KEY_PREFIX}.prompts", "it has a key that is not a level"
        fix = "remove the other keys"
        yield build_problem(cfg, key, why, "keys 1, 2, 3, 4", fix, "out_of_range")


def _check_ignored_keys(cfg: PPOConfig) -> Problems:
    """Yield a problem for each setting of RLVCR that has no effect with the advantage estimator."""
    settings = get_rlvcr_settings(cfg.algorithm)
    if settings.combine == "additive" and settings.price_in == "gate":
        key = f"{KEY_PREFIX}.price_in"
        why = (
            "price_in=gate applies the gate of combine=gated to the token cost, and "
            "combine=additive has no gate"
        )
        fix = f"{key}=won, or {KEY_PREFIX}.combine=gated"
        yield build_conflict(cfg, key, why, ", ".join(("won", "all")), fix)
    fix = "algorithm.adv_estimator=rlvcr, or remove the key"
    if settings.epsilon_levels and not settings.enable:
        why = "levels are drawn only if alternative thoughts are scored, and this run scores none"
        yield build_problem(cfg, f"{KEY_PREFIX}.epsilon_levels", why, "0", fix, "no_effect")
    # A user-provided estimator may use thinking advantages, so it accepts the keys below.
    if settings.enable and cfg.algorithm.adv_estimator not in ESTIMATORS_WITHOUT_THINKING:
        return
    if settings.level_bonus_w:
        why = "only estimators with thinking advantages read it"
        yield build_problem(cfg, f"{KEY_PREFIX}.level_bonus_w", why, "0", fix, "no_effect")
    if settings.permute:
        why = "this estimator has no thinking advantages to permute"
        yield build_problem(cfg, f"{KEY_PREFIX}.permute", why, "false", fix, "no_effect")
    if settings.credit != "scored":
        why = "this estimator has no thinking advantages, so their source has no effect"
        yield build_problem(cfg, f"{KEY_PREFIX}.credit", why, "scored", fix, "no_effect")


def _check_alternative_thoughts(cfg: PPOConfig) -> Problems:
    settings = get_rlvcr_settings(cfg.algorithm)
    key = f"{KEY_PREFIX}.alternatives"
    samples_one_level = settings.alternatives == "one"
    if samples_one_level and (
        settings.combine == "reweight" or cfg.algorithm.adv_estimator == "copo"
    ):
        why = "reweighting needs the scores of all four thoughts, and two would be unknown"
        fix = f"{key}=all, or combine: additive, gated, success"
        yield build_conflict(cfg, key, why, "all", fix)
    if settings.enable and samples_one_level and settings.mode == "mean_std_norm":
        why = (
            f"with {KEY_PREFIX}.mode=mean_std_norm the std of two scores is half their difference, "
            "so every advantage would be 1.5 or -1.5, even for a small difference"
        )
        yield build_conflict(cfg, key, why, "all", f"{key}=all, or {KEY_PREFIX}.mode=mean_norm")
    reward_key = find_post_rollout_reward_key(cfg)
    if settings.enable and settings.expand == "mixed_groups" and reward_key:
        key = f"{KEY_PREFIX}.expand"
        why = f"groups are compared by environment returns, before {reward_key} changes the returns"
        yield build_conflict(cfg, key, why, "all", f"{key}=all")
    if settings.enable and settings.step_fraction == 0:
        fix = f"{KEY_PREFIX}.step_fraction=1.0, or algorithm.adv_estimator=grpo"
        why = "no turn would be scored"
        yield build_conflict(cfg, f"{KEY_PREFIX}.step_fraction", why, "more than 0, at most 1", fix)


def _check_posterior_credit(cfg: PPOConfig) -> Problems:
    settings = get_rlvcr_settings(cfg.algorithm)
    if not settings.enable or settings.credit != "posterior":
        return
    rollout_config = cfg.actor_rollout_ref.rollout
    restricted_keys: dict[str, tuple[object, object]] = {
        "algorithm.adv_estimator": (cfg.algorithm.adv_estimator, "rlvcr"),
        f"{KEY_PREFIX}.combine": (settings.combine, "additive"),
        f"{KEY_PREFIX}.alternatives": (settings.alternatives, "all"),
        f"{KEY_PREFIX}.action_blind": (settings.action_blind, True),
        f"{KEY_PREFIX}.permute": (settings.permute, False),
        "actor_rollout_ref.rollout.temperature": (rollout_config.temperature, 1.0),
        "actor_rollout_ref.rollout.top_p": (rollout_config.top_p, 1.0),
        "actor_rollout_ref.rollout.top_k": (rollout_config.top_k, -1),
    }
    for key, (value, required) in restricted_keys.items():
        if value != required:
            why = (
                f"{KEY_PREFIX}.credit=posterior needs the probability of the sampled action after "
                "each level, and replaces all other forms of the thinking advantage"
            )
            yield build_conflict(cfg, key, why, str(required), f"{key}={required}")
    if settings.level_bonus_w:
        key = f"{KEY_PREFIX}.level_bonus_w"
        why = (
            f"with {KEY_PREFIX}.credit=posterior the gradient of a level is averaged over all "
            "levels, and the bonus is for the sampled level only"
        )
        yield build_conflict(cfg, key, why, "0", f"{key}=0")
    if settings.expand == "successes":
        why = f"{KEY_PREFIX}.credit=posterior gives credit in trajectories without success too"
        fix = f"{KEY_PREFIX}.expand=mixed_groups"
        yield build_conflict(cfg, f"{KEY_PREFIX}.expand", why, "all, mixed_groups", fix)
    if (settings.max_alternative_tokens or cfg.env.max_turn_tokens) < cfg.env.max_turn_tokens:
        key = f"{KEY_PREFIX}.max_alternative_tokens"
        why = (
            f"{KEY_PREFIX}.credit=posterior takes a thought that is cut for a turn without action, "
            "but a turn of the policy may be longer"
        )
        allowed = f"env.max_turn_tokens ({cfg.env.max_turn_tokens})"
        yield build_conflict(cfg, key, why, allowed, f"{key}=null")


def _check_group_prices(cfg: PPOConfig) -> Problems:
    settings = get_rlvcr_settings(cfg.algorithm)
    estimator = cfg.algorithm.adv_estimator
    if settings.expand == "successes" and settings.enable and settings.combine != "success":
        why = "without combine=success, trajectories without success have thinking advantages too"
        fix = f"{KEY_PREFIX}.combine=success, or {KEY_PREFIX}.expand=all"
        yield build_conflict(cfg, f"{KEY_PREFIX}.expand", why, "all, mixed_groups", fix)
    if settings.price_in != "group":
        return
    key = f"{KEY_PREFIX}.price_in"
    if estimator == "copo" or not (settings.enable or estimator == LEVEL_GROUPS_ESTIMATOR):
        why = f"{estimator} adds no token prices to its advantages"
        fix = "algorithm.adv_estimator=rlvcr or level_groups"
        yield build_conflict(cfg, key, why, ", ".join(("all", "won", "gate")), fix)
    if settings.combine == "reweight" and settings.enable:
        why = "combine=reweight multiplies advantages, and price_in=group adds prices to them"
        allowed = ", ".join(("all", "won"))
        yield build_conflict(cfg, key, why, allowed, f"{KEY_PREFIX}.combine=success")
    if settings.permute and estimator not in ESTIMATORS_WITHOUT_THINKING:
        why = "permute shuffles only thinking advantages, so prices of groups would stay in place"
        yield build_conflict(cfg, f"{KEY_PREFIX}.permute", why, "false", f"{key}=won")
    if settings.cost_coef:
        why = "price_in=group has no price per token, so cost_coef has no effect"
        fix = f"{KEY_PREFIX}.cost_coef=0, or {key}=won"
        yield build_problem(cfg, f"{KEY_PREFIX}.cost_coef", why, "0", fix, "no_effect")


def _check_success_tolerance(cfg: PPOConfig) -> Problems:
    if cfg.algorithm.success_tolerance is None:
        return
    settings = get_rlvcr_settings(cfg.algorithm)
    has_thought_price = settings.enable and (settings.cost_coef or settings.price_in == "group")
    reward_kwargs = cfg.reward_model.reward_kwargs
    has_trajectory_price = any(
        reward_kwargs.get(name) for name in ("token_price", "relative_token_price")
    )
    if not (
        has_thought_price
        or has_trajectory_price
        or cfg.algorithm.adv_estimator == LEVEL_GROUPS_ESTIMATOR
    ):
        why = "no token has a price, and this key only controls a factor of token prices"
        fix = f"{KEY_PREFIX}.price_in=group, or reward_model.reward_kwargs.relative_token_price=0.5"
        key = "algorithm.success_tolerance"
        yield build_problem(cfg, key, why, "null", fix, "no_effect")


def _check_std_floors(cfg: PPOConfig) -> Problems:
    settings = get_rlvcr_settings(cfg.algorithm)
    if settings.mode == "mean_std_norm" and settings.std_floor == 0:
        key = f"{KEY_PREFIX}.std_floor"
        why = (
            "advantages are divided by the standard deviation, so a tiny difference of scores "
            "would get as large an advantage as a large difference"
        )
        yield build_conflict(cfg, key, why, "more than 0", f"{key}=0.1")
    if settings.spread_floor == 0:
        key = f"{KEY_PREFIX}.spread_floor"
        why = "rounding errors between equal scores would be scaled up to the full range of factors"
        yield build_problem(cfg, key, why, "more than 0", f"{key}=0.02", "out_of_range")


def map_rlvcr_columns_to_overrides(cfg: PPOConfig) -> dict[str, str]:
    """Return, for each optional batch column of RLVCR, the override that makes a run add it.

    The override is "" if this run adds the column already. Error messages about a missing column
    name the override as the fix.
    """
    settings = get_rlvcr_settings(cfg.algorithm)
    enabling_override = "" if settings.enable else f"{KEY_PREFIX}.enable=true"
    uses_group_prices = settings.enable and settings.price_in == "group"
    uses_level_groups = cfg.algorithm.adv_estimator == LEVEL_GROUPS_ESTIMATOR
    uses_reweight_factors = settings.combine == "reweight" or cfg.algorithm.adv_estimator == "copo"
    reweight_override = f"{KEY_PREFIX}.enable=true {KEY_PREFIX}.combine=reweight"
    if settings.enable and uses_reweight_factors:
        reweight_override = ""
    return {
        THINKING_ADVANTAGES: enabling_override,
        PRICE_SHARES: enabling_override,
        "choice_mask": enabling_override,
        "thinking_reweight": reweight_override,
        "thinking_group_price": ""
        if uses_group_prices or uses_level_groups
        else "algorithm.adv_estimator=level_groups",
    }


def count_max_extra_tokens(cfg: PPOConfig, num_turns: int) -> dict[str, int]:
    """Return the most tokens, by purpose, that RLVCR samples in addition to ``num_turns`` turns."""
    settings = get_rlvcr_settings(cfg.algorithm)
    if not settings.enable:
        return {}
    # The policy itself sampled one of the four levels, so three alternatives remain.
    thoughts_per_turn = 3 if settings.alternatives == "all" else 1
    num_scored_turns = num_turns * settings.step_fraction
    thought_tokens = int(num_scored_turns * thoughts_per_turn * settings.max_alternative_tokens)
    return {"alternative thoughts": thought_tokens}


METHOD_PLUGIN = MethodPlugin(
    schemas={PPOConfig: RLVCRPPOConfig, SFTConfig: RLVCRSFTConfig},
    derive=derive_method_keys,
    check=check_method_keys,
    columns=map_rlvcr_columns_to_overrides,
    sampled_tokens=count_max_extra_tokens,
)
