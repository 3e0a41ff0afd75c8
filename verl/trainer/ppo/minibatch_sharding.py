"""Assignment of rows to ranks with about equal numbers of tokens per rank.

    forward passes   all rows of a call, by their tokens and those of their branches
    updates          each mini-batch separately, because ranks synchronize at its optimizer step

Branches are alternative continuations of a row, whose log-probs are computed in the same pass. The
kind of the model's forward passes determines whether the prefix of a branch is computed again. Rows
that share a prefix are assigned to the same rank where balance allows, if ranks merge such rows.
Shared tokens then count once. The rows of a mini-batch, and therefore its gradient, do not depend
on the assignment.
"""

from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
import torch

from verl.config.schema import PPOConfig
from verl.models.forward_kind import PACKED_SETTINGS, ForwardKind, ForwardSettings
from verl.models.prefix_tree import should_merge_rows, sort_sequences
from verl.names import PrefixTree
from verl.protocol import DataProto
from verl.records import BRANCHES, CHOICE_MASK, NUM_RANKS, PROFILE, SPANS, ProfileRequest
from verl.single_controller.base.decorator import ROWS_PER_RANK
from verl.utils.seqlen_balancing import order_rows_for_ranks, partition_rows
from verl.workers.policy_loss import rows_trained_on
from verl.workers.update import epoch_mini_batches

# Columns that a forward pass reads.
FORWARD_COLUMNS = ("input_ids", "attention_mask", "responses", "response_mask")
# Columns of score requests: other texts than the sampled tokens, whose log-probs a method needs.
SCORE_REQUEST_COLUMNS = (BRANCHES, SPANS)
# Columns of ``non_tensor_batch`` that an update reads.
NON_TENSOR_COLUMNS = ("uid", "traj_uid")
# Token columns that no update reads. Those of the first line repeat input_ids and attention_mask.
# Those of the second line were used to compute advantages and returns.
UNREAD_COLUMNS = (
    *("prompts", "position_ids", "step_ids"),
    *("rollout_log_probs", "entropys", "token_level_scores", "token_level_rewards"),
)
COLUMNS_UNREAD_BY_ACTOR = ("returns", "values")
# Token ids and masks are sent with fewer bytes. The ranks get them as int64.
SENT_DTYPES = {
    **dict.fromkeys(("input_ids", "responses"), torch.int32),
    **dict.fromkeys(("attention_mask", "response_mask", CHOICE_MASK), torch.int8),
}


def select_columns(
    data: DataProto, tensor_names: Iterable[str] | None, non_tensor_names: Iterable[str]
) -> DataProto:
    """Return ``data`` with only the named columns. Names that ``data`` lacks are ignored.

    ``tensor_names`` None keeps all tensors.
    """
    tensor_names = (
        None if tensor_names is None else [key for key in tensor_names if key in data.tensor_keys()]
    )
    return data.select(
        tensor_names, [key for key in non_tensor_names if key in data.non_tensor_batch]
    )


def call_with_balanced_rows(
    compute_on_ranks: Callable[[DataProto], DataProto],
    data: DataProto,
    num_ranks: int,
    is_balanced: bool = True,
    forward_settings: ForwardSettings = PACKED_SETTINGS,
) -> DataProto:
    """Return ``compute_on_ranks(data)`` in the order of the rows of ``data``.

    ``compute_on_ranks`` gets the rows in another order, so that all ranks get about equal numbers
    of tokens to compute with ``forward_settings``. It must return one row for each row.
    """
    if num_ranks == 1 or not is_balanced:
        return compute_on_ranks(data)
    row_tokens = count_row_tokens(data, forward_settings.kind)
    token_ids_by_row, prefix_tree = list_mergeable_rows(data, forward_settings)
    rows_per_rank = split_rows(row_tokens, num_ranks, token_ids_by_row, prefix_tree)
    reordered_results = compute_on_ranks(
        reorder_by_rank(data.narrow_dtypes(SENT_DTYPES), rows_per_rank)
    )
    return reordered_results.select_idxs(np.argsort(_concatenate_rows(rows_per_rank)))


