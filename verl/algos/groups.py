"""Statistics of groups of trajectories. A trajectory counts once, for any number of its rows.

Sums are float64, so that the order of the rows does not change float32 results.
"""

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from verl.algos.algorithm_registry import choose
from verl.algos.shapes import (
    ElementIndex,
    Ids,
    PerElement,
    PerRow,
    PerTrajectory,
    RowIndex,
    TrajectoryIndex,
)
from verl.names import ROW_WEIGHTS

# Relative tolerance for the rewards of the rows of one trajectory, which are float32 sums.
SCORE_TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Statistics of the group of each element, ``[N]``: mean, sample std (0 for one), size."""

    mean: PerElement
    std: PerElement
    count: PerElement


@dataclass(frozen=True, slots=True)
class Trajectories:
    """The T trajectories of B rows. ``of_row [B]`` is the trajectory number of each row.

    ``score [T]`` is the return, ``group [T]`` the group number, ``tokens [T]`` the token count.
    """

    score: PerTrajectory
    group: TrajectoryIndex
    tokens: PerTrajectory
    of_row: RowIndex


def number_keys(keys: Ids) -> RowIndex:
    """Number distinct ``keys`` 0, 1, 2, ... in order of first appearance, int64 ``[B]``.

    Example: ``("b", "a", "b")`` gives ``(0, 1, 0)``.
    """
    number_by_key: dict[Hashable, int] = {}
    numbers = [number_by_key.setdefault(key, len(number_by_key)) for key in _as_list(keys)]
    return torch.tensor(numbers, dtype=torch.long)


def compute_group_stats(values: PerElement, group_index: ElementIndex) -> GroupStats:
    """Compute mean, sample standard deviation and size of each element's group.

    ``group_index [N]`` (int64, 0..G-1) is the group of each of ``values [N]``. A group of equal
    values has exactly that mean and std 0. All results are ``[N]`` float64 on the device of
    ``values``.
    """
    values = values.double()
    group_index = group_index.to(values.device)
    size = int(group_index.max()) + 1 if group_index.numel() else 0
    zeros = values.new_zeros(size)
    count = zeros.index_add(0, group_index, torch.ones_like(values))
    # Sum differences from the smallest member: they are exactly 0 in a group of equal values.
    lowest = zeros.scatter_reduce(0, group_index, values, "amin", include_self=False)
    shifted = zeros.index_add(0, group_index, values - lowest[group_index])
    mean = lowest + shifted / count.clamp(min=1)
    squares = zeros.index_add(0, group_index, (values - mean[group_index]) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return GroupStats(mean[group_index], std[group_index], count[group_index])


def merge_rows_to_trajectories(
    scores: PerRow, index: Ids, traj_index: Ids | None = None, row_tokens: PerRow | None = None
) -> Trajectories:
    """Merge rows into trajectories.

    ``scores [B]`` is the return of the row's trajectory. The rows of a trajectory agree up to
    rounding, and the mean over them is its score. ``index [B]`` is the group id. ``traj_index [B]``
    is the trajectory id (None: each row is a trajectory). ``row_tokens [B]`` are summed. Raises
    ``ValueError`` for unequal lengths and for a trajectory whose rows have different scores.
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
    # Use pairs: a trajectory id is unique only within its group.
    row_group = number_keys(group_keys).to(device)
    of_row = number_keys(zip(group_keys, traj_keys, strict=True)).to(device)
    size = int(of_row.max()) + 1 if of_row.numel() else 0
    group = torch.zeros(size, dtype=torch.long, device=device).scatter(0, of_row, row_group)
    zeros = torch.zeros(size, dtype=torch.float64, device=device)
    tokens = zeros if row_tokens is None else zeros.index_add(0, of_row, row_tokens.double())
    rows = zeros.index_add(0, of_row, torch.ones_like(of_row, dtype=torch.float64))
    # As in compute_group_stats: the mean over equal rows is exactly their value.
    lowest = zeros.scatter_reduce(0, of_row, scores.double(), "amin", include_self=False)
    excess = zeros.index_add(0, of_row, scores.double() - lowest[of_row])
    _require_equal_scores(scores.double() - lowest[of_row], scores.double(), traj_keys)
    return Trajectories(lowest + excess / rows.clamp(min=1), group, tokens, of_row)


def _require_equal_scores(above: PerRow, scores: PerRow, names: Sequence[Hashable]) -> None:
    """Raise ``ValueError`` if a row's score exceeds its trajectory's lowest by more than rounding.

    ``above [B]`` is the difference to the lowest score.
    """
    differing_rows = (above > SCORE_TOLERANCE * scores.abs().clamp(min=1)).nonzero()
    if len(differing_rows):
        row = int(differing_rows[0])
        lowest_score = scores[row] - above[row]
        raise ValueError(
            f"rows of trajectory {names[row]!r} have different rewards: {lowest_score:g} and "
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
    several = stats.count > 1
    centred = trajectories.score - torch.where(several, stats.mean, 0.0)
    if by_std:
        centred = centred / (torch.where(several, stats.std, 1.0) + epsilon)
    return centred[trajectories.of_row].float()


def compute_row_shares(traj_index: Ids, mode: str, row_tokens: PerRow) -> PerRow:
    """Return the weight of each row in its sequence for ``agg_loss``, float32 ``[B]``.

    With mode ``row`` every row is a sequence of weight 1. With ``trajectory`` the rows of a
    trajectory form one sequence, and the weight is the row's part of its sampled tokens
    ``row_tokens [B]``. Then the split of an episode into rows does not change the loss. Only the
    ``seq-mean`` modes use the weights. Example: rows of 30 and 10 tokens get 0.75 and 0.25. Raises
    ``ValueError`` for an unknown mode.
    """
    choose(mode, ROW_WEIGHTS, "row weight (algorithm.row_weight)")
    tokens = row_tokens.double().cpu()
    if mode == "row":
        return torch.ones_like(tokens).float()
    trajectory_tokens = _sum_over_trajectory(tokens, number_keys(traj_index))
    # The rows of a trajectory without sampled tokens get weight 0.
    return (tokens / trajectory_tokens.clamp(min=1)).float()


def _sum_over_trajectory(values: PerRow, of_row: RowIndex) -> PerRow:
    """Return for every row the sum of ``values`` over all rows of its trajectory."""
    size = int(of_row.max()) + 1 if of_row.numel() else 0
    return values.new_zeros(size).index_add(0, of_row, values)[of_row]


def _as_list(keys: Ids) -> list[Hashable]:
    return keys.tolist() if isinstance(keys, Tensor | np.ndarray) else list(keys)
