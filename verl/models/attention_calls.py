"""Calls of scaled dot-product attention (SDPA) for a packed sequence of rows that share prefixes.

The packed sequence consists of segments (``PackedLayout``). A segment is a row, or an *end*: the
last tokens of a row whose prefix is in other segments. The *path* of a segment is this whole row. A
token attends to the earlier tokens of its path.

No ``[T, T]`` mask is made. There are three kinds of calls::

    rows         one causal call for all rows of similar length
    ends         one call with a mask for a block of queries. Its keys are the tokens on the paths
                 of these queries, copied once per block.
    long ends    one causal call for the whole paths of ends of similar length, because a mask
                 would be too large. The outputs of the shared tokens are dropped.

``uses_causal_attention_call`` says which ends are long. On a CPU a call with a mask takes as long
per pair of tokens as one without.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from verl.models.packed_layout import (
    PackedLayout,
    expand_ranges,
    number_tokens_depth_first,
    uses_causal_attention_call,
)

# Largest share of padding in an attention call of several rows. On a CPU, grouping saves a seventh
# of the time for rows of about 200 tokens, and nothing for longer rows or with more padding.
MAX_ROW_PADDING = 0.05
# Maximum number of queries in a block. The tokens of a row after its shared prefix are divided into
# blocks. Neighbouring blocks can be joined into one attention call.
BLOCK_QUERIES = 64
# Overhead of one attention call, as the number of query-key pairs that take the same time. Measured
# for 4 heads of size 32 on a CPU.
CALL_OVERHEAD_PAIRS = 1 << 13


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length that share one causal attention call.

    The call computes G = ``num_rows`` rows, padded to L = ``row_length`` tokens.
    ``gather_positions`` [G * L] says which token of the group is at each position of the padded
    rows. ``kept_positions`` holds the positions in the padded result whose outputs are kept. If one
    of the two is None, it stands for all positions in order.
    """

    num_rows: int
    row_length: int
    gather_positions: torch.Tensor | None = None
    kept_positions: torch.Tensor | None = None


class AttentionCalls:
    """Attention calls that compute attention over one packed sequence of rows.

    A row whose prefix another row contains is packed without it; what remains is an *end*. The
    calls return their outputs in packed order. There are three kinds:

    * ``row_groups`` compute the rows that are packed whole. ``row_sizes`` is the number of tokens
      of each group;
    * ``suffix_groups`` compute the long ends, each together with its prefix. Their inputs are the
      tokens at ``suffix_positions``;
    * the blocks compute the short ends. A block has consecutive queries, and a mask of
      ``block_masks`` [queries, keys], which is added to the logits (0 or -inf). Its keys are the
      tokens at ``block_key_positions``, one block after the other.

    This is not a dataclass, because FSDP copies dataclasses in every layer.
    """

    def __init__(
        self,
        layout: PackedLayout,
        device: torch.device | str = "cpu",
        dtype: torch.dtype = torch.float32,
    ) -> None:
        num_rows = layout.parents.count(-1)
        num_causal_segments = sum(
            map(uses_causal_attention_call, layout.prefix_lengths, layout.lengths)
        )
        rows = list(_group_by_length(layout, range(num_rows)))
        ends = list(_group_by_length(layout, range(num_rows, num_causal_segments)))
        self.row_sizes = [sum(layout.lengths[i] for i in segment_group) for segment_group in rows]
        self.row_groups = [
            _create_row_group(layout, segment_group, device) for segment_group in rows
        ]
        self.suffix_groups = [
            _create_row_group(layout, segment_group, device) for segment_group in ends
        ]
        self.suffix_positions = None
        if ends:
            gather_positions = [row_group.gather_positions for row_group in self.suffix_groups]
            self.suffix_positions = torch.cat([p for p in gather_positions if p is not None])
            self.suffix_groups = [
                replace(row_group, gather_positions=None) for row_group in self.suffix_groups
            ]
        self.block_masks: list[torch.Tensor] = []
        self.block_key_positions = None
        plans = list(_plan_query_blocks(layout, num_causal_segments))
        if plans:
            keys = [expand_ranges(plan.keys.items()) for plan in plans]
            self.block_masks = [x.to(device) for x in _create_masks(layout, plans, keys, dtype)]
            self.block_key_positions = torch.from_numpy(np.concatenate(keys)).to(device)


def _group_by_length(layout: PackedLayout, segments: Sequence[int]) -> Iterator[Sequence[int]]:
    """Yield groups of neighbouring ``segments`` that fit one attention call with little padding."""
    row_lengths = [layout.prefix_lengths[i] + layout.lengths[i] for i in segments]
    group_start = 0
    for group_end in range(1, len(row_lengths) + 1):
        group_lengths = row_lengths[group_start : group_end + 1]
        padding_share = 1.0 - sum(group_lengths) / (len(group_lengths) * max(group_lengths))
        if group_end == len(row_lengths) or padding_share > MAX_ROW_PADDING:
            yield segments[group_start:group_end]
            group_start = group_end


