"""Prefix tree: pack token sequences so that a prefix that several of them share is computed once.

Sequences are the rows of a micro-batch, and their branches. A branch (alternative continuation) of
a row is the sequence ``row[:start] + token_ids``. Sequences that begin with the same tokens have
equal hidden states there, because in a causal model no token depends on later ones. Therefore these
tokens are packed once. The logits at the last shared token predict the first unshared token of each
sequence.

The packed tokens form a tree of segments. Each sequence gives one segment: its tokens without those
that it shares with a sequence of at least its length. So the longest of the sequences with a common
prefix is one segment, and most others continue it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np
import torch

from verl.models.packed_layout import PackedLayout, expand_ranges, uses_causal_attention_call
from verl.names import MAX_TREE_SHARE, PrefixTree
from verl.records import BranchRequest


@dataclass(frozen=True)
class PackedRows:
    """Rows and their branches (alternative continuations), packed into one sequence of T tokens.

    ``input_ids`` and ``position_ids`` are [T]. ``row_positions`` holds the packed positions of the
    tokens of all rows. In it, those of row b begin at ``offsets[b]``. ``branch_positions[b][i]``
    [start + length] holds those of branch i of row b, and of the tokens of the row before it.
    Positions are on the CPU.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    layout: PackedLayout
    row_positions: torch.Tensor
    offsets: list[int]
    branch_positions: list[list[torch.Tensor]]


class SortedSequences(NamedTuple):
    """Indices ``order`` of token sequences, sorted by their tokens.

    ``shared_lengths[i]`` is the number of leading tokens that sequence ``order[i]`` shares with
    ``order[i - 1]``. No earlier sequence shares a longer prefix with it. So a prefix tree, which
    stores shared tokens once, has ``sum(shared_lengths)`` fewer tokens than the sequences.
    """

    order: list[int]
    shared_lengths: list[int]


class _Segment(NamedTuple):
    """Node of a prefix tree: the tokens of sequence ``sequence_index`` from ``start`` on.

    The earlier tokens of the sequence are in the node ``parent`` and its ancestors (-1: none).
    """

    sequence_index: int
    start: int
    parent: int


def sort_sequences(sequences: Sequence[np.ndarray]) -> SortedSequences:
    """Sort ``sequences`` (each [length] of integers below 2^31) by their tokens."""
    # Bytes of big-endian numbers have the order of the numbers, and bytes are compared fast.
    byte_keys = [sequence.astype(">i4").tobytes() for sequence in sequences]
    order = sorted(range(len(byte_keys)), key=byte_keys.__getitem__)
    neighbour_pairs = pairwise(order)
    shared_lengths = [
        _count_shared_prefix(sequences[first], sequences[second])
        for first, second in neighbour_pairs
    ]
    return SortedSequences(order, [0, *shared_lengths][: len(order)])


def should_merge_rows(rows: SortedSequences, num_tokens: int, prefix_tree: PrefixTree) -> bool:
    """Return True if rows of ``num_tokens`` tokens in all are merged into a prefix tree.

    ``prefix_tree`` is the config key. True merges rows that share any prefix. ``auto`` merges them
    if the tree has at most the fraction ``MAX_TREE_SHARE`` of their tokens.
    """
    if prefix_tree == "auto" and num_tokens:
        return num_tokens - sum(rows.shared_lengths) <= MAX_TREE_SHARE * num_tokens
    return bool(prefix_tree) and any(rows.shared_lengths)


def _count_shared_prefix(first: np.ndarray, second: np.ndarray) -> int:
    length = min(len(first), len(second))
    differs = first[:length] != second[:length]
    return int(differs.argmax()) if differs.any() else length


def pack_rows(
    rows: Sequence[torch.Tensor],
    branches: Sequence[Sequence[BranchRequest]] | None = None,
    device: torch.device | str = "cpu",
    prefix_tree: PrefixTree = False,
) -> PackedRows:
    """Pack unpadded rows (each [length] int64) and their branches (alternative continuations).

    If ``should_merge_rows`` is true for the rows and ``prefix_tree``, all sequences share prefixes.
    Otherwise branches share prefixes only with their row and with each other. Rows without branches
    are then packed in the given order. Raises ``ValueError`` for an empty row or branch and for a
    start outside ``0 < start <= length``.
    """
    if min(map(len, rows), default=1) < 1:
        raise ValueError("a packed row needs at least one token")
    row_branches = branches or [[] for _ in rows]
    sequences = [row.numpy() for row in rows]
    sorted_rows = sort_sequences(sequences) if prefix_tree else SortedSequences([], [])
    is_merged = should_merge_rows(sorted_rows, sum(map(len, rows)), prefix_tree)
    prefix_groups = [[index] for index in range(len(rows))]
    for row, branches_of_row in enumerate(row_branches):
        _check_branches(branches_of_row, len(rows[row]))
        prefix_groups[row] += range(len(sequences), len(sequences) + len(branches_of_row))
        for branch in branches_of_row:
            token_ids = np.asarray(branch.token_ids, dtype=np.int64)
            sequences.append(np.concatenate([sequences[row][: branch.start], token_ids]))
    if not is_merged:
        sorted_prefix_groups = [
            _sort_prefix_group(sequences, prefix_group) for prefix_group in prefix_groups
        ]
    elif len(sequences) == len(rows):
        sorted_prefix_groups = [sorted_rows]
    else:
        sorted_prefix_groups = [sort_sequences(sequences)]
    segments, last_segments = _build_segments(sequences, sorted_prefix_groups)
    segments, last_segments = _order_by_attention_call(
        segments, last_segments, sequences, is_merged
    )
    starts = [segment.start for segment in segments]
    token_arrays = [sequences[segment.sequence_index][segment.start :] for segment in segments]
    layout = PackedLayout(
        tuple(map(len, token_arrays)), tuple(starts), tuple(segment.parent for segment in segments)
    )
    position_ids = expand_ranges(
        [(start, start + len(ids)) for start, ids in zip(starts, token_arrays, strict=True)]
    )
    path_positions = [
        torch.from_numpy(layout.list_row_positions(segment, len(sequence)))
        for segment, sequence in zip(last_segments, sequences, strict=True)
    ]
    branch_bounds = list(accumulate(map(len, row_branches), initial=len(rows)))
    return PackedRows(
        torch.from_numpy(np.concatenate(token_arrays)).to(device),
        torch.from_numpy(position_ids).to(device),
        layout,
        torch.cat(path_positions[: len(rows)]),
        list(accumulate(map(len, rows[:-1]), initial=0)),
        [path_positions[first:end] for first, end in pairwise(branch_bounds)],
    )


