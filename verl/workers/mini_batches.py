"""Split the rows of a batch into mini-batches (one per optimizer step) and micro-batches.

The rows of a trajectory stay together and groups are contiguous. The split does not depend on the
number of ranks.
"""

import math
from collections.abc import Callable, Iterable, Sequence
from itertools import product

import numpy as np
import torch

from verl.models.prefix_tree import should_merge_rows, sort_sequences
from verl.names import PrefixTree
from verl.protocol import DataProto
from verl.utils.seeds import derive_seed
from verl.workers.collectives import gather_vectors, get_rank, max_over_ranks
from verl.workers.engine import TrainEngine
from verl.workers.rows import (
    MicroBatchLimits,
    Rows,
    make_micro_batches,
    make_prefix_tree_micro_batches,
)


def _hash_ids(ids: Iterable[object]) -> torch.Tensor:
    # Ids are hashed to integers, because ranks exchange only tensors. All ranks get equal hashes.
    return torch.tensor([derive_seed(str(value)) for value in ids], dtype=torch.int64)


def make_mini_batches(
    data: DataProto, seed: int, tasks_per_step: int | None = None, num_steps: int | None = None
) -> list[list[int]]:
    """Return the rows of this rank in every mini-batch.

    All ranks get the same number of lists. A list may be empty. Groups (``uid``) are shuffled by
    ``seed``, and the trajectories (``traj_uid``) of a group stay contiguous. This sequence of
    trajectories is cut into ``num_steps`` mini-batches whose sizes differ by at most one
    trajectory. Without ``num_steps`` there is one mini-batch per ``tasks_per_step`` groups.

    The split does not depend on the number of rows or on which rank has them. Without ``uid`` and
    ``traj_uid`` every row counts as a separate trajectory and group.

    Example: 4 groups of 2 trajectories and ``tasks_per_step=2`` give 2 mini-batches with 4
    trajectories each.
    """
    columns = data.non_tensor_batch
    # Default ids include the rank, because rows of equal index on two ranks are two trajectories.
    row_ids = [f"rank {get_rank()} row {i}" for i in range(len(data))]
    trajectory_hashes = _hash_ids(columns.get("traj_uid", row_ids))
    group_hashes = _hash_ids(columns["uid"]) if "uid" in columns else trajectory_hashes
    all_trajectory_hashes = gather_vectors(trajectory_hashes).numpy()
    all_group_hashes = gather_vectors(group_hashes).numpy()
    mini_batch_of_trajectory = _assign_mini_batches(
        all_trajectory_hashes, all_group_hashes, seed, tasks_per_step, num_steps
    )
    num_mini_batches = 1 + max(mini_batch_of_trajectory.values(), default=-1)
    mini_batch_rows: list[list[int]] = [[] for _ in range(num_mini_batches)]
    for row, trajectory_hash in enumerate(trajectory_hashes.tolist()):
        mini_batch_rows[mini_batch_of_trajectory[trajectory_hash]].append(row)
    return mini_batch_rows


def _assign_mini_batches(
    trajectory_hashes: np.ndarray,
    group_hashes: np.ndarray,
    seed: int,
    tasks_per_step: int | None,
    num_steps: int | None,
) -> dict[int, int]:
    """Map the hash of each trajectory to the index of its mini-batch.

    Trajectories are ordered by group, in an order that ``seed`` shuffles, and divided evenly among
    ``num_steps`` mini-batches. If this is None, a mini-batch has about ``tasks_per_step`` groups.
    If both are None, there is one mini-batch.
    """
    group_of_trajectory = dict(zip(trajectory_hashes.tolist(), group_hashes.tolist(), strict=True))
    groups = sorted(set(group_of_trajectory.values()))
    permutation = np.random.default_rng(derive_seed("mini-batches", seed)).permutation(len(groups))
    position_of_group = {
        groups[group_index]: position for position, group_index in enumerate(permutation.tolist())
    }
    # Within a group, trajectories are sorted by hash, because the row order differs between ranks.
    trajectory_order = sorted(
        group_of_trajectory,
        key=lambda hash_value: (position_of_group[group_of_trajectory[hash_value]], hash_value),
    )
    num_steps_by_tasks = math.ceil(len(groups) / tasks_per_step) if tasks_per_step else 1
    num_mini_batches = num_steps or num_steps_by_tasks
    # At most one mini-batch per trajectory, so that none is empty.
    num_mini_batches = max(1, min(num_mini_batches, len(trajectory_order)))
    return {
        trajectory_hash: position * num_mini_batches // len(trajectory_order)
        for position, trajectory_hash in enumerate(trajectory_order)
    }


