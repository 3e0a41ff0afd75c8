"""Attention over packed rows and branches in one call of FlexAttention.

``packed_attention`` makes one attention call per group of rows and per block of branches. Here a
mask function for a query token q and a key token k replaces these calls::

    q sees k    if both are in one row, or in one branch, and k is not after q
                or if q is in a branch, and k is in its row before the start of the branch

Blocks of token pairs that are completely masked are skipped. On a GPU the call is compiled with the
mask function. On a CPU it computes all pairs, and torch does not support gradients. That case is
only used to check that both implementations agree.
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

    is_visible, tokens = _visibility_rule(layout, device)
    mask = create_block_mask(is_visible, None, None, tokens, tokens, device=str(device))
    return replace(layout, groups=(), blocks=(), flex=mask)


def _visibility_rule(
    layout: PackedLayout, device: torch.device
) -> tuple[Callable[..., torch.Tensor], int]:
    """Return the mask function of FlexAttention for ``layout`` and the number of packed tokens.

    The function takes packed positions and returns True where query ``q`` may attend to key ``k``.
    """
    rows = len(layout.lengths)
    row_by_start = {offset: row for row, offset in enumerate([0, *accumulate(layout.lengths)][:-1])}
    sizes = list(layout.lengths)
    row_of = list(range(rows))
    prefix_lengths = [0] * rows
    for block in layout.blocks:
        sizes += block.sizes
        row_of += [row_by_start[block.trunk]] * len(block.sizes)
        prefix_lengths += block.starts
    # The packed sequence consists of runs of tokens: first the trunk of each row, then each branch.
    lengths = torch.tensor(sizes)
    run = torch.repeat_interleave(torch.arange(len(sizes)), lengths)
    row = torch.tensor(row_of)[run].to(device)
    prefix = torch.tensor(prefix_lengths)[run].to(device)  # trunk tokens that a branch token sees
    order = torch.arange(len(run)) - (lengths.cumsum(0) - lengths)[run]
    # Position of a trunk token in its row; branch tokens get a value above every prefix.
    trunk_position = torch.where(run < rows, order, len(run)).to(device)
    run = run.to(device)

    def is_visible(
        _batch: torch.Tensor, _head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        in_same_run = (run[q] == run[k]) & (k <= q)
        return in_same_run | ((row[q] == row[k]) & (trunk_position[k] < prefix[q]))

    return is_visible, len(run)


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
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Compute attention for ``AttentionInterface`` by FlexAttention.

    Shapes and errors are those of ``packed_attention``. Dropout also raises
    ``UnsupportedAttention``.
    """
    from torch.nn.attention.flex_attention import flex_attention

    if layout is None or layout.flex is None:
        raise UnsupportedAttention("packed attention is called without layout=PackedLayout(...)")
    check_window(sliding_window, layout)
    check_attention_arguments(attention_mask, others)
    if dropout:
        raise UnsupportedAttention(
            f"attention dropout={dropout}: FlexAttention has no dropout; allowed: 0"
        )
    if layout.group is not None:
        query, key, value = map(layout.group.to_heads, (query, key, value))
    has_shared_keys = query.shape[1] != key.shape[1]
    # Inside a compiled layer, FlexAttention is compiled as part of the layer.
    if query.is_cuda and not torch.compiler.is_compiling():
        call = _compile_flex_attention()
    else:
        call = flex_attention
    out = call(query, key, value, block_mask=layout.flex, scale=scaling, enable_gqa=has_shared_keys)
    out = out.transpose(1, 2)
    return (out if layout.group is None else layout.group.to_tokens(out)), None


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic: the number of tokens differs between micro-batches
    return torch.compile(flex_attention, dynamic=True)


def register_flex_attention() -> None:
    """Register ``attn_implementation="verl_packed_flex"`` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLEX_ATTENTION, packed_flex_attention)
