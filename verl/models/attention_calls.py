"""Calls of scaled dot-product attention (SDPA) that compute the attention of a packed layout.

No ``[T, T]`` mask is made. There are three kinds of calls::

    rows         one causal call. Rows of similar length share a call.
    ends         blocks of queries that continue the same segment, with a mask. The keys are the
                 shared path, copied once per block, and the queries' own tokens.
    long ends    a causal call of the whole path, whose mask would be too large. The outputs of the
                 shared tokens are dropped.

An end is a segment with a parent (``has_causal_call`` says which are long). On a CPU a call with a
mask takes as long per pair of tokens as one without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
import torch

from verl.models.packed_layout import (
    PackedLayout,
    has_causal_call,
    list_positions,
    number_tokens,
)

# Largest fraction of padding in a group of rows that share one attention call. On a CPU, grouping
# saves a seventh of the time for rows of about 200 tokens. It saves nothing for longer rows or with
# more padding.
MAX_ROW_PADDING = 0.05
# Ends are added to one attention call until it has this many queries. Larger values give fewer
# calls with larger masks. A longer end is divided into calls of this many queries.
BLOCK_QUERIES = 128


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length that share one causal attention call.

    ``gather_positions`` [G * L] holds the positions of the padded rows among the tokens of the
    group. ``kept_positions`` holds the positions of the wanted tokens in the padded result. None
    means all of them in order.
    """

    num_rows: int
    row_length: int
    gather_positions: torch.Tensor | None = None
    kept_positions: torch.Tensor | None = None


@dataclass(frozen=True)
class QueryBlock:
    """Queries of ends with the same parent that share one attention call.

    The keys are the cells with indices ``key_cells``. ``mask`` [queries, keys] is added to the
    logits (0 or -inf).
    """

    num_queries: int
    key_cells: list[int]
    mask: torch.Tensor


class AttentionCalls:
    """Calls that compute the attention of a layout. Their outputs are in packed order.

    ``row_groups`` have the first ``row_sizes`` packed tokens. ``end_groups`` compute the long ends
    after them, from the tokens at ``end_positions`` (of all their padded paths). ``blocks`` compute
    the short ends. ``cell_sizes`` divides the packed tokens into the parts that blocks use as keys.

    This is not a dataclass, because FSDP copies dataclasses in every layer.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        num_rows = layout.parents.count(-1)
        num_causal = sum(map(has_causal_call, layout.starts, layout.lengths))
        rows = list(_group_by_length(layout, range(num_rows)))
        ends = list(_group_by_length(layout, range(num_rows, num_causal)))
        self.row_sizes = [sum(layout.lengths[i] for i in group) for group in rows]
        self.row_groups = [_create_group(layout, group, device) for group in rows]
        self.end_groups = [_create_group(layout, group, device) for group in ends]
        self.end_positions = None
        if ends:
            positions = [group.gather_positions for group in self.end_groups]
            self.end_positions = torch.cat([p for p in positions if p is not None])
            self.end_groups = [replace(group, gather_positions=None) for group in self.end_groups]
        self.blocks, self.cell_sizes = _create_blocks(layout, num_causal, device, dtype)


def _group_by_length(layout: PackedLayout, segments: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield groups of neighbouring segments whose paths have similar lengths."""
    lengths = [layout.starts[i] + layout.lengths[i] for i in segments]
    first = 0
    for end in range(1, len(lengths) + 1):
        candidates = lengths[first : end + 1]
        padding_share = 1.0 - sum(candidates) / (len(candidates) * max(candidates))
        if end == len(lengths) or padding_share > MAX_ROW_PADDING:
            yield segments[first:end]
            first = end


