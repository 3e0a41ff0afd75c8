"""Split rows of different lengths into parts of nearly equal token counts."""

import heapq
from collections.abc import Sequence
from itertools import count

from verl.utils.lazy import lazy

# Imported from here by job code of this family of frameworks; this one's workers cut micro-batches
# with verl.workers.rows.
__getattr__, _kept = lazy(
    "verl.compat",
    {"get_reverse_idx": "micro_batches", "rearrange_micro_batches": "micro_batches"},
)
__all__ = ["get_seqlen_balanced_partitions", "spread_rows"]
__all__ += _kept

# Rows times parts up to which the differencing method takes less than some 10 ms; largest-first,
# which is tried as well, takes 1 ms for a thousand rows and is as good where they are many.
FEW = 1 << 15
Part = tuple[int, list[int]]  # summed length and the indices it is made of
State = tuple[int, int, list[Part]]  # spread of its parts, tie breaker, parts


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
    heap: list[State] = []
    for start in range(0, n, width):
        parts: list[Part] = [(int(seqlen_list[i]), [i]) for i in order[start : start + width]]
        # One row, or k of them where parts are to have equally many, is where a state starts.
        _push(heap, parts + [(0, [])] * (k_partitions - width), tie_breaker)
    while len(heap) > 1:
        first = heapq.heappop(heap)[2]
        second = heapq.heappop(heap)[2]
        # Parts are sorted by weight: the heaviest meets the lightest.
        merged = [(a[0] + b[0], a[1] + b[1]) for a, b in zip(first, reversed(second), strict=True)]
        _push(heap, merged, tie_breaker)
    return _fill_empty([sorted(indices) for _, indices in heap[0][2]], seqlen_list)


def spread_rows(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Deal indices ``0..n-1`` to ``parts``, of which some get none where there are fewer of them,
    so that the heaviest part is light; as many as one likes, and each part is sorted.
    """
    found = _largest_first(lengths, parts)
    if parts <= len(lengths) and len(lengths) * parts <= FEW:
        other = get_seqlen_balanced_partitions(lengths, parts)
        found = min(found, other, key=lambda split: _heaviest(split, lengths))
    return found


def _largest_first(lengths: Sequence[int], parts: int) -> list[list[int]]:
    """Each index, longest first, to the part that is lightest so far (Graham, 1969)."""
    found: list[list[int]] = [[] for _ in range(parts)]
    heap = [(0, part) for part in range(parts)]
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        load, part = heap[0]
        found[part].append(index)
        heapq.heapreplace(heap, (load + lengths[index], part))
    return [sorted(part) for part in found]


def _heaviest(split: Sequence[Sequence[int]], lengths: Sequence[int]) -> int:
    return max(sum(lengths[i] for i in part) for part in split)


def _push(heap: list[State], parts: list[Part], tie_breaker: "count[int]") -> None:
    parts = sorted(parts, key=lambda part: -part[0])
    # Negative, because the largest spread has to leave the heap first.
    spread = parts[-1][0] - parts[0][0]
    heapq.heappush(heap, (spread, next(tie_breaker), parts))


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
