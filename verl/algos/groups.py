"""Statistics of groups of trajectories. A trajectory counts once, for any number of its rows.

Sums are float64, so that the order of the rows does not change float32 results.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.algos.shapes import (
    ElementIndex,
    Ids,
    PerElement,
    PerRow,
    PerTrajectory,
    RowIndex,
    TrajectoryIndex,
)

# All rows of a trajectory must have the same score. Relative differences up to this one count as
# rounding, because scores are float32 sums.
SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Mean, sample standard deviation (0 in a group of one) and size of each element's group."""

    mean: PerElement
    std: PerElement
    count: PerElement


@dataclass(frozen=True, slots=True)
class Trajectories:
    """Table of the T trajectories to which the B rows of a batch belong.

    ``trajectory_of_row [B]`` is the trajectory of each row. ``score [T]`` is the return, ``group
    [T]`` the group number, ``tokens [T]`` the token count.
    """

    score: PerTrajectory
    group: TrajectoryIndex
    tokens: PerTrajectory
    trajectory_of_row: RowIndex


def factorize_keys(keys: Ids) -> RowIndex:
    """Number distinct ``keys`` by first appearance, int64 [B]: ("b", "a", "b") gives (0, 1, 0)."""
    number_by_key: dict[Hashable, int] = {}
    numbers = [number_by_key.setdefault(key, len(number_by_key)) for key in _as_list(keys)]
    return torch.tensor(numbers, dtype=torch.long)


def compute_group_stats(values: PerElement, group_index: ElementIndex) -> GroupStats:
    """Compute mean, sample standard deviation and size of each element's group.

    ``group_index [N]`` (int64, 0..G-1) is the group of each of ``values [N]``. In a group of equal
    values, the mean is exactly this value and std is 0. All results are ``[N]`` float64.
    """
    values = values.double()
    group_index = group_index.to(values.device)
    num_groups = int(group_index.max()) + 1 if group_index.numel() else 0
    group_zeros = values.new_zeros(num_groups)
    count = group_zeros.index_add(0, group_index, torch.ones_like(values))
    # Sum the differences from the smallest member, which are exactly 0 in a group of equal values.
    group_minima = group_zeros.scatter_reduce(0, group_index, values, "amin", include_self=False)
    excess_sums = group_zeros.index_add(0, group_index, values - group_minima[group_index])
    mean = group_minima + excess_sums / count.clamp(min=1)
    squared_sums = group_zeros.index_add(0, group_index, (values - mean[group_index]) ** 2)
    std = (squared_sums / (count - 1).clamp(min=1)).sqrt()
    return GroupStats(mean[group_index], std[group_index], count[group_index])


def merge_rows_to_trajectories(
    scores: PerRow, index: Ids, traj_index: Ids | None = None, row_tokens: PerRow | None = None
) -> Trajectories:
    """Return the score, group and token count of each trajectory, computed from its rows.

    ``scores [B]`` is the return of the row's trajectory. ``index [B]`` is the group id.
    ``traj_index [B]`` is the trajectory id (None: each row is a trajectory). ``row_tokens [B]`` are
    summed. Raises ``ValueError`` for unequal lengths and for a trajectory whose rows have different
    scores.
    """
    group_keys = _as_list(index)
    traj_keys: Sequence[Hashable] = range(len(group_keys))
    if traj_index is not None:
        traj_keys = _as_list(traj_index)
    if not len(scores) == len(group_keys) == len(traj_keys):
        raise ValueError(
            f"one group id and one trajectory id per row needed: {len(scores)} rows, "
            f"{len(group_keys)} group ids and {len(traj_keys)} trajectory ids"
        )
    device = scores.device
    # Number pairs of group and trajectory, because trajectory ids are unique only within a group.
    row_group = factorize_keys(group_keys).to(device)
    trajectory_of_row = factorize_keys(zip(group_keys, traj_keys, strict=True)).to(device)
    num_trajectories = int(trajectory_of_row.max()) + 1 if trajectory_of_row.numel() else 0
    group = torch.zeros(num_trajectories, dtype=torch.long, device=device).scatter(
        0, trajectory_of_row, row_group
    )
    trajectory_zeros = torch.zeros(num_trajectories, dtype=torch.float64, device=device)
    tokens = (
        trajectory_zeros
        if row_tokens is None
        else trajectory_zeros.index_add(0, trajectory_of_row, row_tokens.double())
    )
    row_counts = trajectory_zeros.index_add(
        0, trajectory_of_row, torch.ones_like(trajectory_of_row, dtype=torch.float64)
    )
    # Sum differences, as in compute_group_stats, so that the mean of equal scores is exact.
    lowest_scores = trajectory_zeros.scatter_reduce(
        0, trajectory_of_row, scores.double(), "amin", include_self=False
    )
    excess_sums = trajectory_zeros.index_add(
        0, trajectory_of_row, scores.double() - lowest_scores[trajectory_of_row]
    )
    _require_equal_scores(
        scores.double() - lowest_scores[trajectory_of_row], scores.double(), traj_keys
    )
    return Trajectories(
        lowest_scores + excess_sums / row_counts.clamp(min=1),
        group,
        tokens,
        trajectory_of_row,
    )