def _create_group(
    layout: PackedLayout, segments: Sequence[int], device: torch.device | str
) -> RowGroup:
    """Return the group of the paths of ``segments``, which are all rows or all ends."""
    starts = [layout.starts[i] for i in segments]
    lengths = [layout.starts[i] + layout.lengths[i] for i in segments]
    max_length = max(lengths)
    if not any(starts) and min(lengths) == max_length:
        return RowGroup(len(lengths), max_length)
    # Positions of rows count from the first token of the group, those of ends from the first token
    # of the layout.
    first = 0 if any(starts) else layout.offsets[segments[0]]
    paths = [layout.path_positions(segment) - first for segment in segments]
    # Padding repeats the last token of the row. The causal mask hides it from all real queries.
    padded = [np.pad(path, (0, max_length - len(path)), mode="edge") for path in paths]
    kept = [
        np.arange(row * max_length + start, row * max_length + length)
        for row, (start, length) in enumerate(zip(starts, lengths, strict=True))
    ]
    return RowGroup(
        len(lengths),
        max_length,
        torch.from_numpy(np.concatenate(padded)).to(device),
        torch.from_numpy(np.concatenate(kept)).to(device),
    )


def _create_blocks(
    layout: PackedLayout, first: int, device: torch.device | str, dtype: torch.dtype
) -> tuple[list[QueryBlock], list[int]]:
    """Return the blocks of the segments from ``first`` on, and the sizes of the cells."""
    ranges = list(_list_block_ranges(layout, first))
    if not ranges:
        return [], []
    enter, leave = number_tokens(layout)
    ends = {end for _, key_ranges, _ in ranges for pair in key_ranges for end in pair}
    bounds = sorted(ends | {0, layout.offsets[-1]})
    cell_of_bound = {bound: cell for cell, bound in enumerate(bounds)}
    blocks: list[QueryBlock] = []
    for (query_start, query_end), key_ranges, num_common in ranges:
        all_keys = list_positions(key_ranges)
        keys = all_keys[num_common:]  # those that not every query attends to
        queries = enter[query_start:query_end, None]
        is_visible = torch.from_numpy((enter[keys] <= queries) & (queries < leave[keys]))
        mask = torch.zeros(len(queries), len(all_keys), dtype=dtype)
        mask[:, num_common:].masked_fill_(~is_visible, float("-inf"))
        cells = [cell for a, b in key_ranges for cell in range(cell_of_bound[a], cell_of_bound[b])]
        blocks.append(QueryBlock(query_end - query_start, cells, mask.to(device)))
    return blocks, [b - a for a, b in pairwise(bounds)]


def _list_block_ranges(
    layout: PackedLayout, first: int
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]], int]]:
    """Yield the packed range of the queries, and the packed ranges of the keys, of each block.

    The third value is the number of leading keys that all queries attend to.
    """
    block: list[int] = []
    for segment in range(first, len(layout.lengths)):
        if block and not _fits_block(layout, block, segment):
            yield from _divide_block(layout, block)
            block = []
        block.append(segment)
    if block:
        yield from _divide_block(layout, block)


def _fits_block(layout: PackedLayout, block: Sequence[int], segment: int) -> bool:
    num_queries = layout.offsets[segment] - layout.offsets[block[0]]
    has_same_parent = layout.parents[segment] == layout.parents[block[0]]
    return has_same_parent and num_queries < BLOCK_QUERIES


def _divide_block(
    layout: PackedLayout, block: Sequence[int]
) -> Iterator[tuple[tuple[int, int], list[tuple[int, int]], int]]:
    first, end = layout.offsets[block[0]], layout.offsets[block[-1] + 1]
    path = layout.path_ranges(layout.parents[block[0]], max(layout.starts[i] for i in block))
    # No token attends to later ones, so the last queries of a long end can have a later call.
    num_calls = max(1, round((end - first) / BLOCK_QUERIES))
    step = -(-(end - first) // num_calls)
    for query_start in range(first, end, step):
        query_end = min(query_start + step, end)
        num_common = min(layout.starts[i] for i in block)
        if len(block) == 1:
            num_common += query_start - first
        yield (query_start, query_end), [*path, (first, query_end)], num_common
