"""User-provided module that registers an environment, an engine, an estimator and a policy loss."""

from agent_system.environments import register_env
from verl.algos import (
    OUTCOME_INPUTS,
    compute_grpo_outcome_advantage,
    compute_policy_loss_vanilla,
    register_adv_est,
    register_policy_loss,
)
from verl.workers.rollout import register_engine

register_env("my_line", "agent_system.environments.env_package.number_line.package:PACKAGE")
register_engine("my_engine", "verl.workers.rollout.hf:HFEngine")


@register_adv_est("my_estimator", inputs=OUTCOME_INPUTS | {"reference": "ref_log_prob"})
def my_estimator(token_level_rewards, response_mask, index, reference, traj_index=None):
    """Compute GRPO advantages; the reference policy's log-probs are required and not used."""
    assert reference.shape == response_mask.shape
    return compute_grpo_outcome_advantage(
        token_level_rewards, response_mask, index, traj_index=traj_index
    )


@register_policy_loss("my_loss")
def my_loss(*args, **kwargs):
    """Compute the vanilla policy loss."""
    return compute_policy_loss_vanilla(*args, **kwargs)
