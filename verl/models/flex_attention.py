"""Attention over packed rows in one call of FlexAttention.

Packed rows form a tree, because a prefix that several rows share is packed once. A token attends to
the earlier tokens of its row. ``packed_attention`` needs several attention calls for this. Here one
mask function for a query token q and a key token k replaces them::

    q attends to k    if enter[k] <= enter[q] < leave[k]

The numbers ``enter`` and ``leave`` come from a depth-first traversal of the tree
(``number_tokens_depth_first``).

Blocks of token pairs that are completely masked are skipped. On a GPU the call is compiled with the
mask function. On a CPU the call computes all pairs, and torch does not support gradients there. The
CPU call is only used to check that FlexAttention and ``packed_attention`` agree.
"""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from verl.models.packed_attention import (
    UnsupportedAttention,
    check_attention_arguments,
    check_window,
)
from verl.models.packed_layout import PackedLayout, number_tokens_depth_first

FLEX_ATTENTION = "verl_packed_flex"
# Largest number of graphs of a compiled function. Beyond it, torch computes without compilation,
# and FlexAttention then stores the logits of all pairs of tokens. torch's default of 8 is too
# small: there are graphs for one token, one block of 128 tokens and several blocks, each with and
# without gradient.
MAX_GRAPHS = 64


def with_block_mask(layout: PackedLayout, device: torch.device) -> PackedLayout:
    """Return the layout with a FlexAttention block mask, which all layers of a forward share."""
    from torch.nn.attention.flex_attention import create_block_mask

    enter, leave = (
        torch.from_numpy(numbers).to(device) for numbers in number_tokens_depth_first(layout)
    )

    def is_visible(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (enter[key] <= enter[query]) & (enter[query] < leave[key])

    tokens = len(enter)
    mask = create_block_mask(is_visible, None, None, tokens, tokens, device=str(device))
    return replace(layout, block_mask=mask)


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
    """Compute attention over packed rows for ``AttentionInterface`` by one call of FlexAttention.

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
        query, key, value = map(
            layout.sequence_group.exchange_tokens_for_heads, (query, key, value)
        )
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
        output
        if layout.sequence_group is None
        else layout.sequence_group.exchange_heads_for_tokens(output)
    ), None


@functools.cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic=True, because the number of tokens differs between micro-batches
    raise_graph_limit()
    return torch.compile(flex_attention, dynamic=True)


def raise_graph_limit() -> None:
    """Let ``torch.compile`` make up to ``MAX_GRAPHS`` graphs of one function."""
    from torch._dynamo import config

    config.recompile_limit = max(MAX_GRAPHS, config.recompile_limit)


def register_flex_attention() -> None:
    """Register ``attn_implementation="verl_packed_flex"`` with transformers."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLEX_ATTENTION, packed_flex_attention)