def _require_equal_scores(
    excess_over_lowest: PerRow, scores: PerRow, traj_keys: Sequence[Hashable]
) -> None:
    """Raise ``ValueError`` if the scores of a trajectory's rows differ by more than rounding.

    ``excess_over_lowest [B]`` is each score minus the lowest score of its trajectory.
    """
    differing_rows = (excess_over_lowest > SCORE_TOLERANCE * scores.abs().clamp(min=1)).nonzero()
    if len(differing_rows):
        row = int(differing_rows[0])
        lowest_score = scores[row] - excess_over_lowest[row]
        raise ValueError(
            f"rows of trajectory {traj_keys[row]!r} have different rewards: {lowest_score:g} and "
            f"{scores[row]:g} (row {row}). Every row must have the return of its whole "
            "trajectory; fix: put the rewards of single steps into step_rewards"
        )


def group_normalised_scores(
    scores: PerRow,
    index: Ids,
    traj_index: Ids | None = None,
    by_std: bool = True,
    epsilon: float = 1e-6,
) -> PerRow:
    """Return the trajectory's score minus its group's mean for each row, float32 ``[B]``.

    ``by_std`` also divides by the sample standard deviation plus ``epsilon``. In a group of one
    trajectory, mean is 0 and std is 1, as in GRPO. A group of equal scores gets exactly 0.
    Example: scores (1, 0, 0, 1) of one group give (0.866, -0.866, -0.866, 0.866).
    """
    trajectories = merge_rows_to_trajectories(scores, index, traj_index)
    stats = compute_group_stats(trajectories.score, trajectories.group)
    has_several_members = stats.count > 1
    centred_scores = trajectories.score - torch.where(has_several_members, stats.mean, 0.0)
    if by_std:
        centred_scores = centred_scores / (
            torch.where(has_several_members, stats.std, 1.0) + epsilon
        )
    return centred_scores[trajectories.trajectory_of_row].float()


def compute_row_shares(traj_index: Ids, mode: str, row_tokens: PerRow) -> PerRow:
    """Return the weight of each row in its sequence for ``agg_loss``, float32 ``[B]``.

    With mode ``row`` every row is a sequence of weight 1. With ``trajectory`` the rows of a
    trajectory form one sequence. The weight of a row is its share of the sampled tokens
    ``row_tokens [B]`` of the trajectory. The loss then does not depend on the split into rows. Only
    the ``seq-mean`` modes use the weights. Example: rows of 30 and 10 tokens get 0.75 and 0.25.
    """
    sampled_tokens = row_tokens.double().cpu()
    if mode == "row":
        return torch.ones_like(sampled_tokens).float()
    trajectory_of_row = factorize_keys(traj_index)
    trajectory_tokens = torch.zeros_like(sampled_tokens).index_add(
        0, trajectory_of_row, sampled_tokens
    )[trajectory_of_row]
    # The clamp avoids 0 / 0 for a trajectory without sampled tokens: its rows get weight 0.
    return (sampled_tokens / trajectory_tokens.clamp(min=1)).float()


def _as_list(keys: Ids) -> list[Hashable]:
    return keys.tolist() if isinstance(keys, Tensor | np.ndarray) else list(keys)
