"""Advantage estimators. Every function returns ``(advantages [B, R], returns [B, R])`` in float32.

Token-level estimators (GAE, REINFORCE++, ReMax) treat one row as one sequence of sampled tokens.
They skip positions where ``response_mask`` is 0. A reward at such a position counts for the sampled
token before it. Outcome estimators compare whole trajectories within groups. ``index`` holds the
group id and ``traj_index`` the trajectory id of each row. All sampled tokens of a trajectory get
the same advantage. ``grpo_passk`` and ``gdpo`` are variants of GRPO.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl.algos.algorithm_registry import register_adv_est
from verl.algos.groups import (
    Trajectories,
    compute_group_stats,
    group_normalised_scores,
    merge_rows_to_trajectories,
)
from verl.algos.shapes import Ids, PerRow, PerToken, PerTrajectory, TokenMask, TrajectoryIndex
from verl.utils.torch_functional import masked_whiten

# Arguments of outcome estimators and the batch keys that they read. ``?`` marks an optional key.
OUTCOME_INPUTS = {
    "token_level_rewards": "token_level_rewards",
    "response_mask": "response_mask",
    "index": "uid",
    "traj_index": "traj_uid?",
}


def spread(per_row: PerRow, response_mask: TokenMask) -> PerToken:
    """Broadcast ``per_row [B]`` to the sampled tokens: ``[B, R]`` float32, 0 on other tokens."""
    return per_row.float().unsqueeze(-1) * response_mask.float()


def _broadcast_to_rows(
    advantages: PerTrajectory, trajectories: Trajectories, response_mask: TokenMask
) -> tuple[PerToken, PerToken]:
    """Broadcast ``advantages [T]`` to the sampled tokens. Return them twice: also as returns."""
    row_advantages = advantages[trajectories.trajectory_of_row].to(response_mask.device)
    token_advantages = spread(row_advantages, response_mask)
    return token_advantages, token_advantages


def _move_rewards_to_sampled_tokens(
    token_level_rewards: PerToken, response_mask: TokenMask
) -> PerToken:
    """Return float64 rewards ``[B, R]`` with the rewards of unsampled positions moved.

    Such a reward is added to the last sampled token before it, or else to the first sampled token.
    """
    mask = response_mask.bool()
    columns = torch.arange(mask.shape[-1], device=mask.device).expand_as(mask)
    # The running maximum of sampled columns is the last sampled column so far. It is -1 before the
    # first sampled column.
    target_columns = torch.where(mask, columns, -1).cummax(-1).values
    first_columns = torch.where(mask.any(-1), mask.long().argmax(-1), 0)
    target_columns = torch.where(target_columns < 0, first_columns.unsqueeze(-1), target_columns)
    rewards = token_level_rewards.double()
    return torch.zeros_like(rewards).scatter_add(-1, target_columns, rewards)


@register_adv_est("gae", params={"gamma": "algorithm.gamma", "lam": "algorithm.lam"})
def compute_gae_advantage_return(
    token_level_rewards: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    gamma: float,
    lam: float,
) -> tuple[PerToken, PerToken]:
    """Compute generalised advantage estimates (Schulman et al., 2016) over the sampled tokens.

    ``values [B, R]`` is the critic's estimate before each token. The advantages are whitened. The
    returns are the unwhitened advantages plus ``values``.

    >>> rewards, values = torch.tensor([[0.0, 1.0]]), torch.tensor([[0.5, 0.5]])
    >>> # Before the whitening: 1 - 0.5 = 0.5, and 0.9 * 0.5 - 0.5 + 0.9 * 0.5 * 0.5 = 0.175.
    >>> compute_gae_advantage_return(rewards, values, torch.ones(1, 2), gamma=0.9, lam=0.5)
    (tensor([[-0.7071,  0.7071]]), tensor([[0.6750, 1.0000]]))
    """
    rewards = _move_rewards_to_sampled_tokens(token_level_rewards, response_mask)
    is_sampled = response_mask.bool()
    values = torch.where(is_sampled, values.double(), 0.0)
    advantages = torch.zeros_like(values)
    next_value = torch.zeros_like(values[:, 0])
    gae_sum = torch.zeros_like(next_value)
    for t in reversed(range(values.shape[1])):
        # An unsampled position is not a time step, so the running sums keep their values.
        delta = rewards[:, t] + gamma * next_value - values[:, t]
        gae_sum = torch.where(is_sampled[:, t], delta + gamma * lam * gae_sum, gae_sum)
        next_value = torch.where(is_sampled[:, t], values[:, t], next_value)
        advantages[:, t] = gae_sum
    returns = torch.where(is_sampled, advantages + values, 0.0)
    return masked_whiten(advantages, is_sampled).float(), returns.float()


@register_adv_est("reinforce_plus_plus", params={"gamma": "algorithm.gamma"})
def compute_reinforce_plus_plus_outcome_advantage(
    token_level_rewards: PerToken, response_mask: TokenMask, gamma: float = 1.0
) -> tuple[PerToken, PerToken]:
    """Compute REINFORCE++ advantages (Hu, 2025): discounted returns whitened over all tokens.

    >>> rewards = torch.tensor([[0.0, 0.0, 1.0]])
    >>> compute_reinforce_plus_plus_outcome_advantage(rewards, torch.ones(1, 3), gamma=0.5)
    (tensor([[-0.8729, -0.2182,  1.0911]]), tensor([[0.2500, 0.5000, 1.0000]]))
    """
    rewards = _move_rewards_to_sampled_tokens(token_level_rewards, response_mask)
    is_sampled = response_mask.bool()
    returns = torch.zeros_like(rewards)
    return_sum = torch.zeros_like(rewards[:, 0])
    for t in reversed(range(rewards.shape[1])):
        # An unsampled position is not a time step: it neither discounts nor changes the sum.
        return_sum = torch.where(is_sampled[:, t], rewards[:, t] + gamma * return_sum, return_sum)
        returns[:, t] = return_sum
    returns = torch.where(is_sampled, returns, 0.0)
    return masked_whiten(returns, is_sampled).float(), returns.float()


@register_adv_est("remax")
def compute_remax_outcome_advantage(
    token_level_rewards: PerToken, reward_baselines: PerRow, response_mask: TokenMask
) -> tuple[PerToken, PerToken]:
    """Compute ReMax advantages (Li et al., 2024): reward to go minus ``reward_baselines [B]``.

    A baseline is the return of a greedy trajectory of the same task.
    """
    rewards = _move_rewards_to_sampled_tokens(token_level_rewards, response_mask)
    rewards_to_go = rewards.flip(-1).cumsum(-1).flip(-1)
    returns = torch.where(response_mask.bool(), rewards_to_go, 0.0).float()
    return returns - spread(reward_baselines.to(returns.device), response_mask), returns


@register_adv_est(
    "grpo",
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
    """Compute GRPO advantages (Shao et al., 2024): ``(r - mean) / (std + epsilon)`` per group.

    r is the return of a trajectory, std the sample standard deviation of its group.
    ``norm_adv_by_std_in_grpo=False`` omits the division (Dr.GRPO). In a group of one trajectory,
    mean is 0 and std is 1.

    >>> rewards = torch.tensor([[1.0], [0.0], [0.0], [1.0]])  # one token per trajectory
    >>> compute_grpo_outcome_advantage(rewards, torch.ones(4, 1), index=[7, 7, 7, 7])[0].flatten()
    tensor([ 0.8660, -0.8660, -0.8660,  0.8660])
    """
    scores = token_level_rewards.double().sum(-1)
    advantages = group_normalised_scores(
        scores, index, traj_index, norm_adv_by_std_in_grpo, epsilon
    )
    token_advantages = spread(advantages, response_mask)
    return token_advantages, token_advantages


@register_adv_est("rloo")
def compute_rloo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """Compute RLOO advantages (Ahmadian et al., 2024): return minus the mean of the other members.

    In a group of one, the advantage is the return.

    >>> rewards = torch.tensor([[3.0], [1.0], [2.0]])  # means of the others: 1.5, 2.5, 2
    >>> compute_rloo_outcome_advantage(rewards, torch.ones(3, 1), index=[7, 7, 7])[0].flatten()
    tensor([ 1.5000, -1.5000,  0.0000])
    """
    trajectories = merge_rows_to_trajectories(
        token_level_rewards.double().sum(-1), index, traj_index
    )
    stats = compute_group_stats(trajectories.score, trajectories.group)
    # Equal to r_i - (n mean - r_i) / (n - 1), the return minus the mean of the other members.
    leave_one_out = (trajectories.score - stats.mean) * stats.count / (stats.count - 1).clamp(min=1)
    advantages = torch.where(stats.count > 1, leave_one_out, trajectories.score)
    return _broadcast_to_rows(advantages, trajectories, response_mask)


@register_adv_est("reinforce_plus_plus_baseline")
def compute_reinforce_plus_plus_baseline_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """Compute REINFORCE++-baseline advantages: return minus group mean, whitened over tokens."""
    scores = token_level_rewards.double().sum(-1)
    advantages = group_normalised_scores(scores, index, traj_index, by_std=False)
    token_advantages = spread(advantages, response_mask).double()
    whitened_advantages = masked_whiten(token_advantages, response_mask).float()
    return whitened_advantages, whitened_advantages


@register_adv_est("opo")
def compute_opo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
) -> tuple[PerToken, PerToken]:
    """Compute OPO advantages (Hao et al., 2025): return minus the token-weighted group mean.

    In a group of one trajectory, the advantage is the return.

    >>> rewards = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.0, 0.0]])
    >>> mask = torch.tensor([[1, 0, 0], [1, 1, 1]])  # weighted mean: (1 * 1 + 3 * 0) / 4 = 0.25
    >>> compute_opo_outcome_advantage(rewards, mask, index=[7, 7])[0].tolist()
    [[0.75, 0.0, 0.0], [-0.25, -0.25, -0.25]]
    """
    scores = token_level_rewards.double().sum(-1)
    trajectories = merge_rows_to_trajectories(scores, index, traj_index, response_mask.sum(-1))
    group = trajectories.group
    stats = compute_group_stats(trajectories.score, group)
    centred_returns = trajectories.score - stats.mean  # exactly 0 in a group of equal returns
    group_zeros = torch.zeros_like(centred_returns)
    token_weighted_sum = group_zeros.index_add(0, group, trajectories.tokens * centred_returns)[
        group
    ]
    group_tokens = group_zeros.index_add(0, group, trajectories.tokens)[group]
    minus_weighted_mean = centred_returns - token_weighted_sum / group_tokens.clamp(min=1)
    advantages = torch.where(stats.count > 1, minus_weighted_mean, trajectories.score)
    return _broadcast_to_rows(advantages, trajectories, response_mask)


@register_adv_est("gpg")
def compute_gpg_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
    f_norm: float = 1.0,
) -> tuple[PerToken, PerToken]:
    """Compute GPG advantages (Chu et al., 2025): ``alpha (r - group mean) / f_norm``.

    r is the return of a trajectory. alpha is the number of trajectories in the batch divided by the
    number of those whose return is not 0, as in verl. The paper counts the trajectories of groups
    with differing returns instead.

    >>> rewards = torch.tensor([[0.0], [0.0], [3.0]])  # alpha = 3 / 1
    >>> compute_gpg_outcome_advantage(rewards, torch.ones(3, 1), index=[7, 7, 7])[0].flatten()
    tensor([-3., -3.,  6.])
    """
    trajectories = merge_rows_to_trajectories(
        token_level_rewards.double().sum(-1), index, traj_index
    )
    # GPG regards trajectories with return 0 as uninformative; alpha compensates for their number.
    alpha = len(trajectories.score) / trajectories.score.count_nonzero().clamp(min=1)
    stats = compute_group_stats(trajectories.score, trajectories.group)
    centred_returns = trajectories.score - torch.where(stats.count > 1, stats.mean, 0.0)
    return _broadcast_to_rows(alpha * centred_returns / f_norm, trajectories, response_mask)


@register_adv_est(
    "grpo_passk",
    params={"norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo"},
)
def compute_grpo_passk_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Compute the advantage of the best trajectory of each group; all others get 0.

    It is the best return minus the second best: without this trajectory, the group's maximum would
    be lower by this amount. ``norm_adv_by_std_in_grpo`` divides by the group's sample standard
    deviation plus ``epsilon``. All advantages are 0 in a group of one, and if the two best returns
    are equal. Example: returns (3, 1, 0) give (2, 0, 0) before the division.
    """
    scores = token_level_rewards.double().sum(-1)
    trajectories = merge_rows_to_trajectories(scores, index, traj_index)
    best_margins = _compute_best_margin(trajectories.score, trajectories.group)
    if norm_adv_by_std_in_grpo:
        stats = compute_group_stats(trajectories.score, trajectories.group)
        best_margins = best_margins / (stats.std + epsilon)
    return _broadcast_to_rows(best_margins, trajectories, response_mask)


