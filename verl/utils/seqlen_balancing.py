"""Partition of rows of different lengths into parts of nearly equal token counts."""

import heapq
from collections.abc import Sequence
from itertools import count

from verl.utils.lazy import make_lazy_exports

# Scripts written for verl import these from here. The workers use verl.workers.rows instead.
__getattr__, _lazy_names = make_lazy_exports(
    "verl.compat",
    {"get_reverse_idx": "micro_batches", "rearrange_micro_batches": "micro_batches"},
)
__all__ = ["get_seqlen_balanced_partitions", "partition_rows"]
__all__ += _lazy_names

# Limit of rows * parts for the differencing method, which takes about 10 ms at the limit. The
# largest-first method takes 1 ms for a thousand rows and is as good for many rows.
MAX_DIFFERENCING_SIZE = 1 << 15
Part = tuple[int, list[int]]  # summed length and row indices
State = tuple[int, int, list[Part]]  # lightest minus heaviest part, tie breaker, parts


def get_seqlen_balanced_partitions(
    seqlen_list: Sequence[int], k_partitions: int, equal_size: bool = False
) -> list[list[int]]:
    """Partition indices ``0..n-1`` into ``k_partitions`` non-empty parts of similar total length.

    Largest differencing method (Karmarkar & Karp, 1982): states of k partial sums are merged, those
    with the largest difference between parts first. A merge pairs the heaviest part of one state
    with the lightest of the other. ``equal_size`` gives every part the same number of indices. Each
    part is sorted. Raises ``ValueError`` if there are fewer rows than parts, or if ``equal_size``
    is set and ``k_partitions`` does not divide the number of rows.
    """
    n = len(seqlen_list)
    if k_partitions < 1 or n < k_partitions:
        raise ValueError(f"cannot split {n} rows into {k_partitions} non-empty parts")
    if equal_size and n % k_partitions:
        raise ValueError(f"equal_size needs a multiple of {k_partitions} rows, got {n}")
    order = sorted(range(n), key=lambda i: (seqlen_list[i], i))
    width = k_partitions if equal_size else 1
    tie_breaker = count()
    heap: list[State] = []
    for start in range(0, n, width):
        parts: list[Part] = [(int(seqlen_list[i]), [i]) for i in order[start : start + width]]
        # A state starts with one row, or with k rows for parts of equal size.
        _push_state(heap, parts + [(0, [])] * (k_partitions - width), tie_breaker)
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        # Parts are sorted by total length: pair the heaviest with the lightest.
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        _push_state(heap, merged, tie_breaker)
    return _fill_empty_parts([sorted(indices) for _, indices in heap[0][2]], seqlen_list)


def partition_rows(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Partition indices ``0..n-1`` into ``parts`` with a small maximum of the total length.

    Sizes may differ; parts are empty if there are too few rows. Each part is sorted.
    """
    partition = _partition_largest_first(lengths, parts)
    if parts <= len(lengths) and len(lengths) * parts <= MAX_DIFFERENCING_SIZE:
        candidates = (partition, get_seqlen_balanced_partitions(lengths, parts))
        partition = min(
            candidates, key=lambda split: max(sum(lengths[i] for i in part) for part in split)
        )
    return partition


def _partition_largest_first(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Assign each index, longest row first, to the lightest part so far (Graham, 1969)."""
    index_lists: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heap[0]
        index_lists[part].append(index)
        heapq.heapreplace(heap, (load + lengths[index], part))
    return [sorted(part) for part in index_lists]


def _push_state(heap: list[State], parts: list[Part], tie_breaker: "count[int]") -> None:
    parts = sorted(parts, key=lambda part: -part[0])
    # Lightest minus heaviest: negative, so that the largest difference is first in the heap.
    negative_difference = parts[-1][0] - parts[0][0]
    heapq.heappush(heap, (negative_difference, next(tie_breaker), parts))


def _fill_empty_parts(parts: list[list[int]], lengths: Sequence[int]) -> list[list[int]]:
    """Move the shortest row of the fullest part to each part left empty (by rows of length 0)."""
    for part in parts:
        if not part:
            donor = max(parts, key=len)
            shortest_row = min(donor, key=lambda i: lengths[i])
            donor.remove(shortest_row)
            part.append(shortest_row)
    return parts
