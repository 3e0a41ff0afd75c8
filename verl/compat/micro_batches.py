"""Micro-batches with a maximum token count, and padding, for user code that splits batches itself.

The workers of this framework use ``verl.workers.rows.make_micro_batches``.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from tensordict import TensorDict
from torch import Tensor
from torch.distributed import ProcessGroup

from verl.protocol import DataProto
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions

BatchT = TypeVar("BatchT", DataProto, TensorDict, dict[str, Tensor])


def partition_by_token_limit(
    lengths: Sequence[int], max_token_len: int, min_partitions: int = 1, divided_by: int = 1
) -> list[list[int]]:
    """Partition the rows into balanced parts of at most ``max_token_len`` tokens.

    Returns a list of row indices per part. There are at least ``min_partitions`` parts, and their
    number is the smallest possible multiple of ``divided_by``, at most the number of rows. Raises
    ``ValueError`` for a row that is longer than ``max_token_len``.

        lengths 5, 4, 3, 2 with at most 7 tokens: parts [0, 3] and [1, 2]
    """
    lengths = [int(length) for length in lengths]
    num_rows = len(lengths)
    if not num_rows:
        return []
    longest_row = max(range(num_rows), key=lengths.__getitem__)
    if lengths[longest_row] > max_token_len:
        raise ValueError(
            f"row {longest_row} has {lengths[longest_row]} tokens, more than "
            f"max_token_len={max_token_len}; "
            "raise ppo_max_token_len_per_gpu (or the log-prob one) to at least the longest row"
        )
    min_parts = max(min_partitions, -(-sum(lengths) // max_token_len), 1)
    min_parts = -(-min_parts // divided_by) * divided_by  # a multiple of divided_by
    # If the balanced partition into ``num_parts`` has a part above max_token_len, try more parts.
    for num_parts in range(min_parts, num_rows, divided_by):
        row_lists = get_seqlen_balanced_partitions(lengths, num_parts)
        if max(sum(lengths[i] for i in row_indices) for row_indices in row_lists) <= max_token_len:
            return row_lists
    # A model cannot process a micro-batch without rows.
    return [[row] for row in range(num_rows)]


def rearrange_micro_batches(
    batch: BatchT,
    max_token_len: int,
    dp_group: ProcessGroup | None = None,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[list[BatchT], list[list[int]]]:
    """Split ``batch`` into micro-batches of at most ``max_token_len`` tokens without padding.

    ``batch`` is a dict of tensors, a ``TensorDict`` or a ``DataProto`` with ``attention_mask [B,
    L]``; ``lengths`` ``[B]`` replaces the token counts read from the mask. With a ``dp_group`` of
    torch.distributed all ranks get the same number of micro-batches, so that their collective calls
    match. Returns the micro-batches and the row indices of each. Every row occurs once.
    ``get_reverse_idx`` of the concatenated indices restores the order. Raises ``ValueError`` if a
    row exceeds the bound or a rank has too few rows.
    """
    if lengths is None:
        columns = batch.batch if isinstance(batch, DataProto) else batch
        lengths = columns["attention_mask"].sum(-1).tolist()
    divided_by = num_batches_divided_by or 1
    row_lists = partition_by_token_limit(
        lengths, max_token_len, min_num_micro_batch or 1, divided_by
    )
    if dp_group is not None:
        row_lists = _equalize_micro_batch_counts(row_lists, len(lengths), dp_group)
    return [_select_rows(batch, row_indices) for row_indices in row_lists], row_lists


def _equalize_micro_batch_counts(
    row_lists: list[list[int]], num_rows: int, dp_group: ProcessGroup
) -> list[list[int]]:
    """Halve the longest of the lists of row indices until each rank has equally many lists."""
    max_num_lists = torch.tensor([len(row_lists)])
    # NCCL communicates GPU tensors only.
    if dist.get_backend(dp_group) == "nccl":
        max_num_lists = max_num_lists.cuda()
    dist.all_reduce(max_num_lists, op=dist.ReduceOp.MAX, group=dp_group)
    if int(max_num_lists) > num_rows:
        raise ValueError(
            f"another rank needs {int(max_num_lists)} micro-batches but this one holds only "
            f"{num_rows} rows"
        )
    row_lists = [list(row_indices) for row_indices in row_lists]
    while len(row_lists) < int(max_num_lists):
        longest_list = max(row_lists, key=len)
        row_lists.append(longest_list[len(longest_list) // 2 :])
        del longest_list[len(longest_list) // 2 :]
    return row_lists


def _select_rows(batch: Any, rows: list[int]) -> Any:  # returns the type of ``batch``
    index = torch.as_tensor(rows, dtype=torch.long)
    if isinstance(batch, DataProto | TensorDict):
        return batch[index]
    return {key: value[index] for key, value in batch.items()}


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """Return the inverse permutation: ``reordered[get_reverse_idx(idx_map)[i]]`` is row ``i``."""
    return sorted(range(len(idx_map)), key=idx_map.__getitem__)


def pad_sequence_to_length(
    tensor: Tensor, max_seq_len: int, pad_token_id: float, left_pad: bool = False
) -> Tensor:
    """Pad ``[..., L]`` to ``[..., max_seq_len]``; a tensor of at least that length is unchanged."""
    pad_length = max_seq_len - tensor.shape[-1]
    if pad_length <= 0:
        return tensor
    return torch.nn.functional.pad(
        tensor, (pad_length, 0) if left_pad else (0, pad_length), value=pad_token_id
    )
