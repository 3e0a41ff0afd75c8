"""Split rows of different lengths into parts of nearly equal token counts, or of bounded token
counts.
"""

import heapq
from collections.abc import Sequence
from itertools import count
from typing import Any

import torch


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Partition indices ``0..n-1`` into ``k_partitions`` non-empty parts whose summed lengths are
    close.

    Largest differencing method (Karmarkar & Karp, 1982): states of k partial sums are merged,
    largest spread first, each time pairing the heaviest part of one with the lightest of the other.
    ``equal_size`` also gives every part the same number of indices. Each part is sorted. Raises
    ``ValueError`` when there are fewer rows than parts, or when ``equal_size`` does not divide
    evenly.
    """
    n = len(seqlen_list)
    if k_partitions < 1 or n < k_partitions:
        raise ValueError(f"cannot split {n} rows into {k_partitions} non-empty parts")
    if equal_size and n % k_partitions:
        raise ValueError(f"equal_size needs a multiple of {k_partitions} rows, got {n}")
    order = sorted(range(n), key=lambda i: (seqlen_list[i], i))
    width = k_partitions if equal_size else 1
    tie_breaker = count()
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for start in range(0, n, width):
        parts = [(int(seqlen_list[i]), [i]) for i in order[start : start + width]]
        _push(heap, parts + [(0, [])] * (k_partitions - width), tie_breaker)
    while len(heap) > 1:
        first, second = heapq.heappop(heap)[2], heapq.heappop(heap)[2]
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        _push(heap, merged, tie_breaker)
    return _fill_empty([sorted(indices) for _, indices in heap[0][2]], seqlen_list)


def _push(heap: list, parts: list[tuple[int, list[int]]], tie_breaker: count) -> None:
    parts = sorted(parts, key=lambda part: -part[0])
    heapq.heappush(heap, (parts[-1][0] - parts[0][0], next(tie_breaker), parts))


def _fill_empty(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Give every empty part the shortest row of the part that has most rows (only zero lengths
    leave one empty).
    """
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            shortest = min(donor, key=lambda i: lengths[i])
            donor.remove(shortest)
            part.append(shortest)
    return parts


def token_bounded_partitions(
    lengths: Sequence[int], max_token_len: int, min_partitions: int = 1, divided_by: int = 1
) -> list[list[int]]:
    """Balanced parts of at most ``max_token_len`` tokens each, every index in exactly one part.

    There are at least ``min_partitions`` parts and a multiple of ``divided_by``, as far as there
    are rows. The smallest count whose balanced split fits is taken; where balancing does not fit,
    first-fit-decreasing does. Raises ``ValueError`` for a row that is longer than the bound.
    """
    lengths = [int(length) for length in lengths]
    n = len(lengths)
    if not n:
        return []
    longest = max(range(n), key=lengths.__getitem__)
    if lengths[longest] > max_token_len:
        raise ValueError(
            f"row {longest} has {lengths[longest]} tokens, more than max_token_len={max_token_len}; "
            "raise ppo_max_token_len_per_gpu (or the log-prob one) to at least the longest row"
        )
    packed = _first_fit_decreasing(lengths, max_token_len)
    lowest = _rounded(max(min_partitions, -(-sum(lengths) // max_token_len), 1), divided_by, n)
    highest = max(lowest, _rounded(len(packed), divided_by, n))
    for k in range(lowest, highest + 1, divided_by):
        parts = get_seqlen_balanced_partitions(lengths, min(k, n))
        if max(sum(lengths[i] for i in part) for part in parts) <= max_token_len:
            return parts
    return _split_to(packed, highest)


def _rounded(k: int, divided_by: int, n: int) -> int:
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


def _split_to(parts: list[list[int]], k: int) -> list[list[int]]:
    parts = [list(part) for part in parts]
    while len(parts) < k:
        largest = max(parts, key=len)
        parts.append(largest[len(largest) // 2 :])
        del largest[len(largest) // 2 :]
    return parts


def rearrange_micro_batches(
    batch: Any,
    max_token_len: int,
    dp_group: Any = None,
    num_batches_divided_by: int | None = None,
    min_num_micro_batch: int | None = None,
    lengths: Sequence[int] | None = None,
) -> tuple[list[Any], list[list[int]]]:
    """Split ``batch`` into micro-batches of at most ``max_token_len`` real tokens; every row
    appears once.

    ``batch`` is a dict of tensors, a ``TensorDict`` or a ``DataProto`` with ``attention_mask [B,
    L]``; ``lengths`` ``[B]`` replaces the token counts read from the mask. With a ``dp_group`` of
    torch.distributed all ranks end up with the same number of micro-batches, so that their
    collective calls pair up. Returns the micro-batches and, for each, its row indices;
    ``get_reverse_idx`` of the concatenated indices restores the order. Raises ``ValueError`` where
    a row exceeds the bound or a rank has too few rows.
    """
    if lengths is None:
        mask = (batch.batch if hasattr(batch, "non_tensor_batch") else batch)["attention_mask"]
        lengths = mask.sum(-1).tolist()
    divided_by = num_batches_divided_by or 1
    parts = token_bounded_partitions(lengths, max_token_len, min_num_micro_batch or 1, divided_by)
    if dp_group is not None:
        parts = _agree(parts, lengths, max_token_len, dp_group)
    return [_select(batch, part) for part in parts], parts


def _agree(
    parts: list[list[int]], lengths: Sequence[int], max_token_len: int, dp_group: Any
) -> list[list[int]]:
    most = torch.tensor([len(parts)])
    if torch.distributed.get_backend(dp_group) == "nccl":
        most = most.cuda()
    torch.distributed.all_reduce(most, op=torch.distributed.ReduceOp.MAX, group=dp_group)
    if int(most) == len(parts):
        return parts
    if int(most) > len(lengths):
        raise ValueError(
            f"another rank needs {int(most)} micro-batches but this one holds only {len(lengths)} rows"
        )
    balanced = get_seqlen_balanced_partitions(lengths, int(most))
    fits = max(sum(lengths[i] for i in part) for part in balanced) <= max_token_len
    return balanced if fits else _split_to(parts, int(most))


def _select(batch: Any, rows: list[int]) -> Any:
    index = torch.as_tensor(rows, dtype=torch.long)
    return (
        {key: value[index] for key, value in batch.items()}
        if isinstance(batch, dict)
        else batch[index]
    )


def get_reverse_idx(idx_map: Sequence[int]) -> list[int]:
    """The inverse permutation: ``reordered[get_reverse_idx(idx_map)[i]]`` is row ``i`` of the
    original order.
    """
    reverse = [0] * len(idx_map)
    for position, original in enumerate(idx_map):
        reverse[original] = position
    return reverse
