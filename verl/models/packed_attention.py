"""Attention over packed rows: many rows in one token sequence, and each row attends only to itself.

A micro-batch is one sequence ``[1, T]``: first the unpadded tokens of all rows (the trunk), then,
optionally, the branches of all rows::

    | row 0 | row 1 | row 2 |  branches of row 0 | branches of row 1 | ...
      causal  causal  causal    trunk[0:start) of their row + themselves, causally

``PackedLayout`` describes this sequence. Attention layers receive it as keyword argument ``layout``
through ``AttentionInterface`` of transformers. So architectures with plain causal attention work
unchanged if they use the interface (``verl.models.architecture`` checks this).

No ``[T, T]`` mask is made. Each row is one causal call of scaled dot-product attention. Rows of
similar length share a call. The branches of a row are divided into blocks, and a block is one call.
Its keys are the row up to the start of the branches, and the branches themselves.
``verl.models.flex_attention`` computes the same in one call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:  # BlockMask loads torch's compiler; sequence_parallel imports this module
    from torch.nn.attention.flex_attention import BlockMask

    from verl.models.sequence_parallel import SequenceGroup

PACKED_ATTENTION = "verl_packed"
# Largest fraction of padding in a group of rows that share one attention call. On a CPU, grouping
# saves a seventh of the time for rows of about 200 tokens. It saves nothing for longer rows or with
# more padding.
MAX_ROW_PADDING = 0.05
# Keyword arguments of attention functions that are accepted, because they do not change the result.
IGNORED_ARGUMENTS = (
    "position_ids",
    "use_cache",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
)
# Unsupported keyword arguments, with a description for the error message.
UNSUPPORTED_ARGUMENTS = {
    "s_aux": "attention sinks, which take a share of every token's attention",
    "softcap": "a soft cap on the attention logits",
    "position_bias": "a bias by position on the attention logits",
    "is_causal": "attention that is not causal",
}


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length that share one attention call.

    ``gather_positions`` [G * L] holds the packed positions of the padded rows.
    ``unpadded_positions`` [sum of lengths] holds the positions of the unpadded tokens in the padded
    result. Both are None if all rows have the same length, because then the rows are a slice of the
    packed sequence.
    """

    start: int
    end: int
    num_rows: int
    row_length: int
    gather_positions: torch.Tensor | None = None
    unpadded_positions: torch.Tensor | None = None


@dataclass(frozen=True)
class BranchBlock:
    """Branches (alternative continuations) of one row that share one attention call.

    Queries are packed positions ``[start, end)``. The row of the branches begins at packed position
    ``row_start``. Keys are positions ``[row_start, row_start + max_prefix_length)`` and the
    positions of the queries. Branch i of the block has ``branch_lengths[i]`` tokens and continues
    the first ``prefix_lengths[i]`` tokens of the row. ``mask`` [queries, keys] is added to the
    logits (0 or -inf). It is None until ``with_masks`` has created it.
    """

    start: int
    row_start: int
    branch_lengths: tuple[int, ...]
    prefix_lengths: tuple[int, ...]
    mask: torch.Tensor | None = None

    @property
    def end(self) -> int:
        return self.start + sum(self.branch_lengths)

    @property
    def max_prefix_length(self) -> int:
        return max(self.prefix_lengths)


@dataclass(frozen=True)
class PackedLayout:
    """Layout of a packed sequence: rows of ``lengths`` tokens, then ``blocks`` of their branches.

    A branch is an alternative continuation of a row.
    ``longest_branch`` is the largest number of tokens that the last token of a branch sees,
    including the prefix and the token itself. ``block_mask`` describes the same layout for
    FlexAttention (None without it). ``sequence_group`` holds the ranks that compute the sequence
    together (None without sequence parallelism).
    """

    lengths: tuple[int, ...]
    groups: tuple[RowGroup, ...]
    blocks: tuple[BranchBlock, ...] = field(default=())
    longest_branch: int = 0
    block_mask: "BlockMask | None" = None
    sequence_group: "SequenceGroup | None" = None

    @property
    def longest_context(self) -> int:
        """Largest number of tokens that any token attends to, including itself."""
        return max(self.longest_branch, *self.lengths)


