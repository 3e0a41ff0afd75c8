"""Attention over packed rows and branches in one call of FlexAttention.

``packed_attention`` makes one attention call per group of rows and per block of branches. Here a
mask function for a query token q and a key token k replaces these calls::

    q sees k    if both are in one row, or in one branch, and k is not after q
                or if q is in a branch, and k is in its row before the start of the branch

Blocks of token pairs that are completely masked are skipped. On a GPU the call is compiled with the
mask function. On a CPU the call computes all pairs, and torch does not support gradients there. The
CPU call is only used to check that both implementations agree.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate
from typing import Any

import torch

from verl.models.packed_attention import (
    PackedLayout,
    UnsupportedAttention,
    check_attention_arguments,
    check_window,
)

FLEX_ATTENTION = "verl_packed_flex"


def with_block_mask(layout: PackedLayout, device: torch.device) -> PackedLayout:
    """Return the layout with a FlexAttention block mask, which all layers of a forward share."""
    from torch.nn.attention.flex_attention import create_block_mask

    is_visible, num_tokens = _create_mask_function(layout, device)
    mask = create_block_mask(is_visible, None, None, num_tokens, num_tokens, device=str(device))
    return replace(layout, groups=(), blocks=(), block_mask=mask)


def _create_mask_function(
    layout: PackedLayout, device: torch.device
) -> tuple[Callable[..., torch.Tensor], int]:
    """Return the mask function of FlexAttention for ``layout`` and the number of packed tokens.

    The function takes packed positions and returns True where position ``query`` may attend to
    position ``key``.
    """
    num_rows = len(layout.lengths)
    row_by_start = {offset: row for row, offset in enumerate([0, *accumulate(layout.lengths)][:-1])}
    segment_lengths = list(layout.lengths)
    row_of_segment = list(range(num_rows))
    prefix_lengths = [0] * num_rows
    for block in layout.blocks:
        segment_lengths += block.branch_lengths
        row_of_segment += [row_by_start[block.row_start]] * len(block.branch_lengths)
        prefix_lengths += block.prefix_lengths
    # The packed sequence consists of segments: first each row, then each branch.
    lengths = torch.tensor(segment_lengths)
    segment = torch.repeat_interleave(torch.arange(len(segment_lengths)), lengths)
    row = torch.tensor(row_of_segment)[segment].to(device)
    # Number of row tokens that a token of a branch attends to; 0 for tokens of rows.
    prefix = torch.tensor(prefix_lengths)[segment].to(device)
    position_in_segment = torch.arange(len(segment)) - (lengths.cumsum(0) - lengths)[segment]
    # Position of a token in its row. Tokens of branches get a value above every prefix length.
    trunk_position = torch.where(segment < num_rows, position_in_segment, len(segment)).to(device)
    segment = segment.to(device)

    def is_visible(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        is_in_segment = (segment[query] == segment[key]) & (key <= query)
        return is_in_segment | ((row[query] == row[key]) & (trunk_position[key] < prefix[query]))

    return is_visible, len(segment)


def packed_flex_attention(
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
    """Compute attention for ``AttentionInterface`` by FlexAttention.

    Shapes and errors are those of ``packed_attention``. Dropout also raises
    ``UnsupportedAttention``.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if layout is None or layout.block_mask is None:
        raise UnsupportedAttention("packed attention is called without layout=PackedLayout(...)")
    check_window(sliding_window, layout)
    check_attention_arguments(attention_mask, other_arguments)
    if dropout:
        raise UnsupportedAttention(
            f"attention dropout={dropout}: FlexAttention has no dropout; allowed: 0"
        )
    if layout.sequence_group is not None:
        query, key, value = map(layout.sequence_group.to_heads, (query, key, value))
    has_shared_keys = query.shape[1] != key.shape[1]
    # Inside a compiled layer, FlexAttention is compiled as part of the layer.
    if query.is_cuda and not torch.compiler.is_compiling():
        attention_function = _compile_flex_attention()
    else:
        attention_function = flex_attention
    output = attention_function(
        query, key, value, block_mask=layout.block_mask, scale=scaling, enable_gqa=has_shared_keys
    )
    output = output.transpose(1, 2)
    return (
        output if layout.sequence_group is None else layout.sequence_group.to_tokens(output)
    ), None


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic=True, because the number of tokens differs between micro-batches
    return torch.compile(flex_attention, dynamic=True)


def register_flex_attention() -> None:
    """Register ``attn_implementation="verl_packed_flex"`` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLEX_ATTENTION, packed_flex_attention)
