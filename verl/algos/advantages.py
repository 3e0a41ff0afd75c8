"""Advantage estimators. Every function returns ``(advantages [B, R], returns [B, R])`` in float32.

Token-level estimators (GAE, REINFORCE++, ReMax) see one row as one sequence of sampled tokens:
positions where ``response_mask`` is 0 lie outside time, and a reward placed on one counts for the
sampled token before it. Outcome estimators compare whole trajectories within groups (``index``);
all sampled tokens of a trajectory share its advantage.
"""

import torch

from verl.algos.algorithm_registry import register_adv_est
from verl.algos.groups import group_mean_std, group_normalised_scores, trajectories_of
from verl.algos.shapes import Ids, PerRow, PerToken, TokenMask
from verl.utils.torch_functional import masked_whiten

OUTCOME_INPUTS = {
    "token_level_rewards": "token_level_rewards",
    "response_mask": "response_mask",
    "index": "uid",
    "traj_index": "traj_uid?",
}


def spread(per_row: PerRow, response_mask: TokenMask) -> PerToken:
    """Place ``per_row [B]`` on all sampled tokens: ``[B, R]`` float32."""
    return per_row.float().unsqueeze(-1) * response_mask.float()


def _rewards_on_sampled_tokens(token_level_rewards: PerToken, response_mask: TokenMask) -> PerToken:
    """``[B, R]`` float64 rewards with those of unsampled positions moved to the last sampled token
    before them.
    """
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    # The running maximum of sampled columns is the last sampled one so far; -1 before the first,
    # where the reward moves forward to the first instead.
    target = torch.where(mask, columns, -1).cummax(-1).values
    first = torch.where(mask.any(-1), mask.long().argmax(-1), 0)
    target = torch.where(target < 0, first.unsqueeze(-1), target)
    rewards = token_level_rewards.double()
    return torch.zeros_like(rewards).scatter_add(-1, target, rewards)


@register_adv_est("gae", params={"gamma": "algorithm.gamma", "lam": "algorithm.lam"})
def compute_gae_advantage_return(
    token_level_rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    gamma: float,
    lam: float,
) -> tuple[PerToken, PerToken]:
    """Generalised advantage estimation over sampled tokens (Schulman et al., 2016), advantages
    whitened.

    ``values [B, R]`` is the critic's estimate before each token. Returns are unwhitened advantages
    plus values.
    """
    rewards = _rewards_on_sampled_tokens(token_level_rewards, response_mask)
    sampled = response_mask.bool()
    values = torch.where(sampled, values.double(), 0.0)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    running = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        # At a position that was not sampled time stands still: the running sums pass through.
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        running = torch.where(sampled[:, t], delta + gamma * lam * running, running)
        next_value = torch.where(sampled[:, t], values[:, t], next_value)
        advantages[:, t] = running
    returns = torch.where(sampled, advantages + values, 0.0)
    return masked_whiten(advantages, sampled).float(), returns.float()


@register_adv_est("reinforce_plus_plus", params={"gamma": "algorithm.gamma"})
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: PerToken, response_mask: TokenMask, gamma: float = 1.0
) -> tuple[PerToken, PerToken]:
    """REINFORCE++ (Hu, 2025): discounted returns of every token, whitened over the batch."""
    rewards = _rewards_on_sampled_tokens(token_level_rewards, response_mask)
    sampled = response_mask.bool()
    returns = torch.zeros_like(rewards)
    running = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        # As in GAE, time stands still between sampled tokens.
        running = torch.where(sampled[:, t], rewards[:, t] + gamma * running, running)
        returns[:, t] = running
    returns = torch.where(sampled, returns, 0.0)
    return masked_whiten(returns, sampled).float(), returns.float()


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: PerToken, reward_baselines: PerRow, response_mask: TokenMask
) -> tuple[PerToken, PerToken]:
    """ReMax (Li et al., 2024): reward to go minus the return ``reward_baselines [B]`` of a greedy
    rollout.
    """
    rewards = _rewards_on_sampled_tokens(token_level_rewards, response_mask)
    to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    returns = torch.where(response_mask.bool(), to_go, 0.0).float()
    return returns - spread(reward_baselines.to(returns.device), response_mask), returns


