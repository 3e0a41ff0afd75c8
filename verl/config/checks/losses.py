"""Checks of losses: clip ranges, parameters of losses, optimisers and rollout correction."""

from verl.config.derive import ACTOR_SECTION
from verl.config.problems import CheckContext, Problems, build_conflict, build_problem
from verl.config.registered_names import estimator_uses_greedy_baseline
from verl.config.schema import PPOConfig
from verl.config.settings import value_at_path


def check_losses(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check clip ranges, loss parameters and ``checkpoint.contents``."""
    actor = cfg.actor_rollout_ref.actor
    # The lower clip bound is 1 - clip_ratio_low. Ratios are positive, so a bound <= 0 never clips.
    if actor.clip_ratio_low >= 1:
        key = f"{ACTOR_SECTION}.clip_ratio_low"
        why = (
            "probability ratios are above 0, so a lower bound 1 - clip_ratio_low <= 0 clips nothing"
        )
        yield build_problem(cfg, key, why, "less than 1", "0.2 is usual", "out_of_range")
    loss_config = actor.policy_loss
    if loss_config.loss_mode == "clip_cov" and loss_config.clip_cov_lb > loss_config.clip_cov_ub:
        key = f"{ACTOR_SECTION}.policy_loss.clip_cov_lb"
        why = "the lower bound of the covariance is above the upper bound"
        allowed = f"clip_cov_ub ({loss_config.clip_cov_ub:g}) or less"
        fix = f"{key}=1.0 {ACTOR_SECTION}.policy_loss.clip_cov_ub=5.0"
        yield build_conflict(cfg, key, why, allowed, fix)
    for section_path in (ACTOR_SECTION, "critic"):
        key = f"{section_path}.checkpoint.contents"
        checkpoint_contents = value_at_path(cfg, key)
        fix = f"{key}=[model,optimizer,extra]"
        if "model" not in checkpoint_contents:
            why = "a run could not be resumed"
            yield build_problem(cfg, key, why, "a list with model in it", fix, "out_of_range")
        elif section_path == "critic" and "hf_model" in checkpoint_contents:
            why = "a value model cannot be saved in Hugging Face format"
            yield build_problem(cfg, key, why, "model, optimizer, extra", fix, "out_of_range")


def check_rollout_correction(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check that a rollout correction has old log-probs and rollout log-probs to compare."""
    correction = cfg.algorithm.rollout_correction
    bypass_key = "algorithm.rollout_correction.bypass_mode"
    log_probs_fault = "text without token ids has no rollout log-probs (env.allow_retokenized)"
    for name in ("rollout_is", "rollout_rs"):
        key = f"algorithm.rollout_correction.{name}"
        if value_at_path(cfg, key) is None:
            continue
        if correction.bypass_mode:
            why = "bypass_mode=true computes no old log-probs to compare with"
            yield build_conflict(cfg, key, why, "null", f"{key}=null, or {bypass_key}=false")
        elif cfg.env.allow_retokenized:
            fix = f"{key}=null, or env.allow_retokenized=false"
            yield build_conflict(cfg, key, log_probs_fault, "null", fix)
    if correction.bypass_mode and cfg.env.allow_retokenized:
        yield build_conflict(cfg, bypass_key, log_probs_fault, "false", f"{bypass_key}=false")


def check_rollout_overlap(cfg: PPOConfig, ctx: CheckContext) -> Problems:
    """Check that rollouts that overlap with training have a rollout correction.

    Also check the keys of partial rollouts.
    """
    yield from _check_partial_rollouts(cfg)
    if cfg.trainer.rollout_overlap == "off":
        return
    key = "trainer.rollout_overlap"
    correction = cfg.algorithm.rollout_correction
    if estimator_uses_greedy_baseline(cfg, ctx):
        why = (
            "the estimator compares with greedy trajectories, which are scored in the trainer's "
            "thread"
        )
        yield build_conflict(cfg, key, why, "off", f"{key}=off")
    if cfg.env.allow_retokenized:
        why = "an older policy generates, and text without token ids has no rollout log-probs"
        fix = f"{key}=off, or env.allow_retokenized=false"
        yield build_conflict(cfg, key, why, "off with env.allow_retokenized", fix)
    elif not (correction.rollout_is or correction.rollout_rs or correction.bypass_mode):
        why = "an older policy generates without a correction (trainer.rollout_overlap)"
        name = "algorithm.rollout_correction.rollout_is"
        yield build_conflict(cfg, name, why, "token, sequence", f"{name}=token, or {key}=off")


def _check_partial_rollouts(cfg: PPOConfig) -> Problems:
    key = "env.rollout.carry_over"
    if not cfg.env.rollout.carry_over:
        return
    if cfg.trainer.rollout_overlap == "off":
        fix = f"{key}=0, or trainer.rollout_overlap=one_step"
        why = "no trajectories are generated while the policy is updated (trainer.rollout_overlap)"
        yield build_conflict(cfg, key, why, "0", fix)
    if cfg.env.rollout.carry_over > cfg.data.train_batch_size:
        allowed = f"data.train_batch_size ({cfg.data.train_batch_size}) or less"
        why = "exceeds the number of groups of a step"
        yield build_conflict(cfg, key, why, allowed, f"{key}=1")
    if cfg.algorithm.filter_groups.enable:
        why = "filter_groups.enable waits for all groups until enough of them are kept"
        yield build_conflict(cfg, key, why, "0", f"{key}=0")


def check_gdpo(cfg: PPOConfig, _ctx: CheckContext) -> Problems:
    """Check that GDPO has named rewards, and that no key adds a deduction that GDPO ignores.

    The estimator GDPO normalises each named reward in its group and sums the results.
    """
    algorithm = cfg.algorithm
    if algorithm.adv_estimator != "gdpo":
        return
    reward_keys = algorithm.gdpo_reward_keys
    reward_weights = algorithm.gdpo_reward_weights
    if not reward_keys:
        fix = "algorithm.gdpo_reward_keys=[accuracy,format], or reward_model.weights"
        allowed = "names of rewards that the function returns"
        why = "gdpo has no reward"
        yield build_problem(cfg, "algorithm.gdpo_reward_keys", why, allowed, fix, "missing_key")
    if reward_weights and len(reward_weights) != len(reward_keys):
        why = f"there are {len(reward_keys)} rewards"
        allowed = f"a list of {len(reward_keys)}, or []"
        fix = "one weight for each of gdpo_reward_keys"
        yield build_conflict(cfg, "algorithm.gdpo_reward_weights", why, allowed, fix)
    # GDPO would silently ignore the penalties and token costs that the following keys add.
    why = "gdpo reads only the rewards of gdpo_reward_keys"
    for key in ("algorithm.use_kl_in_reward", f"{ACTOR_SECTION}.use_invalid_action_penalty"):
        if value_at_path(cfg, key):
            yield build_problem(cfg, key, why, "false", f"{key}=false", "no_effect")
    for name in ("token_price", "relative_token_price", "overlong_len"):
        if cfg.reward_model.reward_kwargs.get(name):
            key = f"reward_model.reward_kwargs.{name}"
            yield build_problem(cfg, key, why, "0", f"{key}=0", "no_effect")
