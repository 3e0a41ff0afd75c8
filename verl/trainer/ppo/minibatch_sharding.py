"""Assignment of rows to ranks with about equal numbers of tokens per rank.

    forward passes   all rows of a call, by their tokens and those of their branches
    updates          each mini-batch separately, because ranks synchronize at its optimizer step

The rows of a mini-batch, and therefore its gradient, do not depend on the assignment.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.records import BRANCHES, PROFILE, SPANS, ProfileRequest
from verl.single_controller.base.decorator import ROWS_PER_RANK
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions, partition_rows
from verl.workers.policy_loss import rows_trained_on
from verl.workers.update import epoch_mini_batches

# Columns that a forward pass reads, and columns that name additional tokens to score.
FORWARD_COLUMNS = ("input_ids", "attention_mask", "responses", "response_mask")
SCORE_REQUEST_COLUMNS = (BRANCHES, SPANS)
# Columns of ``non_tensor_batch`` that an update reads.
NON_TENSOR_COLUMNS = ("uid", "traj_uid")
# Token columns that no update reads: input_ids and attention_mask contain the same information, or
# the advantages and returns were computed from them.
UNREAD_COLUMNS = (
    *("prompts", "position_ids", "step_ids"),
    *("rollout_log_probs", "entropys", "token_level_scores", "token_level_rewards"),
)


def select_columns(
    data: DataProto, tensors: Iterable[str] | None, others: Iterable[str]
) -> DataProto:
    """Return ``data`` with only the columns that the ranks read. Names that it lacks are ignored.

    ``tensors`` names columns of ``batch`` (None: all), ``others`` columns of ``non_tensor_batch``.
    """
    kept_keys = None if tensors is None else [key for key in tensors if key in data.tensor_keys()]
    return data.select(kept_keys, [key for key in others if key in data.non_tensor_batch])


def score_on_ranks(
    call: Callable[[DataProto], DataProto], data: DataProto, ranks: int, balanced: bool = True
) -> DataProto:
    """Return ``call(data)`` in the order of the rows of ``data``.

    ``call`` gets the rows reordered, so that ``ranks`` get about equal numbers of tokens. It must
    return one row for each. If not ``balanced``, or with one rank, it gets ``data`` unchanged.
    """
    if ranks == 1 or not balanced:
        return call(data)
    rows_per_rank = partition_rows(count_row_tokens(data), ranks)
    order = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rows_per_rank])
    answer = call(reorder_by_rank(data, rows_per_rank))
    return answer.select_idxs(np.argsort(order))


def balance_rows(batch: DataProto, ranks: int) -> None:
    """Reorder rows in place, so that all ranks get about equal numbers of tokens.

    Rank ``r`` of ``ranks`` processes the ``r``-th part of consecutive rows. Do nothing for one
    rank, or for fewer rows than ranks.
    """
    if ranks == 1 or len(batch) < ranks:
        return
    lengths = batch.batch["attention_mask"].sum(-1).tolist()
    is_divisible = len(batch) % ranks == 0
    partitions = get_seqlen_balanced_partitions(
        lengths, k_partitions=ranks, equal_size=is_divisible
    )
    batch.reorder(torch.tensor([row for partition in partitions for row in partition]))


def shard_minibatches(
    batch: DataProto, config: PPOConfig, role: str, step: int, ranks: int
) -> DataProto:
    """Return the columns that the update of ``role`` (``actor``, ``critic``) reads at ``step``.

    The rows of each mini-batch are split among the ``ranks`` by their numbers of tokens. With
    ``shuffle`` only the mini-batches of the first epoch are balanced, since later epochs use other
    mini-batches.
    """
    tensors = [key for key in batch.tensor_keys() if key not in UNREAD_COLUMNS]
    update_columns = select_columns(batch, tensors, NON_TENSOR_COLUMNS)
    if step in config.trainer.profile_steps:
        directory = Path(config.trainer.default_local_dir) / "profile"
        ranks_traced = tuple(config.trainer.profile_ranks)
        update_columns.meta_info[PROFILE] = ProfileRequest(str(directory), ranks_traced, step)
    if not config.trainer.balance_batch or ranks == 1:
        return update_columns
    section = config.critic if role == "critic" else config.actor_rollout_ref.actor
    # Same seed as in the workers: driver and workers must form the same mini-batches.
    seed = (f"update_{role}", config.trainer.seed, step)
    mini_batches = epoch_mini_batches(update_columns, section, 0, *seed)
    sizes = count_row_tokens(update_columns)
    if role == "actor":
        trained_rows = set(rows_trained_on(config.actor_rollout_ref.actor, update_columns))
        # The update skips a row without trained tokens, so the row counts as 0 tokens.
        sizes = [size if row in trained_rows else 0 for row, size in enumerate(sizes)]
    return reorder_by_rank(update_columns, split_mini_batches(mini_batches, sizes, ranks))


def reorder_by_rank(data: DataProto, rows_per_rank: Sequence[Sequence[int]]) -> DataProto:
    """Return a copy of ``data`` that dispatch splits into ``rows_per_rank[r]`` for rank ``r``."""
    order = np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rows_per_rank])
    ordered = data.select_idxs(order)
    ordered.meta_info[ROWS_PER_RANK] = [len(rows) for rows in rows_per_rank]
    return ordered


def count_row_tokens(data: DataProto) -> list[int]:
    """Return the tokens of each row, including those of alternative continuations to be scored."""
    sizes = data.batch["attention_mask"].sum(-1).tolist()
    branches = data.non_tensor_batch.get(BRANCHES)
    if branches is None:
        return sizes
    branch_tokens = [sum(len(branch.token_ids) for branch in row) for row in branches]
    return [size + tokens for size, tokens in zip(sizes, branch_tokens, strict=True)]


def split_mini_batches(
    mini_batches: Sequence[Sequence[int]], sizes: Sequence[int], ranks: int
) -> list[list[int]]:
    """Return the rows of each rank. Each mini-batch is split separately, by ``sizes`` [B]."""
    rows_per_rank: list[list[int]] = [[] for _ in range(ranks)]
    for rows in mini_batches:
        rank_positions = partition_rows([sizes[row] for row in rows], ranks)
        for rank_rows, positions in zip(rows_per_rank, rank_positions, strict=True):
            rank_rows += [rows[position] for position in positions]
    return rows_per_rank
