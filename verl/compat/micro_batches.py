"""Micro-batches with a maximum token count, and padding, for user code that makes batches itself.

The workers of this framework use ``verl.workers.rows.micro_batches``.
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


def token_bounded_partitions(
    lengths: Sequence[int], max_token_len: int, min_partitions: int = 1, divided_by: int = 1
) -> list[list[int]]:
    """Partition the rows into balanced parts of at most ``max_token_len`` tokens.

    Returns lists of row indices; every index is in exactly one part. There are at least
    ``min_partitions`` parts and a multiple of ``divided_by``, but not more parts than rows. The
    number of parts is the smallest for which balancing by length keeps ``max_token_len``. If there
    is none, rows are packed first-fit-decreasing. Raises ``ValueError`` for a row that is longer
    than ``max_token_len``.
    """
    lengths = [int(length) for length in lengths]
    n = len(lengths)
    if not n:
        return []
    longest_row = max(range(n), key=lengths.__getitem__)
    if lengths[longest_row] > max_token_len:
        raise ValueError(
            f"row {longest_row} has {lengths[longest_row]} tokens, more than "
            f"max_token_len={max_token_len}; "
            "raise ppo_max_token_len_per_gpu (or the log-prob one) to at least the longest row"
        )
    packed = _first_fit_decreasing(lengths, max_token_len)
    by_tokens = -(-sum(lengths) // max_token_len)  # rounded up
    lowest = _round_up_parts(max(min_partitions, by_tokens, 1), divided_by, n)
    highest = max(lowest, _round_up_parts(len(packed), divided_by, n))
    # A balanced partition into k parts may exceed max_token_len although one into more parts does
    # not: try larger k.
    for k in range(lowest, highest + 1, divided_by):
        row_lists = get_seqlen_balanced_partitions(lengths, min(k, n))
        if max(sum(lengths[i] for i in row_indices) for row_indices in row_lists) <= max_token_len:
            return row_lists
    return _split_into(packed, highest)


def _round_up_parts(k: int, divided_by: int, n: int) -> int:
    # Not more parts than rows, because a model cannot process a part without rows.
    return min(-(-k // divided_by) * divided_by, n)


def _first_fit_decreasing(lengths: list[int], bound: int) -> list[list[int]]:
    bins: list[tuple[int, list[int]]] = []
    for i in sorted(range(len(lengths)), key=lambda j: (-lengths[j], j)):
        slot = next((b for b, (used, _) in enumerate(bins) if used + lengths[i] <= bound), None)
        if slot is None:
            bins.append((lengths[i], [i]))
        else:
            used, members = bins[slot]
            bins[slot] = (used + lengths[i], [*members, i])
    return [sorted(members) for _, members in bins]


def _split_into(parts: list[list[int]], k: int) -> list[list[int]]:
    parts = [list(part) for part in parts]
    while len(parts) < k:
        largest_part = max(parts, key=len)
        parts.append(largest_part[len(largest_part) // 2 :])
        del largest_part[len(largest_part) // 2 :]
    return parts


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
    row_lists = token_bounded_partitions(
        lengths, max_token_len, min_num_micro_batch or 1, divided_by
    )
    if dp_group is not None:
        row_lists = _match_largest_rank(row_lists, lengths, max_token_len, dp_group)
    return [_select(batch, row_indices) for row_indices in row_lists], row_lists


def _match_largest_rank(
    parts: list[list[int]], lengths: Sequence[int], max_token_len: int, dp_group: ProcessGroup
) -> list[list[int]]:
    """Return ``parts`` split further, into the largest number of parts that any rank has."""
    max_parts = torch.tensor([len(parts)])
    # NCCL communicates GPU tensors only.
    if dist.get_backend(dp_group) == "nccl":
        max_parts = max_parts.cuda()
    dist.all_reduce(max_parts, op=dist.ReduceOp.MAX, group=dp_group)
    if int(max_parts) == len(parts):
        return parts
    if int(max_parts) > len(lengths):
        raise ValueError(
            f"another rank needs {int(max_parts)} micro-batches but this one holds only "
            f"{len(lengths)} rows"
        )
    # A balanced partition may exceed max_token_len. Splitting parts that keep the limit cannot.
    balanced = get_seqlen_balanced_partitions(lengths, int(max_parts))
    fits = max(sum(lengths[i] for i in row_indices) for row_indices in balanced) <= max_token_len
    return balanced if fits else _split_into(parts, int(max_parts))


def _select(batch: Any, rows: list[int]) -> Any:  # the result has the type of batch
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
