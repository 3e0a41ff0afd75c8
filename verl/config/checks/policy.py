"""The policy, its cold start, the estimator and the losses."""

from verl.config.checks.models import check_directory
from verl.config.checks.sft import check_sft
from verl.config.cold_start import cold_start_config
from verl.config.derive import scored_later
from verl.config.problems import Context, Problems, problem
from verl.config.registered_names import compares_with_greedy_play
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, lookup
from verl.names import ESTIMATORS, AdvantageEstimator


def check_model(cfg: PPOConfig, ctx: Context) -> Problems:
    """There is a policy, or a way to make one."""
    key = "actor_rollout_ref.model.path"
    path = cfg.actor_rollout_ref.model.path
    if path is None:
        fix = f"{key}=DIR, or {key}=OWNER/NAME of the hub"
        yield problem(cfg, key, "no policy is named", "a directory or a hub name", fix)
    yield from check_directory(cfg, key, ctx, cfg.cold_start.enable)
    if cfg.critic.enable and cfg.critic.model.path != path:
        yield from check_directory(cfg, "critic.model.path", ctx)
    # Composed here already: its mistakes would otherwise show only after the tasks were made.
    if cfg.cold_start.enable and path is not None:
        yield from _cold_start_problems(cfg, ctx)


def check_reward_model(cfg: PPOConfig, ctx: Context) -> Problems:
    """A reward model that is named is run, and one that is run is named; nothing reads rewards
    without its scores.
    """
    section = cfg.reward_model
    key = "reward_model.model.path"
    if not section.enable:
        for name, value in (("model.path", None), ("weight", 1.0), ("rule_weight", 1.0)):
            if lookup(section, name) != value:
                why = "no reward model is run"
                fix = f"reward_model.enable=true, or leave reward_model.{name} out"
                yield problem(cfg, f"reward_model.{name}", why, f"{value}", fix)
        return
    if section.model.path is None:
        yield problem(
            cfg, key, "no reward model is named", "a directory or a hub name", f"{key}=DIR"
        )
    yield from check_directory(cfg, key, ctx)
    yield from _unscored_by_model(cfg, ctx)


def _unscored_by_model(cfg: PPOConfig, ctx: Context) -> Problems:
    """Estimators that read rewards in which a reward model has no part."""
    key, fix = "algorithm.adv_estimator", "algorithm.adv_estimator=rloo"
    if compares_with_greedy_play(cfg, ctx):
        why = "greedy plays are not scored by the reward model, and would be no baseline"
        yield problem(cfg, key, why, "another estimator", fix)
    if cfg.algorithm.adv_estimator == "gdpo":
        why = "gdpo reads the rewards of gdpo_reward_keys and no other: not the reward model's"
        fix = f"{fix}, or reward_model.enable=false"
        yield problem(cfg, key, why, "another estimator beside a reward model", fix)


def _cold_start_problems(cfg: PPOConfig, ctx: Context) -> Problems:
    try:
        sft = cold_start_config(cfg)
    except ConfigError as error:
        yield from (f"cold start: {found}" for found in error.problems)
    else:
        yield from (f"cold start: {found}" for found in check_sft(sft, ctx))


def check_estimator(cfg: PPOConfig, _ctx: Context) -> Problems:
    """The estimator has the group and the critic it needs."""
    name = cfg.algorithm.adv_estimator
    n = cfg.env.rollout.n
    if name == "gae" and not cfg.critic.enable:
        yield problem(
            cfg, "critic.enable", "gae needs values", "true or null", "leave critic.enable unset"
        )
    # A group of one is its own mean: every advantage would be 0, and training would go on.
    if ESTIMATORS.get(name) and n < 2:
        fix = "env.rollout.n=8, or an estimator without groups: gae, reinforce_plus_plus"
        if name not in {*AdvantageEstimator}:
            fix = "env.rollout.n=8, or register_adv_est(..., compares_group=False)"
        yield problem(
            cfg, "env.rollout.n", f"{name} compares the plays of one task", "2 or more", fix
        )
    judge = scored_later(cfg)
    if cfg.algorithm.filter_groups.enable and judge:
        why = f"groups are filtered by what environments pay, before {judge} scores plays"
        filtered = "algorithm.filter_groups.enable"
        yield problem(cfg, filtered, why, "false", f"{filtered}=false")
    # One play does not differ from itself: every group would be dropped.
    if cfg.algorithm.filter_groups.enable and n < 2:
        why = "filter_groups.enable keeps groups whose returns differ"
        yield problem(cfg, "env.rollout.n", why, "2 or more", "env.rollout.n=8")
    if cfg.trainer.critic_warmup > 0 and not cfg.critic.enable:
        why = f"{name} trains no critic, so nothing would be updated"
        yield problem(cfg, "trainer.critic_warmup", why, "0", "trainer.critic_warmup=0")