def balance_rows(batch: DataProto, num_ranks: int) -> None:
    """Reorder rows in place, so that all ranks get about equal numbers of tokens.

    Do nothing for fewer rows than ranks, or if the collector has already balanced the rows.
    """
    if num_ranks == 1 or len(batch) < num_ranks or batch.meta_info.get(NUM_RANKS) == num_ranks:
        return
    batch.reorder(order_rows_for_ranks(batch.batch["attention_mask"].sum(-1).tolist(), num_ranks))


def shard_minibatches(
    batch: DataProto,
    config: PPOConfig,
    role: str,
    step: int,
    num_ranks: int,
    forward_settings: ForwardSettings = PACKED_SETTINGS,
) -> DataProto:
    """Return ``batch`` for the update of ``role`` (``actor``, ``critic``), divided among ranks.

    The result has only the columns that the update reads. Its rows are reordered by rank, and
    ``meta_info`` has the number of rows of each rank. The rows of each mini-batch are divided by
    their numbers of tokens. With ``shuffle`` this holds for the first epoch only, because later
    epochs have other mini-batches.
    """
    unread_columns = UNREAD_COLUMNS + (COLUMNS_UNREAD_BY_ACTOR if role == "actor" else ())
    tensor_names = [key for key in batch.tensor_keys() if key not in unread_columns]
    update_columns = select_columns(batch, tensor_names, NON_TENSOR_COLUMNS)
    if step in config.trainer.profile_steps:
        directory = Path(config.trainer.default_local_dir) / "profile"
        profile_ranks = tuple(config.trainer.profile_ranks)
        update_columns.meta_info[PROFILE] = ProfileRequest(str(directory), profile_ranks, step)
    if not config.trainer.balance_batch or num_ranks == 1:
        return update_columns
    role_config = config.critic if role == "critic" else config.actor_rollout_ref.actor
    # Use the seed of the workers: driver and workers must form the same mini-batches.
    seed_parts = (f"update_{role}", config.trainer.seed, step)
    mini_batches = epoch_mini_batches(update_columns, role_config, 0, *seed_parts)
    row_tokens = count_row_tokens(update_columns, forward_settings.kind)
    if role == "actor":
        trained_rows = set(rows_trained_on(config.actor_rollout_ref.actor, update_columns))
        # The update skips a row without trained tokens, so the row counts as 0 tokens.
        row_tokens = [
            num_tokens if row in trained_rows else 0 for row, num_tokens in enumerate(row_tokens)
        ]
    token_ids_by_row, prefix_tree = list_mergeable_rows(update_columns, forward_settings)
    rows_per_rank = split_mini_batches(
        mini_batches, row_tokens, num_ranks, token_ids_by_row, prefix_tree
    )
    return reorder_by_rank(update_columns.narrow_dtypes(SENT_DTYPES), rows_per_rank)


def reorder_by_rank(data: DataProto, rows_per_rank: Sequence[Sequence[int]]) -> DataProto:
    """Return a reordered copy of ``data``, which gives rank r the rows ``rows_per_rank[r]``."""
    reordered_data = data.select_idxs(_concatenate_rows(rows_per_rank))
    reordered_data.meta_info[ROWS_PER_RANK] = [len(rows) for rows in rows_per_rank]
    return reordered_data


def _concatenate_rows(rows_per_rank: Sequence[Sequence[int]]) -> np.ndarray:
    return np.concatenate([np.asarray(rows, dtype=np.int64) for rows in rows_per_rank])


def count_row_tokens(data: DataProto, forward_kind: ForwardKind) -> list[int]:
    """Return the number of tokens to compute for each row and its branches.

    A branch is an alternative continuation of a row, whose log-probs are also computed. Spans are
    token ranges of the row, so they add no tokens.
    """
    row_lengths = data.batch["attention_mask"].sum(-1).tolist()
    branches = data.non_tensor_batch.get(BRANCHES, [()] * len(data))
    return list(map(forward_kind.count_tokens, row_lengths, branches))