@register_adv_est(
    "grpo",
    inputs=OUTCOME_INPUTS,
    params={"norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo"},
)
def compute_grpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    epsilon: float = 1e-6,
    norm_adv_by_std_in_grpo: bool = True,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """GRPO (Shao et al., 2024): return minus the group's mean, over its sample standard deviation +
    ``epsilon``.

    ``norm_adv_by_std_in_grpo=False`` leaves the division out (Dr.GRPO). A group of one keeps its
    return.
    """
    scores = token_level_rewards.double().sum(-1)
    advantages = group_normalised_scores(
        scores, index, traj_index, norm_adv_by_std_in_grpo, epsilon
    )
    placed = spread(advantages, response_mask)
    return placed, placed


@register_adv_est("rloo", inputs=OUTCOME_INPUTS)
def compute_rloo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """RLOO (Ahmadian et al., 2024): return minus the mean of the others, n/(n-1) (r - mean); alone:
    the return.
    """
    trajectories = trajectories_of(token_level_rewards.double().sum(-1), index, traj_index)
    stats = group_mean_std(trajectories.score, trajectories.group)
    # r_i - (n mean - r_i) / (n - 1)
    leave_one_out = (trajectories.score - stats.mean) * stats.count / (stats.count - 1).clamp(min=1)
    advantages = torch.where(stats.count > 1, leave_one_out, trajectories.score)
    placed = spread(advantages[trajectories.of_row], response_mask)
    return placed, placed


@register_adv_est("reinforce_plus_plus_baseline", inputs=OUTCOME_INPUTS)
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """REINFORCE++-baseline: return minus the group's mean, then whitened over all sampled tokens of
    the batch.
    """
    scores = token_level_rewards.double().sum(-1)
    advantages = group_normalised_scores(scores, index, traj_index, by_std=False)
    centred = spread(advantages, response_mask)
    whitened = masked_whiten(centred, response_mask)
    return whitened, whitened


@register_adv_est("opo", inputs=OUTCOME_INPUTS)
def compute_opo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """OPO (Hao et al., 2025): return minus the token-weighted mean return of the group; alone: the
    return.
    """
    scores = token_level_rewards.double().sum(-1)
    trajectories = trajectories_of(scores, index, traj_index, response_mask.sum(-1))
    group = trajectories.group
    stats = group_mean_std(trajectories.score, group)
    centred = trajectories.score - stats.mean  # a group of equal returns is exactly 0 from here on
    zeros = torch.zeros_like(centred)
    weighted = zeros.index_add(0, group, trajectories.tokens * centred)[group]
    tokens = zeros.index_add(0, group, trajectories.tokens)[group]
    from_baseline = centred - weighted / tokens.clamp(min=1)
    advantages = torch.where(stats.count > 1, from_baseline, trajectories.score)
    placed = spread(advantages[trajectories.of_row], response_mask)
    return placed, placed


@register_adv_est("gpg", inputs=OUTCOME_INPUTS)
def compute_gpg_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
    f_norm: float = 1.0,
) -> tuple[PerToken, PerToken]:
    """GPG (Chu et al., 2025): ``alpha (r - group mean) / f_norm``, alpha = trajectories / those of
    return != 0.
    """
    trajectories = trajectories_of(token_level_rewards.double().sum(-1), index, traj_index)
    # Trajectories of return 0 are taken to teach nothing; alpha gives their share to the others.
    alpha = len(trajectories.score) / trajectories.score.count_nonzero().clamp(min=1)
    stats = group_mean_std(trajectories.score, trajectories.group)
    centred = trajectories.score - torch.where(stats.count > 1, stats.mean, 0.0)
    placed = spread((alpha * centred / f_norm)[trajectories.of_row], response_mask)
    return placed, placed
