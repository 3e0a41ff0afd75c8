"""GRPO for pass@k (Tang et al., 2025, arXiv 2503.19595).

Only the best trajectory of a group gets an advantage.
"""

import torch

from verl.algos.advantages import OUTCOME_INPUTS, spread
from verl.algos.algorithm_registry import register_adv_est
from verl.algos.groups import compute_group_stats, merge_rows_to_trajectories
from verl.algos.shapes import Ids, PerToken, PerTrajectory, TokenMask, TrajectoryIndex


@register_adv_est(
    "grpo_passk",
    inputs=OUTCOME_INPUTS,
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
    """Give the best trajectory of a group its return minus the second best; 0 to the others.

    Without it, the maximum of the group would be lower by this difference.
    ``norm_adv_by_std_in_grpo`` divides by the group's sample standard deviation plus ``epsilon``.
    If the two best returns are equal, and in a
    group of one, all advantages are 0. Example: returns (3, 1, 0) give (2, 0, 0) before the
    division.
    """
    scores = token_level_rewards.double().sum(-1)
    trajectories = merge_rows_to_trajectories(scores, index, traj_index)
    leads = _compute_lead(trajectories.score, trajectories.group)
    if norm_adv_by_std_in_grpo:
        stats = compute_group_stats(trajectories.score, trajectories.group)
        leads = leads / (stats.std + epsilon)
    token_advantages = spread(leads[trajectories.of_row], response_mask)
    return token_advantages, token_advantages


def _compute_lead(score: PerTrajectory, group: TrajectoryIndex) -> PerTrajectory:
    """Return the best score minus the second best for each group's best trajectory, else 0."""
    lead = torch.zeros_like(score)
    # Sort by group, then by score: the best trajectory of each group is its last.
    by_score = score.argsort(stable=True)
    order = by_score[group[by_score].argsort(stable=True)]
    members = group[order]
    for position in range(1, len(order)):
        is_group_end = position + 1 == len(order) or members[position + 1] != members[position]
        if is_group_end and members[position - 1] == members[position]:
            lead[order[position]] = score[order[position]] - score[order[position - 1]]
    return lead
