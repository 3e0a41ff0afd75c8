"""Statistics of groups of trajectories, vectorised; every trajectory counts once however many rows
it has.

Sums run in float64, so that the order of the rows does not show in float32 results.
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

# Float32 sums of a penalty over an episode that was cut into rows in two ways differ by less.
ROUNDING = 1e-4


@dataclass(frozen=True, slots=True)
class GroupStats:
    """Per element: its group's mean, sample standard deviation (0 for one member) and number of
    members.
    """

    mean: PerElement
    std: PerElement
    count: PerElement


@dataclass(frozen=True, slots=True)
class Trajectories:
    """T trajectories made of B rows: ``score [T]``, ``group [T]``, ``tokens [T]`` and ``of_row
    [B]``.
    """

    score: PerTrajectory
    group: TrajectoryIndex
    tokens: PerTrajectory
    of_row: RowIndex


def factorize(keys: Ids) -> RowIndex:
    """``[B]`` int64: distinct ``keys`` numbered 0, 1, 2 in the order of their first appearance."""
    seen: dict[Hashable, int] = {}
    numbers = [seen.setdefault(key, len(seen)) for key in _as_list(keys)]
    return torch.tensor(numbers, dtype=torch.long)


def group_mean_std(values: PerElement, group_index: ElementIndex) -> GroupStats:
    """Mean, sample standard deviation and count of each element's group.

    ``values [N]`` and ``group_index [N]`` (int64, 0..G-1). Groups of equal values have exactly that
    mean and std 0. All results are ``[N]`` float64 on the device of ``values``.
    """
    values = values.double()
    group_index = group_index.to(values.device)
    size = int(group_index.max()) + 1 if group_index.numel() else 0
    zeros = values.new_zeros(size)
    count = zeros.index_add(0, group_index, torch.ones_like(values))
    # Sums of differences from the smallest member: a group of equal values then sums exact zeros.
    lowest = zeros.scatter_reduce(0, group_index, values, "amin", include_self=False)
    shifted = zeros.index_add(0, group_index, values - lowest[group_index])
    mean = lowest + shifted / count.clamp(min=1)
    squares = zeros.index_add(0, group_index, (values - mean[group_index]) ** 2)
    std = (squares / (count - 1).clamp(min=1)).sqrt()
    return GroupStats(mean[group_index], std[group_index], count[group_index])


def trajectories_of(
    scores: PerRow, index: Ids, traj_index: Ids | None = None, row_tokens: PerRow | None = None
) -> Trajectories:
    """Merge rows into trajectories.

    ``scores [B]``: outcome estimators are defined on the trajectory's return and every row of a
    trajectory carries it, so a trajectory's score is the mean over its rows, which differ by no
    more than rounding. ``index [B]`` names the group, ``traj_index [B]`` the trajectory (absent:
    each row is one); ``row_tokens [B]`` are summed. Raises ``ValueError`` on unequal lengths and
    for a trajectory whose rows disagree.
    """
    group_keys = _as_list(index)
    traj_keys: Sequence[Hashable] = range(len(group_keys))
    if traj_index is not None:
        traj_keys = _as_list(traj_index)
    if not len(scores) == len(group_keys) == len(traj_keys):
        raise ValueError(
            f"{len(scores)} rows, {len(group_keys)} group ids and {len(traj_keys)} trajectory ids"
        )
    device = scores.device
    # Pairs, because a trajectory's name need not be unique beyond its group.
    row_group = factorize(group_keys).to(device)
    of_row = factorize(zip(group_keys, traj_keys, strict=True)).to(device)
    size = int(of_row.max()) + 1 if of_row.numel() else 0
    group = torch.zeros(size, dtype=torch.long, device=device).scatter(0, of_row, row_group)
    zeros = torch.zeros(size, dtype=torch.float64, device=device)
    tokens = zeros if row_tokens is None else zeros.index_add(0, of_row, row_tokens.double())
    rows = zeros.index_add(0, of_row, torch.ones_like(of_row, dtype=torch.float64))
    # As in group_mean_std: the mean over equal rows is exactly their value.
    lowest = zeros.scatter_reduce(0, of_row, scores.double(), "amin", include_self=False)
    excess = zeros.index_add(0, of_row, scores.double() - lowest[of_row])
    _require_agreement(scores.double() - lowest[of_row], scores.double(), traj_keys)
    return Trajectories(lowest + excess / rows.clamp(min=1), group, tokens, of_row)


def _require_agreement(above: PerRow, scores: PerRow, names: Sequence[Hashable]) -> None:
    """Raise ``ValueError`` where a row's score is more than rounding above its trajectory's
    lowest.
    """
    odd = (above > ROUNDING * scores.abs().clamp(min=1)).nonzero()
    if len(odd):
        row = int(odd[0])
        other = scores[row] - above[row]
        raise ValueError(
            f"rows of trajectory {names[row]!r} have different rewards: {other:g} and "
            f"{scores[row]:g} (row {row}). Every row carries the return of its whole "
            "trajectory; rewards of single steps go to step_rewards"
        )


def group_normalised_scores(
    scores: PerRow,
    index: Ids,
    traj_index: Ids | None = None,
    by_std: bool = True,
    epsilon: float = 1e-6,
) -> PerRow:
    """``[B]`` trajectory score minus its group's mean, ``by_std`` also over (sample std +
    ``epsilon``), float32.

    GRPO's rule for a group of one trajectory: nothing to compare with, so mean 0 and std 1 are used
    and the score itself remains. A group of equal scores gets exactly 0.
    """
    trajectories = trajectories_of(scores, index, traj_index)
    stats = group_mean_std(trajectories.score, trajectories.group)
    several = stats.count > 1
    centred = trajectories.score - torch.where(several, stats.mean, 0.0)
    if by_std:
        centred = centred / (torch.where(several, stats.std, 1.0) + epsilon)
    return centred[trajectories.of_row].float()


def row_shares(traj_index: Ids, mode: str, row_tokens: PerRow) -> PerRow:
    """``[B]`` float32: the part of its sequence that a row is, for ``agg_loss``.

    What a sequence is decides only the ``seq-mean`` modes: with ``row`` every row is one and has
    the share 1; with ``trajectory`` the rows of an episode are one together, and each has the share
    ``row_tokens`` (its sampled tokens, ``[B]``) has in them, so that cutting an episode into rows
    changes no loss. Raises ``ValueError`` for an unknown mode.
    """
    choose(mode, ROW_WEIGHTS, "row weight (algorithm.row_weight)")
    tokens = row_tokens.double().cpu()
    if mode == "row":
        return torch.ones_like(tokens).float()
    whole = _total(tokens, factorize(traj_index))
    # A trajectory of which nothing was sampled has rows without share; they count for nothing.
    return (tokens / whole.clamp(min=1)).float()


def _total(values: PerRow, of_row: RowIndex) -> PerRow:
    """For every row the sum of ``values`` over its trajectory."""
    size = int(of_row.max()) + 1 if of_row.numel() else 0
    return values.new_zeros(size).index_add(0, of_row, values)[of_row]


def _as_list(keys: Ids) -> list[Hashable]:
    return keys.tolist() if isinstance(keys, Tensor | np.ndarray) else list(keys)