def _create_row_group(
    layout: PackedLayout, segments: Sequence[int], device: torch.device | str
) -> RowGroup:
    """Return the ``RowGroup`` that computes ``segments`` in one call, with the prefix of each.

    Either all ``segments`` have a prefix or none has.
    """
    prefix_lengths = [layout.prefix_lengths[i] for i in segments]
    row_lengths = [layout.prefix_lengths[i] + layout.lengths[i] for i in segments]
    max_length = max(row_lengths)
    if not any(prefix_lengths) and min(row_lengths) == max_length:
        return RowGroup(len(row_lengths), max_length)
    # Positions of rows without a shared prefix are counted from the first token of the group. With
    # a shared prefix, they are counted from the first token of the layout.
    base_position = 0 if any(prefix_lengths) else layout.offsets[segments[0]]
    paths = [layout.list_row_positions(segment) - base_position for segment in segments]
    # Padding repeats the last token of the row. The causal mask hides it from all real queries.
    padded_paths = [np.pad(path, (0, max_length - len(path)), mode="edge") for path in paths]
    kept_positions = [
        np.arange(row * max_length + start, row * max_length + length)
        for row, (start, length) in enumerate(zip(prefix_lengths, row_lengths, strict=True))
    ]
    return RowGroup(
        len(row_lengths),
        max_length,
        torch.from_numpy(np.concatenate(padded_paths)).to(device),
        torch.from_numpy(np.concatenate(kept_positions)).to(device),
    )


def _create_masks(
    layout: PackedLayout,
    plans: Sequence["_BlockPlan"],
    key_positions: Sequence[np.ndarray],
    dtype: torch.dtype,
) -> Iterator[torch.Tensor]:
    """Yield the mask [queries, keys] of each block. Its keys are at ``key_positions``."""
    enter_numbers, leave_numbers = number_tokens_depth_first(layout)
    for plan, keys in zip(plans, key_positions, strict=True):
        num_common_keys = sum(end - start for start, end in plan.common)
        # All queries attend to the first ``num_common_keys`` keys, so compute the mask for the
        # other keys only.
        masked_keys = keys[num_common_keys:]
        query_numbers = enter_numbers[plan.start : plan.end, None]
        is_visible = torch.from_numpy(
            (enter_numbers[masked_keys] <= query_numbers)
            & (query_numbers < leave_numbers[masked_keys])
        )
        mask = torch.zeros(len(query_numbers), len(keys), dtype=dtype)
        mask[:, num_common_keys:].masked_fill_(~is_visible, float("-inf"))
        yield mask


@dataclass(frozen=True)
class _BlockPlan:
    """Plan of one attention call with a mask: its queries, and the ranges of their keys.

    The queries are at packed positions [start, end). ``keys`` maps the first position of each range
    to its end. ``common`` lists the first ranges, to which all queries attend.
    """

    start: int
    end: int
    keys: dict[int, int]
    common: list[tuple[int, int]]

    @property
    def num_pairs(self) -> int:
        return (self.end - self.start) * sum(end - start for start, end in self.keys.items())

    def join(self, other: "_BlockPlan") -> "_BlockPlan":
        """Return one plan for the queries of both plans. The queries of ``other`` follow."""
        key_ranges = dict(self.keys)
        for start, end in other.keys.items():
            key_ranges[start] = max(end, key_ranges.get(start, end))
        common_ranges: list[tuple[int, int]] = []
        for self_range, other_range in zip(self.common, other.common, strict=False):
            if self_range[0] != other_range[0]:
                break
            common_ranges.append(min(self_range, other_range))
            if self_range != other_range:
                break
        return _BlockPlan(self.start, other.end, key_ranges, common_ranges)


def _plan_query_blocks(layout: PackedLayout, first_segment: int) -> Iterator[_BlockPlan]:
    """Yield the blocks of queries that share a masked attention call, and the ranges of their keys.

    The queries are the tokens of the segments from index ``first_segment`` on. Neighbouring
    segments share a block while its masked pairs of tokens cost less than one more attention call.
    """
    block: _BlockPlan | None = None
    for segment in range(first_segment, len(layout.lengths)):
        prefix = layout.list_row_ranges(layout.parents[segment], layout.prefix_lengths[segment])
        segment_start, segment_end = layout.offsets[segment : segment + 2]
        # Divide the queries into blocks. The keys of a block end with its last query, because no
        # token attends to later tokens.
        for start in range(segment_start, segment_end, BLOCK_QUERIES):
            end = min(start + BLOCK_QUERIES, segment_end)
            earlier = [(segment_start, start)] if start > segment_start else []
            plan = _BlockPlan(
                start, end, dict([*prefix, (segment_start, end)]), [*prefix, *earlier]
            )
            joined_plan = None if block is None else block.join(plan)
            if block is None or joined_plan is None:
                block = plan
            elif joined_plan.num_pairs <= block.num_pairs + plan.num_pairs + CALL_OVERHEAD_PAIRS:
                block = joined_plan
            else:
                yield block
                block = plan
    if block is not None:
        yield block