def _compute_best_margin(score: PerTrajectory, group: TrajectoryIndex) -> PerTrajectory:
    """Return the best score minus the second best for each group's best trajectory, else 0."""
    best_margins = torch.zeros_like(score)
    # Sort by group, then by score. The best trajectory of each group comes last in its group.
    score_order = score.argsort(stable=True)
    sorted_indices = score_order[group[score_order].argsort(stable=True)]
    sorted_groups = group[sorted_indices]
    for position in range(1, len(sorted_indices)):
        is_group_end = (
            position + 1 == len(sorted_indices)
            or sorted_groups[position + 1] != sorted_groups[position]
        )
        if is_group_end and sorted_groups[position - 1] == sorted_groups[position]:
            best_margins[sorted_indices[position]] = (
                score[sorted_indices[position]] - score[sorted_indices[position - 1]]
            )
    return best_margins


@register_adv_est(
    "gdpo",
    inputs={
        "response_mask": "response_mask",
        "index": "uid",
        "traj_index": "traj_uid?",
        "reward_parts": "reward_parts",
    },
    params={
        "keys": "algorithm.gdpo_reward_keys",
        "weights": "algorithm.gdpo_reward_weights",
        "norm_adv_by_std_in_grpo": "algorithm.norm_adv_by_std_in_grpo",
    },
)
def compute_gdpo_outcome_advantage(
    response_mask: TokenMask,
    index: Ids,
    reward_parts: Sequence[Mapping[str, float]] | np.ndarray,
    keys: Sequence[str],
    weights: Sequence[float] = (),
    traj_index: Ids | None = None,
    norm_adv_by_std_in_grpo: bool = True,
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Compute GDPO advantages: the whitened weighted sum of the GRPO advantages of several rewards.

    ``reward_parts [B]`` maps names to the rewards of each row's trajectory. ``keys`` are the names
    of the rewards to use, ``weights`` their weights (empty: 1 each). The whitening covers the
    trajectories of the batch. Raises ``ValueError`` for a key that a row lacks.

    >>> parts = [{"grade": 1, "speed": 0}, {"grade": 1, "speed": 100}, {"grade": 0, "speed": 50}]
    >>> # GRPO of grade: 0.58, 0.58, -1.15; of speed: -1, 1, 0. The sum has the std 1.41.
    >>> compute_gdpo_outcome_advantage(torch.ones(3, 1), [7, 7, 7], parts, ["grade", "speed"])[0].T
    tensor([[-0.2989,  1.1154, -0.8165]])
    """
    weighted_sum = torch.zeros(len(response_mask), dtype=torch.float64)
    for key, weight in zip(keys, weights or [1.0] * len(keys), strict=True):
        scores = _read_reward_column(reward_parts, key)
        by_std = norm_adv_by_std_in_grpo
        normalised_scores = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
        weighted_sum += weight * normalised_scores.double()
    trajectories = merge_rows_to_trajectories(weighted_sum, index, traj_index)
    batch_stats = compute_group_stats(trajectories.score, torch.zeros_like(trajectories.group))
    whitened_advantages = (trajectories.score - batch_stats.mean) / (batch_stats.std + epsilon)
    return _broadcast_to_rows(whitened_advantages, trajectories, response_mask)


def _read_reward_column(
    reward_parts: Sequence[Mapping[str, float]] | np.ndarray, key: str
) -> PerRow:
    for row, row_parts in enumerate(reward_parts):
        if key not in row_parts:
            present_keys = ", ".join(sorted(row_parts)) or "none"
            raise ValueError(
                f"algorithm.gdpo_reward_keys: row {row} has no reward {key!r}; "
                f"allowed: {present_keys}; "
                "fix: name one of these, or return the reward from the grader"
            )
    return torch.tensor([float(parts[key]) for parts in reward_parts], dtype=torch.float64)