def _check_branches(row_branches: Sequence[BranchRequest], length: int) -> None:
    for branch in row_branches:
        if not 0 < branch.start <= length:
            raise ValueError(
                f"branch start {branch.start} is outside 1..{length}, the tokens of its row"
            )
        if not len(branch.token_ids):
            raise ValueError("a branch needs at least one token")


def _sort_prefix_group(
    sequences: Sequence[np.ndarray], prefix_group: Sequence[int]
) -> SortedSequences:
    """Return the indices ``prefix_group`` of ``sequences``, sorted by their tokens."""
    sorted_group = sort_sequences([sequences[index] for index in prefix_group])
    return SortedSequences(
        [prefix_group[index] for index in sorted_group.order], sorted_group.shared_lengths
    )


def _build_segments(
    sequences: Sequence[np.ndarray], prefix_groups: Sequence[SortedSequences]
) -> tuple[list[_Segment], list[int]]:
    """Return the nodes of the prefix tree, and the index of the node in which each sequence ends.

    A node (segment) holds the tokens of a sequence after the prefix that it shares with another.
    """
    sequence_order = [index for prefix_group in prefix_groups for index in prefix_group.order]
    shared_lengths = [
        length for prefix_group in prefix_groups for length in prefix_group.shared_lengths
    ]
    lengths = [len(sequences[index]) for index in sequence_order]
    segments: list[_Segment] = []
    last_segments = [-1] * len(sequences)
    # Each range (low, high, start, parent): order[low:high] are sequences that share ``start``
    # tokens with the row that ends in segment ``parent``, and more tokens with each other.
    ranges = [
        (*bounds, -1)
        for bounds in _split_by_shared_prefix(shared_lengths, 0, -1, len(sequence_order))
    ][::-1]
    while ranges:
        low, high, start, parent = ranges.pop()
        longest_index = max(range(low, high), key=lengths.__getitem__)
        if lengths[longest_index] > start:
            segments.append(_Segment(sequence_order[longest_index], start, parent))
            parent = len(segments) - 1
        last_segments[sequence_order[longest_index]] = parent
        ranges += [
            (*bounds, parent)
            for bounds in _split_by_shared_prefix(shared_lengths, low, longest_index, high)
        ]
    return segments, last_segments


def _split_by_shared_prefix(
    shared_lengths: Sequence[int], low: int, reference: int, high: int
) -> Iterator[tuple[int, int, int]]:
    """Divide the sorted sequences [low, high), except ``reference``, into ranges by shared prefix.

    Yields (low, high, start) for each range: its sequences share exactly ``start`` tokens with
    ``reference``, and more tokens with each other. ``reference=-1`` stands for a sequence without
    tokens. ``shared_lengths`` is ``SortedSequences.shared``.
    """
    for indices_on_side in (range(reference - 1, low - 1, -1), range(reference + 1, high)):
        range_indices: list[int] = []
        start = -1
        for index in indices_on_side:
            # Number of tokens shared with the adjacent sequence on the side of ``reference``.
            shared_length = shared_lengths[index + (index < reference)]
            if range_indices and shared_length <= start:
                yield min(range_indices), max(range_indices) + 1, start
                range_indices = []
            if not range_indices:
                start = shared_length
            range_indices.append(index)
        if range_indices:
            yield min(range_indices), max(range_indices) + 1, start


def _order_by_attention_call(
    segments: Sequence[_Segment],
    last_segments: Sequence[int],
    sequences: Sequence[np.ndarray],
    is_merged: bool,
) -> tuple[list[_Segment], list[int]]:
    """Return ``segments`` in packed order, and ``last_segments`` with the new indices.

    ``last_segments`` is the segment in which each sequence ends. ``is_merged`` is true if rows
    share prefixes with other rows. Segments that share an attention call become neighbours:

    1. segments without shared prefix, sorted by length if ``is_merged``, else in the given order;
    2. segments that a causal call computes with their prefix, sorted by length;
    3. segments that a call with a mask computes, in the given order.
    """

    def sort_key(index: int) -> tuple[int, int]:
        sequence, start, parent = segments[index]
        length = len(sequences[sequence])
        if parent < 0:
            return 0, length if is_merged else 0
        return (1, length) if uses_causal_attention_call(start, length - start) else (2, index)

    order = sorted(range(len(segments)), key=sort_key)
    new_indices = {index: new_index for new_index, index in enumerate(order)} | {-1: -1}
    ordered_segments = [
        segments[index]._replace(parent=new_indices[segments[index].parent]) for index in order
    ]
    return ordered_segments, [new_indices[segment] for segment in last_segments]
