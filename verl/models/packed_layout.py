"""Layout of packed rows: many rows in one token sequence, as a tree of segments.

A micro-batch is one sequence ``[1, T]`` of segments. A segment is a row, or the end of a sequence
whose first tokens are in other segments. So a prefix that sequences share is packed only once
(``verl.models.prefix_tree`` finds it)::

    sequences   a b c d e f    p q r    a b c x y    a b c x z
    tokens      a b c d e f  | p q r  | x y        | z
    positions   0 1 2 3 4 5  | 0 1 2  | 3 4        | 4
    segment     0              1        2            3
    parent      -1             -1       0            2
    start       0              0        3            4
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:  # BlockMask loads torch's compiler; the other modules import this one
    from torch.nn.attention.flex_attention import BlockMask

    from verl.models.attention_calls import AttentionCalls
    from verl.models.sequence_parallel import SequenceGroup

# Up to this number of tokens after a shared prefix, attention uses a call with a mask. Longer ends
# of rows use a causal call, which computes the prefix again but skips keys after the query. A CPU
# skips them only in blocks of 512, so below 4 blocks too few keys are skipped to save time.
MAX_MASKED_LENGTH = 2048


@dataclass(frozen=True)
class PackedLayout:
    """Layout of a packed sequence: a tree of segments, in packed order.

    A segment is a row, or the last tokens of a row whose prefix is in other segments. The path of a
    segment is this whole row. Segment i has ``lengths[i]`` tokens. They follow the first
    ``prefix_lengths[i]`` tokens of the path of segment ``parents[i]``, so ``prefix_lengths[i]`` is
    its first position id. A segment without shared prefix has parent -1 and start 0.

    ``calls`` describes the attention for SDPA, ``block_mask`` for FlexAttention (None without it).
    ``sequence_group`` holds the ranks that compute the sequence together (None without sequence
    parallelism).
    """

    lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    parents: tuple[int, ...]
    calls: "AttentionCalls | None" = None
    block_mask: "BlockMask | None" = None
    sequence_group: "SequenceGroup | None" = None

    @cached_property
    def offsets(self) -> list[int]:
        """Packed position of the first token of each segment, then the number of tokens T."""
        return [0, *accumulate(self.lengths)]

    @property
    def longest_context(self) -> int:
        """Largest number of tokens that any token attends to, including itself."""
        return max(sum(pair) for pair in zip(self.prefix_lengths, self.lengths, strict=True))

    @property
    def attention_pairs(self) -> int:
        """Number of pairs of a query token and a key token that it attends to."""
        starts_and_lengths = zip(self.prefix_lengths, self.lengths, strict=True)
        return sum(
            length * start + length * (length + 1) // 2 for start, length in starts_and_lengths
        )

    def list_row_ranges(self, segment: int, end: int) -> list[tuple[int, int]]:
        """Return the ranges of packed positions of the first ``end`` tokens of one row.

        It is the row that ends with ``segment``. Tokens that it shares with other rows are in other
        segments.
        """
        ranges: list[tuple[int, int]] = []
        while segment >= 0:
            first, start = self.offsets[segment], self.prefix_lengths[segment]
            if end > start:
                ranges.append((first, first + end - start))
                end = start
            segment = self.parents[segment]
        return ranges[::-1]

    def list_row_positions(self, segment: int, end: int | None = None) -> np.ndarray:
        """Return the packed positions [end] of the first ``end`` tokens of a row (None: of all).

        The row is the one that ends with ``segment``.
        """
        if end is None:
            end = self.prefix_lengths[segment] + self.lengths[segment]
        return expand_ranges(self.list_row_ranges(segment, end))


def layout_of_rows(lengths: Sequence[int]) -> PackedLayout:
    """Return the layout of rows with the given lengths (tokens) that share no prefix."""
    return PackedLayout(tuple(lengths), (0,) * len(lengths), (-1,) * len(lengths))


def uses_causal_attention_call(prefix_length: int, length: int) -> bool:
    """Return True if a causal attention call computes a segment, False if a call with a mask does.

    The segment has ``length`` tokens after a shared prefix of ``prefix_length`` tokens. Calls with
    a mask compute fewer pairs of tokens, but their masks need memory that grows with
    ``length * (prefix_length + length)``.
    """
    return prefix_length == 0 or (prefix_length < length and length > MAX_MASKED_LENGTH)


def expand_ranges(ranges: Iterable[tuple[int, int]]) -> np.ndarray:
    """Return the positions of all ``ranges`` [first, end), concatenated."""
    no_positions = np.zeros(0, dtype=np.int64)  # for the case of no ranges
    return np.concatenate([no_positions, *(np.arange(first, end) for first, end in ranges)])


def number_tokens_depth_first(layout: PackedLayout) -> tuple[np.ndarray, np.ndarray]:
    """Number the T tokens of ``layout`` by a depth-first traversal, and return two arrays [T].

    ``enter[k]`` is the number of token k. The numbers from ``enter[k]`` to ``leave[k] - 1`` are
    those of k and of all tokens that continue it. So q attends to k if
    ``enter[k] <= enter[q] < leave[k]``.
    """
    lengths, starts = (np.array(x, dtype=np.int32) for x in (layout.lengths, layout.prefix_lengths))
    # Depth-first order: the tokens of a segment, then the segments that continue it.
    subtree_sizes = lengths.copy()  # tokens of the segment and of all segments below it
    # Offset of the depth-first numbers of a segment from those of its parent.
    number_offsets = np.zeros_like(lengths)
    relative_leave = np.repeat(lengths, lengths)
    segment_order = np.argsort(starts, kind="stable").tolist()  # each parent before its children
    for segment in reversed(segment_order):
        parent = layout.parents[segment]
        if parent >= 0:
            number_offsets[segment] = subtree_sizes[parent]
            subtree_sizes[parent] += subtree_sizes[segment]
            parent_position = layout.offsets[parent]
            relative_leave[
                parent_position : parent_position + starts[segment] - starts[parent]
            ] += subtree_sizes[segment]
    first_numbers = np.zeros_like(lengths)
    next_number = 0
    for segment in segment_order:
        parent = layout.parents[segment]
        if parent >= 0:
            first_numbers[segment] = first_numbers[parent] + number_offsets[segment]
        else:
            first_numbers[segment] = next_number
            next_number += subtree_sizes[segment]
    token_first_numbers = np.repeat(first_numbers, lengths)
    index_in_segment = np.arange(len(relative_leave), dtype=np.int32)
    index_in_segment -= np.repeat(np.array(layout.offsets[:-1], dtype=np.int32), lengths)
    return token_first_numbers + index_in_segment, token_first_numbers + relative_leave
