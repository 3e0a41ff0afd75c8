"""Packed rows and branches in one call of FlexAttention, without what a mask hides.

What ``packed_attention`` cuts into calls is here a rule between two tokens::

    q sees k    if both are of one row's trunk, or of one branch, and k is not behind q
                or if k is of the trunk of q's row, before the token from which q's branch goes on

Blocks of tokens between which nothing is seen are skipped. On a GPU the call is compiled for the
rule. On a CPU it computes all pairs, and torch refuses gradients: there it shows that both ways
give the same numbers.
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
    check_window,
    refuse,
)

FLEX_ATTENTION = "verl_packed_flex"


def with_block_mask(layout: PackedLayout, device: torch.device) -> PackedLayout:
    """The layout for FlexAttention, once for all layers of a forward."""
    from torch.nn.attention.flex_attention import create_block_mask

    visible, tokens = _rule(layout, device)
    mask = create_block_mask(visible, None, None, tokens, tokens, device=str(device))
    return replace(layout, groups=(), blocks=(), flex=mask)


def _rule(layout: PackedLayout, device: torch.device) -> tuple[Callable[..., torch.Tensor], int]:
    """Whether a token sees another, by their packed positions, and the number of tokens."""
    rows = len(layout.lengths)
    first = {offset: row for row, offset in enumerate([0, *accumulate(layout.lengths)][:-1])}
    sizes = list(layout.lengths)
    row_of = list(range(rows))
    starts = [0] * rows
    for block in layout.blocks:
        sizes += block.sizes
        row_of += [first[block.trunk]] * len(block.sizes)
        starts += block.starts
    # The trunks of rows and the branches are runs of tokens, one behind the other.
    lengths = torch.tensor(sizes)
    run = torch.repeat_interleave(torch.arange(len(sizes)), lengths)
    row = torch.tensor(row_of)[run].to(device)
    prefix = torch.tensor(starts)[run].to(device)  # of its row, what a branch's token sees
    order = torch.arange(len(run)) - (lengths.cumsum(0) - lengths)[run]
    place = torch.where(run < rows, order, len(run)).to(device)  # in its row; of branches none
    run = run.to(device)

    def visible(
        _batch: torch.Tensor, _head: torch.Tensor, q: torch.Tensor, k: torch.Tensor
    ) -> torch.Tensor:
        own = (run[q] == run[k]) & (k <= q)
        return own | ((row[q] == row[k]) & (place[k] < prefix[q]))

    return visible, len(run)


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
    """Attention function for ``AttentionInterface``; shapes and errors as ``packed_attention``,
    and ``UnsupportedAttention`` for dropout.
    """
    if layout is None or layout.flex is None:
        raise UnsupportedAttention("packed attention is called without layout=PackedLayout(...)")
    check_window(sliding_window, layout)
    refuse(attention_mask, others)
    if dropout:
        raise UnsupportedAttention(f"dropout={dropout} of attention, which FlexAttention lacks")
    if layout.group is not None:
        query, key, value = map(layout.group.to_heads, (query, key, value))
    shared = query.shape[1] != key.shape[1]
    call = _flex(query.is_cuda)
    out = call(query, key, value, block_mask=layout.flex, scale=scaling, enable_gqa=shared)
    out = out.transpose(1, 2)
    return (out if layout.group is None else layout.group.to_tokens(out)), None


def _flex(on_gpu: bool) -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # Within a layer that is compiled it becomes part of the layer.
    if on_gpu and not torch.compiler.is_compiling():
        return _compiled()
    return flex_attention


@functools.cache
def _compiled() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # The number of tokens is another in every micro-batch.
    return torch.compile(flex_attention, dynamic=True)


def register_flex_attention() -> None:
    """Make ``attn_implementation="verl_packed_flex"`` known to transformers; calling it again
    changes nothing.
    """
    from transformers import AttentionInterface

    AttentionInterface.register(FLEX_ATTENTION, packed_flex_attention)
