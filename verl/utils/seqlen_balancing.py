"""Partition of rows of different lengths into parts of nearly equal token counts."""

import heapq
from collections.abc import Sequence
from itertools import count

from verl.utils.lazy import make_lazy_exports

# Scripts written for verl import these functions from this module. The workers of this framework
# use verl.workers.rows instead.
__getattr__, __all__ = make_lazy_exports(
    "verl.compat",
    {"get_reverse_idx": "micro_batches", "rearrange_micro_batches": "micro_batches"},
)
__all__.extend(["get_seqlen_balanced_partitions", "order_rows_for_ranks", "partition_rows"])

# Maximum of rows * parts for the differencing method, which then takes about 10 ms. With more rows,
# the largest-first method alone gives equally good parts.
MAX_DIFFERENCING_SIZE = 1 << 15
Part = tuple[int, list[int]]  # (total length, row indices)
# Partition of some of the rows: (total length of the lightest minus that of the heaviest part,
# tie breaker for the heap, parts)
PartialPartition = tuple[int, int, list[Part]]


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Partition indices ``0..n-1`` into ``k_partitions`` non-empty parts of similar total length.

    The largest differencing method (Karmarkar & Karp, 1982) starts with one partition per row,
    which has ``k_partitions`` parts. It then merges the two partitions with the largest differences
    between parts, until one is left. A merge joins the heaviest part of one partition with the
    lightest of the other.

    ``equal_size`` gives every part the same number of indices. Each part is sorted. Raises
    ``ValueError`` if there are fewer rows than parts, or if ``equal_size`` is set and
    ``k_partitions`` does not divide the number of rows.

        lengths 5, 4, 3, 2 into 2 parts: [0, 3] and [1, 2]
    """
    num_rows = len(seqlen_list)
    if k_partitions < 1 or num_rows < k_partitions:
        raise ValueError(f"cannot split {num_rows} rows into {k_partitions} non-empty parts")
    if equal_size and num_rows % k_partitions:
        raise ValueError(f"equal_size needs a multiple of {k_partitions} rows, got {num_rows}")
    rows_by_length = sorted(range(num_rows), key=lambda i: (seqlen_list[i], i))
    rows_per_partition = k_partitions if equal_size else 1
    tie_breaker = count()
    heap: list[PartialPartition] = []
    for start in range(0, num_rows, rows_per_partition):
        parts: list[Part] = [
            (int(seqlen_list[i]), [i]) for i in rows_by_length[start : start + rows_per_partition]
        ]
        # An initial partition has one row, or one row per part if the parts must have equal sizes.
        _push_partition(heap, parts + [(0, [])] * (k_partitions - rows_per_partition), tie_breaker)
    while len(heap) > 1:
        first_parts = heapq.heappop(heap)[2]
        second_parts = heapq.heappop(heap)[2]
        merged_parts = [
            (a[0] + b[0], a[1] + b[1])
            for a, b in zip(first_parts, reversed(second_parts), strict=True)
        ]
        _push_partition(heap, merged_parts, tie_breaker)
    return _fill_empty_parts([sorted(indices) for _, indices in heap[0][2]], seqlen_list)


def order_rows_for_ranks(lengths: Sequence[int], num_ranks: int) -> list[int]:
    """Return an order of rows in which all ranks get about equal numbers of tokens.

    Rank ``r`` of ``num_ranks`` gets the ``r``-th part of consecutive rows. For one rank, or for
    fewer rows than ranks, the order is 0, 1, 2, ...
    """
    if num_ranks == 1 or len(lengths) < num_ranks:
        return list(range(len(lengths)))
    has_equal_parts = len(lengths) % num_ranks == 0
    partition = get_seqlen_balanced_partitions(lengths, num_ranks, equal_size=has_equal_parts)
    return [row for part in partition for row in part]


def partition_rows(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Partition row indices ``0..n-1`` so that the largest total length of a part is small.

    ``num_parts`` is the number of parts, which may have different numbers of rows. Parts are empty
    if there are fewer rows than parts. Each part is sorted.
    """
    partition = _partition_largest_first(lengths, num_parts)
    if num_parts <= len(lengths) and len(lengths) * num_parts <= MAX_DIFFERENCING_SIZE:
        candidates = (partition, get_seqlen_balanced_partitions(lengths, num_parts))
        partition = min(
            candidates, key=lambda split: max(sum(lengths[i] for i in part) for part in split)
        )
    return partition


def _partition_largest_first(lengths: Sequence[int], num_parts: int) -> list[list[int]]:
    """Assign the rows, in order of decreasing length, to the lightest part (Graham, 1969)."""
    index_lists: list[list[int]] = [[] for _ in range(num_parts)]
    heap = [(0, part_index) for part_index in range(num_parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        total_length, part_index = heap[0]
        index_lists[part_index].append(index)
        heapq.heapreplace(heap, (total_length + lengths[index], part_index))
    return [sorted(indices) for indices in index_lists]


def _push_partition(
    heap: list[PartialPartition], parts: list[Part], tie_breaker: "count[int]"
) -> None:
    parts = sorted(parts, key=lambda part: -part[0])
    negative_difference = parts[-1][0] - parts[0][0]
    heapq.heappush(heap, (negative_difference, next(tie_breaker), parts))


def _fill_empty_parts(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Move the shortest row of the part with most rows to each empty part.

    Parts can be empty if rows have length 0.
    """
    for part in parts:
        if not part:
            fullest_part = max(parts, key=len)
            shortest_row = min(fullest_part, key=lambda i: lengths[i])
            fullest_part.remove(shortest_row)
            part.append(shortest_row)
    return parts
