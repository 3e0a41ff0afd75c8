"""GDPO (Liu et al., 2026, arXiv 2601.05242): each of several rewards is normalised in its group.

The normalised rewards are summed with their weights. If the sum were normalised instead, the reward
with the largest variance would dominate.
"""

from collections.abc import Mapping, Sequence

import numpy as np
import torch

from verl.algos.advantages import spread
from verl.algos.algorithm_registry import register_adv_est
from verl.algos.groups import (
    compute_group_stats,
    group_normalised_scores,
    merge_rows_to_trajectories,
)
from verl.algos.shapes import Ids, PerRow, PerToken, TokenMask


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
    """Compute the weighted sum of the GRPO advantages of every reward, then whiten it.

    ``reward_parts [B]`` holds the rewards of each row's trajectory by name. ``keys`` are the
    rewards to use and ``weights`` their weights (empty: 1 each). The whitening covers the
    trajectories of the batch. Raises ``ValueError`` for a key that a row lacks.
    """
    total = torch.zeros(len(response_mask), dtype=torch.float64)
    for key, weight in zip(keys, weights or [1.0] * len(keys), strict=True):
        scores = _read_reward_column(reward_parts, key)
        by_std = norm_adv_by_std_in_grpo
        normalised = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
        total += weight * normalised.double()
    trajectories = merge_rows_to_trajectories(total, index, traj_index)
    batch_stats = compute_group_stats(trajectories.score, torch.zeros_like(trajectories.group))
    whitened = (trajectories.score - batch_stats.mean) / (batch_stats.std + epsilon)
    token_advantages = spread(whitened[trajectories.of_row].to(response_mask.device), response_mask)
    return token_advantages, token_advantages


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