def list_mergeable_rows(
    data: DataProto, forward_settings: ForwardSettings
) -> tuple[list[np.ndarray], PrefixTree]:
    """Return the arguments of ``split_rows`` about rows that share prefixes.

    They are the token ids of each row without padding, and ``prefix_tree``. If ranks cannot merge
    rows of these lengths, they are an empty list and False.
    """
    is_token = data.batch["attention_mask"].bool()
    row_lengths = is_token.sum(-1).numpy()
    prefix_tree = forward_settings.resolve_prefix_tree(row_lengths.max(initial=0))
    if not prefix_tree:
        return [], False
    row_ends = row_lengths.cumsum()[:-1]
    return np.split(data.batch["input_ids"][is_token].numpy(), row_ends), prefix_tree


def split_mini_batches(
    mini_batches: Sequence[Sequence[int]],
    row_tokens: Sequence[int],
    num_ranks: int,
    token_ids_by_row: Sequence[np.ndarray] = (),
    prefix_tree: PrefixTree = False,
) -> list[list[int]]:
    """Return the row indices of each rank, from the row indices of each mini-batch.

    Every mini-batch is split separately, so that ranks get about equal numbers of its tokens.
    ``split_rows`` explains the other arguments.
    """
    rows_per_rank: list[list[int]] = [[] for _ in range(num_ranks)]
    for mini_batch in mini_batches:
        rank_positions = split_rows(
            [row_tokens[row] for row in mini_batch],
            num_ranks,
            [token_ids_by_row[row] for row in mini_batch] if token_ids_by_row else (),
            prefix_tree,
        )
        for rank_rows, positions in zip(rows_per_rank, rank_positions, strict=True):
            rank_rows += [mini_batch[position] for position in positions]
    return rows_per_rank


def split_rows(
    row_tokens: Sequence[int],
    num_ranks: int,
    token_ids_by_row: Sequence[np.ndarray] = (),
    prefix_tree: PrefixTree = False,
) -> list[list[int]]:
    """Return the row indices of each rank, with about equal numbers of tokens to compute.

    ``row_tokens`` [B] are the tokens to compute for each row, 0 if the pass skips the row.
    ``token_ids_by_row`` are the token ids of the rows. ``prefix_tree`` states whether ranks merge
    rows that share a prefix (``auto``: if that saves enough tokens). Then rows are sorted by their
    ids, a rank gets consecutive rows, and shared tokens count once.
    """
    computed_rows = [
        row for row, num_tokens in enumerate(row_tokens) if num_tokens and token_ids_by_row
    ]
    sorted_rows = sort_sequences([token_ids_by_row[row] for row in computed_rows])
    if not should_merge_rows(
        sorted_rows, sum(len(token_ids_by_row[row]) for row in computed_rows), prefix_tree
    ):
        return partition_rows(row_tokens, num_ranks)
    rows_per_rank = [[] for _ in range(num_ranks)]
    total_tokens = sum(row_tokens) - sum(sorted_rows.shared_lengths)
    num_assigned_tokens = 0
    for sequence_index, num_shared_tokens in zip(*sorted_rows, strict=True):
        row = computed_rows[sequence_index]
        num_tokens = row_tokens[row] - num_shared_tokens
        # Choose the rank by the position of the middle of the row. If its start decided, the last
        # rank would get fewer tokens.
        rank = int((num_assigned_tokens + num_tokens / 2) * num_ranks / total_tokens)
        rows_per_rank[min(rank, num_ranks - 1)].append(row)
        num_assigned_tokens += num_tokens
    skipped_rows = [row for row, num_tokens in enumerate(row_tokens) if not num_tokens]
    return [
        sorted(rank_rows + skipped_rows[rank::num_ranks])
        for rank, rank_rows in enumerate(rows_per_rank)
    ]