class UnsupportedAttention(ValueError):
    """Error for attention features of a model that packed rows do not support."""


def layout_of_rows(lengths: list[int], device: torch.device | str = "cpu") -> PackedLayout:
    """Return the layout of rows with the given lengths (tokens), without branches.

    Neighbouring rows of similar length share an attention call.
    """
    offsets = [0, *accumulate(lengths)]
    groups: list[RowGroup] = []
    group_start = 0
    for i in range(1, len(lengths) + 1):
        candidate_lengths = lengths[group_start : i + 1]
        padding_share = 1.0 - sum(candidate_lengths) / (
            len(candidate_lengths) * max(candidate_lengths)
        )
        if i == len(lengths) or padding_share > MAX_ROW_PADDING:
            groups.append(_create_row_group(lengths[group_start:i], offsets[group_start], device))
            group_start = i
    return PackedLayout(tuple(lengths), tuple(groups))


def _create_row_group(lengths: list[int], start: int, device: torch.device | str) -> RowGroup:
    end = start + sum(lengths)
    max_length = max(lengths)
    if min(lengths) == max_length:
        return RowGroup(start, end, len(lengths), max_length)
    row_lengths = torch.tensor(lengths)
    column = torch.arange(max_length)
    is_real_token = column[None, :] < row_lengths[:, None]  # [G, L]
    row_offsets = torch.tensor([0, *accumulate(lengths)][:-1])
    # Padding repeats the last token of the row. The causal mask hides it from all real queries.
    gather_positions = (
        start + row_offsets[:, None] + torch.minimum(column[None, :], row_lengths[:, None] - 1)
    )
    unpadded_positions = is_real_token.reshape(-1).nonzero().squeeze(-1)
    return RowGroup(
        start,
        end,
        len(lengths),
        max_length,
        gather_positions.reshape(-1).to(device),
        unpadded_positions.to(device),
    )


def with_masks(
    layout: PackedLayout, device: torch.device, dtype: torch.dtype = torch.float32
) -> PackedLayout:
    """Return the layout with the attention masks of its branches, which all layers share."""
    blocks = [
        replace(block, mask=_create_branch_mask(block).to(device, dtype)) for block in layout.blocks
    ]
    return replace(layout, blocks=tuple(blocks))


