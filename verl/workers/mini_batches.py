"""Split the rows of a batch into mini-batches (one per optimizer step) and forward passes.

The rows of a trajectory stay together and groups are contiguous. The split does not depend on the
number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np
import torch

from verl.protocol import DataProto
from verl.utils.seeds import derive_seed
from verl.workers.collectives import gather_vectors, get_rank, max_over_ranks
from verl.workers.engine import TrainEngine
from verl.workers.rows import MicroBatchLimits, micro_batches


def _hash_ids(values: Iterable[object]) -> torch.Tensor:
    # Hashed to integers, because ranks exchange only tensors. A hash is equal on all ranks.
    return torch.tensor([derive_seed(str(value)) for value in values], dtype=torch.int64)


def mini_batches(
    data: DataProto, seed: int, tasks_per_step: int | None = None, num_steps: int | None = None
) -> list[list[int]]:
    """Return the rows of this rank in every mini-batch.

    All ranks get the same number of lists; lists may be empty. Groups (``uid``) are shuffled by
    ``seed``, and the trajectories (``traj_uid``) of a group stay contiguous. This sequence of
    trajectories is cut into ``num_steps`` mini-batches whose sizes differ by at most one
    trajectory. Without ``num_steps`` there is one mini-batch per ``tasks_per_step`` groups.

    The split does not depend on the number of rows or on which rank has them. Without ``uid`` and
    ``traj_uid`` every row counts as a separate trajectory and group.

    Example: 4 groups of 2 trajectories and ``tasks_per_step=2`` give 2 mini-batches with 4
    trajectories each.
    """
    columns = data.non_tensor_batch
    # The rank is included: rows of equal index on two ranks are two trajectories.
    row_ids = [f"rank {get_rank()} row {i}" for i in range(len(data))]
    traj = _hash_ids(columns.get("traj_uid", row_ids))
    group = _hash_ids(columns["uid"]) if "uid" in columns else traj
    all_traj = gather_vectors(traj).numpy()
    all_group = gather_vectors(group).numpy()
    part_of = _assign_mini_batches(all_traj, all_group, seed, tasks_per_step, num_steps)
    count = 1 + max(part_of.values(), default=-1)
    batch_rows: list[list[int]] = [[] for _ in range(count)]
    for row, traj_hash in enumerate(traj.tolist()):
        batch_rows[part_of[traj_hash]].append(row)
    return batch_rows


def _assign_mini_batches(
    traj: np.ndarray,
    group: np.ndarray,
    seed: int,
    tasks_per_step: int | None,
    num_steps: int | None,
) -> dict[int, int]:
    """Map the hash of each trajectory to the index of its mini-batch."""
    group_of = dict(zip(traj.tolist(), group.tolist(), strict=True))
    groups = sorted(set(group_of.values()))
    order = np.random.default_rng(derive_seed("mini-batches", seed)).permutation(len(groups))
    rank_of = {groups[g]: position for position, g in enumerate(order.tolist())}
    # Sorted by hash within a group, because the order of rows differs between ranks.
    sequence = sorted(group_of, key=lambda digest: (rank_of[group_of[digest]], digest))
    by_tasks = math.ceil(len(groups) / tasks_per_step) if tasks_per_step else 1
    steps = num_steps or by_tasks
    # never more steps than trajectories, so that no mini-batch is empty
    steps = max(1, min(steps, len(sequence)))
    return {number: position * steps // len(sequence) for position, number in enumerate(sequence)}


def common_passes(cuts: Sequence[Sequence[int]]) -> int:
    """Return the number of passes of every rank: the largest number of micro-batches of any rank.

    Passes through a sharded model are collective operations. If a rank ran fewer passes, the others
    would wait for it forever.
    """
    return int(max_over_ranks([len(cuts)])[0])


def cut_rows(
    engine: TrainEngine, sizes: Sequence[int], limits: MicroBatchLimits
) -> list[list[int]]:
    """Cut rows of ``sizes`` tokens into micro-batches of row indices.

    ``limits`` are per device: with sequence parallelism the token limit is multiplied by the number
    of ranks that compute a row together.
    """
    tokens = limits.get("max_tokens")
    if tokens:
        limits = MicroBatchLimits(max_tokens=tokens * engine.sequence_ranks)
    return micro_batches(sizes, **limits)


@torch.no_grad()
def score_micro_batches(
    engine: TrainEngine,
    sizes: Sequence[int],
    limits: MicroBatchLimits,
    score: Callable[[list[int]], None],
) -> None:
    """Call ``score`` with the rows of every micro-batch, with the model on the device and without
    gradient.

    ``sizes`` are the numbers of tokens of the rows of this rank. Every rank of the engine must call
    this function. ``score`` runs equally often on each rank. A rank with fewer micro-batches calls
    it with row 0 again.
    """
    micro_batch_rows = cut_rows(engine, sizes, limits)
    with engine.model_on_device():
        for pass_index, owner in product(
            range(common_passes(micro_batch_rows)), range(engine.sequence_ranks)
        ):
            if engine.begin_pass(owner):
                # a rank that has finished repeats row 0, to join the collective calls
                score(micro_batch_rows[pass_index] if pass_index < len(micro_batch_rows) else [0])
            else:
                engine.module.compute_zero_loss()
