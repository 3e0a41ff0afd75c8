"""Which rows make one optimizer step: whole trajectories, groups together, the same on one rank and
on many.
"""

import math
from collections.abc import Iterable

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.seeds import derive_seed
from verl.workers.collectives import gather_vectors, rank


def _numbers(values: Iterable[object]) -> torch.Tensor:
    # ranks have to agree on a trajectory's number, and only tensors travel between them
    return torch.tensor([derive_seed(str(value)) for value in values], dtype=torch.int64)


def mini_batches(
    data: DataProto, seed: int, tasks_per_step: int | None = None, num_steps: int | None = None
) -> list[list[int]]:
    """This rank's rows of every mini-batch; all ranks get equally many lists, some of which may be
    empty.

    Groups (``uid``) are put in a seeded random order, trajectories (``traj_uid``) of a group behind
    one another, and the sequence of trajectories is cut into parts that differ by at most one
    trajectory: ``num_steps`` of them, or, without it, one for each ``tasks_per_step`` groups.
    Neither the number of rows nor their distribution over ranks matters. Rows without these columns
    are trajectories and groups of their own.
    """
    columns = data.non_tensor_batch
    # With the rank: the third rows of two ranks are two trajectories.
    own = [f"rank {rank()} row {i}" for i in range(len(data))]
    traj = _numbers(columns.get("traj_uid", own))
    group = _numbers(columns["uid"]) if "uid" in columns else traj
    all_traj = gather_vectors(traj).numpy()
    all_group = gather_vectors(group).numpy()
    part_of = _parts(all_traj, all_group, seed, tasks_per_step, num_steps)
    count = 1 + max(part_of.values(), default=-1)
    parts: list[list[int]] = [[] for _ in range(count)]
    for row, number in enumerate(traj.tolist()):
        parts[part_of[number]].append(row)
    return parts


def _parts(
    traj: np.ndarray,
    group: np.ndarray,
    seed: int,
    tasks_per_step: int | None,
    num_steps: int | None,
) -> dict[int, int]:
    """Number of a trajectory -> number of its mini-batch."""
    group_of = dict(zip(traj.tolist(), group.tolist(), strict=True))
    groups = sorted(set(group_of.values()))
    order = np.random.default_rng(derive_seed("mini-batches", seed)).permutation(len(groups))
    rank_of = {groups[g]: position for position, g in enumerate(order.tolist())}
    # By number within a group: ranks hold the rows in orders of their own.
    sequence = sorted(group_of, key=lambda number: (rank_of[group_of[number]], number))
    by_tasks = math.ceil(len(groups) / tasks_per_step) if tasks_per_step else 1
    steps = num_steps or by_tasks
    # never more steps than trajectories: an optimizer step on nothing would be one too many
    steps = max(1, min(steps, len(sequence)))
    return {number: position * steps // len(sequence) for position, number in enumerate(sequence)}