def count_max_passes_of_ranks(micro_batch_rows: Sequence[Sequence[int]]) -> int:
    """Return the largest number of micro-batches of any rank. Every rank runs that many passes.

    Passes through a sharded model are collective operations. If a rank ran fewer passes, the other
    ranks would wait for it forever.
    """
    return int(max_over_ranks([len(micro_batch_rows)])[0])


def split_into_micro_batches(
    engine: TrainEngine,
    row_sizes: Sequence[int],
    limits: MicroBatchLimits,
    tokens: Sequence[torch.Tensor] = (),
) -> tuple[list[list[int]], PrefixTree]:
    """Cut rows of ``row_sizes`` tokens into micro-batches, and decide if these merge their rows.

    Returns the row indices of each micro-batch, and the value of ``Rows.prefix_tree`` to pack them
    with. It is True if shared prefixes count once in the limit, else ``engine.prefix_tree``.

    ``tokens`` are the unpadded tokens of the rows. If they are given and ``engine.prefix_tree``
    merges rows, rows that share prefixes are put into the same micro-batch. ``limits`` are the most
    rows or tokens of a micro-batch per device. With sequence parallelism the token limit is
    multiplied by the number of ranks that compute a row together.
    """
    max_tokens = limits.get("max_tokens")
    if max_tokens:
        limits = MicroBatchLimits(max_tokens=max_tokens * engine.sequence_ranks)
    lengths = [len(row) for row in tokens]
    if lengths and engine.forward_settings.resolve_prefix_tree(max(lengths)):
        sorted_rows = sort_sequences([row.numpy() for row in tokens])
        if should_merge_rows(sorted_rows, sum(lengths), engine.prefix_tree):
            # True, because a micro-batch alone may share too few tokens for ``auto``.
            return make_prefix_tree_micro_batches(row_sizes, sorted_rows, **limits), True
    return make_micro_batches(row_sizes, **limits), engine.prefix_tree


@torch.no_grad()
def call_on_micro_batches(
    engine: TrainEngine,
    rows: Rows,
    row_sizes: Sequence[int],
    limits: MicroBatchLimits,
    process_micro_batch: Callable[[list[int]], None],
) -> None:
    """Call ``process_micro_batch`` without gradient, with the rows of each micro-batch of ``rows``.

    ``row_sizes`` are the numbers of tokens of this rank's rows, including those of branches. The
    model is on the device during the calls. Every rank of the engine must call this function.
    ``process_micro_batch`` runs equally often on each rank: a rank with fewer micro-batches calls
    it with row 0 again.
    """
    micro_batch_rows, rows.prefix_tree = split_into_micro_batches(
        engine, row_sizes, limits, rows.tokens
    )
    with engine.model_on_device():
        for pass_index, owner_rank in product(
            range(count_max_passes_of_ranks(micro_batch_rows)), range(engine.sequence_ranks)
        ):
            if engine.begin_pass_for_rank(owner_rank):
                # A rank without further rows repeats row 0 to take part in the collective calls.
                process_micro_batch(
                    micro_batch_rows[pass_index] if pass_index < len(micro_batch_rows) else [0]
                )
            else:
                engine.module.compute_zero_loss()
