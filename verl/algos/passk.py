"""GRPO for pass@k (Tang et al., 2025, arXiv 2503.19595): the best play of a group is all that
counts.
"""

import torch

from verl.algos.advantages import OUTCOME_INPUTS, spread
from verl.algos.algorithm_registry import register_adv_est
from verl.algos.groups import group_mean_std, trajectories_of
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
    """The best trajectory of a group gets its return less the second best's, the others 0.

    That is what it adds to the group's maximum. ``norm_adv_by_std_in_grpo`` divides by the group's
    sample standard deviation + ``epsilon``. Where the two best are equal, and in a group of one,
    nobody gets anything.
    """
    scores = token_level_rewards.double().sum(-1)
    trajectories = trajectories_of(scores, index, traj_index)
    ahead = _lead(trajectories.score, trajectories.group)
    if norm_adv_by_std_in_grpo:
        stats = group_mean_std(trajectories.score, trajectories.group)
        ahead = ahead / (stats.std + epsilon)
    placed = spread(ahead[trajectories.of_row], response_mask)
    return placed, placed


def _lead(score: PerTrajectory, group: TrajectoryIndex) -> PerTrajectory:
    """Of the best trajectory of each group its distance to the second, 0 for the others."""
    lead = torch.zeros_like(score)
    # Groups behind one another, the best of each at its end.
    by_score = score.argsort(stable=True)
    order = by_score[group[by_score].argsort(stable=True)]
    members = group[order]
    for place in range(1, len(order)):
        last = place + 1 == len(order) or members[place + 1] != members[place]
        if last and members[place - 1] == members[place]:
            lead[order[place]] = score[order[place]] - score[order[place - 1]]
    return lead