def _create_branch_mask(block: BranchBlock) -> torch.Tensor:
    branch_lengths = torch.tensor(block.branch_lengths)
    prefix_lengths = torch.tensor(block.prefix_lengths)
    branch_of_query = torch.repeat_interleave(
        torch.arange(len(branch_lengths)), branch_lengths
    )  # [Q]
    query_index = torch.arange(len(branch_of_query))
    # A query attends to its row up to the start of its branch, and causally to its branch.
    is_in_prefix = (
        torch.arange(block.max_prefix_length)[None, :] < prefix_lengths[branch_of_query][:, None]
    )
    is_in_branch = (branch_of_query[:, None] == branch_of_query[None, :]) & (
        query_index[:, None] >= query_index[None, :]
    )
    is_visible = torch.cat([is_in_prefix, is_in_branch], dim=1)
    return torch.zeros(is_visible.shape).masked_fill_(~is_visible, float("-inf"))


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001  given by transformers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    **other_arguments: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention over packed rows for ``AttentionInterface`` of transformers.

    ``query`` is [1, H, T, D]; ``key`` and ``value`` are [1, K, T, D] with H a multiple of K.
    Returns ([1, T, H, D], None). Raises ``UnsupportedAttention`` without a layout, for a row or
    branch longer than the sliding window, and for unsupported arguments.
    """
    if layout is None:
        raise UnsupportedAttention("packed attention is called without layout=PackedLayout(...)")
    check_window(sliding_window, layout)
    check_attention_arguments(attention_mask, other_arguments)
    if layout.sequence_group is not None:
        query, key, value = map(layout.sequence_group.to_heads, (query, key, value))
    queries_per_key = query.shape[1] // key.shape[1]
    if queries_per_key > 1:  # grouped-query attention: several query heads share a key head
        key = key.repeat_interleave(queries_per_key, 1)
        value = value.repeat_interleave(queries_per_key, 1)
    parts = [_attend_rows(group, query, key, value, scaling, dropout) for group in layout.groups]
    parts += [_attend_block(block, query, key, value, scaling, dropout) for block in layout.blocks]
    output = torch.cat(parts, dim=1)
    return (
        output if layout.sequence_group is None else layout.sequence_group.to_tokens(output)
    ), None


def check_window(window: int | None, layout: PackedLayout) -> None:
    """Raise ``UnsupportedAttention`` if a row or branch of ``layout`` is longer than ``window``."""
    if window is not None and layout.longest_context > window:
        raise UnsupportedAttention(
            f"a row or branch of {layout.longest_context} tokens (a branch includes its prefix) is "
            f"longer than the sliding window of {window} tokens; packed rows support no sliding "
            "windows"
        )


def check_attention_arguments(
    mask: torch.Tensor | None, other_arguments: Mapping[str, object]
) -> None:
    """Raise ``UnsupportedAttention`` for a mask and for arguments that would change the result."""
    if mask is not None:
        # transformers makes no mask for a custom attention, so the model itself made this mask.
        raise UnsupportedAttention(
            "the model makes a custom attention mask, which packed rows do not apply"
        )
    for name, value in other_arguments.items():
        if value is None or name in IGNORED_ARGUMENTS or (name == "is_causal" and value is True):
            continue
        description = UNSUPPORTED_ARGUMENTS.get(
            name, "an unknown argument, which may change the result"
        )
        raise UnsupportedAttention(f"its attention is called with {name}: {description}")


def _attend_rows(
    group: RowGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Return the causal attention of one row group [1, tokens, H, D]."""
    rows = [_select_rows(states, group) for states in (query, key, value)]
    output = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, dropout_p=dropout)
    tokens = output.transpose(1, 2).flatten(0, 1)
    return (
        tokens
        if group.unpadded_positions is None
        else tokens.index_select(0, group.unpadded_positions)
    )[None]


def _select_rows(states: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """Return the rows of ``group`` from ``states`` [1, H, T, D], padded to [rows, H, length, D]."""
    if group.gather_positions is None:
        tokens = states[0, :, group.start : group.end]
        return tokens.unflatten(1, (group.num_rows, group.row_length)).transpose(0, 1)
    tokens = states[0].transpose(0, 1).index_select(0, group.gather_positions)
    return tokens.unflatten(0, (group.num_rows, group.row_length)).transpose(1, 2)


def _attend_block(
    block: BranchBlock,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Return the attention [1, tokens, H, D] of a block of branches (continuations of a row)."""
    block_positions = slice(block.start, block.end)
    prefix_positions = slice(block.row_start, block.row_start + block.max_prefix_length)
    keys = torch.cat([key[:, :, prefix_positions], key[:, :, block_positions]], dim=2)
    values = torch.cat([value[:, :, prefix_positions], value[:, :, block_positions]], dim=2)
    assert block.mask is not None  # ``with_masks`` was called before the layers
    mask = block.mask.to(query.dtype)
    output = F.scaled_dot_product_attention(
        query[:, :, block_positions], keys, values, attn_mask=mask, scale=scaling, dropout_p=dropout
    )
    return output.transpose(1, 2)


def register_packed_attention() -> None:
    """Register ``attn_implementation="verl_packed"`` with transformers."""
    from transformers import AttentionInterface

    # torch.compile must skip this function: it would compile it again for every new layout.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
