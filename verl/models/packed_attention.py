"""Attention over packed rows, by scaled dot-product attention or by FlexAttention.

A token attends only to the earlier tokens of the same row or branch (alternative continuation of a
row). ``PackedLayout`` describes the packed sequence, in which rows may share prefixes. Attention
layers receive it as keyword argument ``layout`` through ``AttentionInterface`` of transformers. So
architectures with plain causal attention work unchanged if they use the interface
(``verl.models.architecture`` checks this). ``AttentionCalls`` says which calls of scaled
dot-product attention compute the attention. FlexAttention computes the same in one call.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from verl.models.attention_calls import AttentionCalls, RowGroup
from verl.models.packed_layout import PackedLayout, number_tokens_depth_first

PACKED_ATTENTION, FLEX_ATTENTION = "verl_packed", "verl_packed_flex"
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


class UnsupportedAttentionError(ValueError):
    """Error for attention features of a model that packed rows do not support."""


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
    Returns ([1, T, H, D], None). FlexAttention computes it if ``layout`` has a block mask. Raises
    ``UnsupportedAttentionError`` without a layout, for a row or branch longer than the sliding
    window, and for unsupported arguments, such as dropout of FlexAttention.
    """
    if layout is None or (layout.calls is None and layout.block_mask is None):
        raise UnsupportedAttentionError(
            "packed attention is called without layout=PackedLayout(...)"
        )
    check_attention_window(sliding_window, layout)
    check_attention_arguments(attention_mask, other_arguments)
    sequence_group = layout.sequence_group
    if sequence_group is not None:
        query, key, value = map(sequence_group.exchange_tokens_for_heads, (query, key, value))
    states = (query, key, value)
    if layout.calls is None:
        output = _attend_by_flex(layout, states, scaling, dropout)
    else:
        output = _attend_by_calls(layout.calls, states, scaling, dropout)
    if sequence_group is not None:
        output = sequence_group.exchange_heads_for_tokens(output)
    return output, None


def check_attention_window(window: int | None, layout: PackedLayout) -> None:
    """Raise ``UnsupportedAttentionError`` if a row or branch exceeds ``window`` tokens."""
    if window is not None and layout.longest_context > window:
        raise UnsupportedAttentionError(
            f"a row or branch of {layout.longest_context} tokens (a branch includes its prefix) is "
            f"longer than the sliding window of {window} tokens; packed rows support no sliding "
            "windows"
        )


def check_attention_arguments(
    mask: torch.Tensor | None, other_arguments: Mapping[str, object]
) -> None:
    """Raise ``UnsupportedAttentionError`` for a mask and arguments that would change the result."""
    if mask is not None:
        # transformers makes no mask for a custom attention, so the model itself made this mask.
        raise UnsupportedAttentionError(
            "the model makes a custom attention mask, which packed rows do not apply"
        )
    for name, value in other_arguments.items():
        if value is None or name in IGNORED_ARGUMENTS or (name == "is_causal" and value is True):
            continue
        description = UNSUPPORTED_ARGUMENTS.get(
            name, "an unknown argument, which may change the result"
        )
        raise UnsupportedAttentionError(f"its attention is called with {name}: {description}")


# Queries, keys and values of one sequence, each [heads, tokens, head size].
States = tuple[torch.Tensor, torch.Tensor, torch.Tensor]
Attend = Callable[..., torch.Tensor]  # scaled dot-product attention


def _attend_by_calls(
    calls: AttentionCalls, states: States, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Return the attention output [1, T, H, D] of several calls of scaled dot-product attention."""
    query, key, value = states
    queries_per_key = query.shape[1] // key.shape[1]
    if queries_per_key > 1:  # grouped-query attention: several query heads share a key head
        key = key.repeat_interleave(queries_per_key, 1)
        value = value.repeat_interleave(queries_per_key, 1)
    states = (query[0], key[0], value[0])
    attend = partial(F.scaled_dot_product_attention, scale=scaling, dropout_p=dropout)
    outputs = [*_attend_rows(calls, states, attend)]
    outputs += _attend_suffixes(calls, states, attend)
    outputs += _attend_blocks(calls, states, attend)
    return torch.cat(outputs)[None]


def _attend_rows(calls: AttentionCalls, states: States, attend: Attend) -> Iterator[torch.Tensor]:
    """Yield the attention output [tokens, H, D] of each group of rows without a shared prefix."""
    # One split, not a slice per group: the gradient of a slice is a tensor of all T tokens.
    num_remaining_tokens = states[0].shape[1] - sum(calls.row_sizes)
    split_states = (x.split([*calls.row_sizes, num_remaining_tokens], dim=1) for x in states)
    for group, *rows in zip([*calls.row_groups, None], *split_states, strict=True):
        if group is not None:
            yield _attend_group(group, [_pad_rows(x, group) for x in rows], attend)


def _pad_rows(states: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """Return the G rows of ``group`` in ``states`` [H, T, D], padded to length L: [G, H, L, D]."""
    shape = (group.num_rows, group.row_length)
    if group.gather_positions is None:
        return states.unflatten(1, shape).transpose(0, 1)
    tokens = states.transpose(0, 1).index_select(0, group.gather_positions)
    return tokens.unflatten(0, shape).transpose(1, 2)


def _attend_group(group: RowGroup, rows: list[torch.Tensor], attend: Attend) -> torch.Tensor:
    """Return the causal attention output [tokens, H, D] of the padded rows of ``group``.

    ``rows`` are their queries, keys and values, each [G, H, L, D]. The outputs of padding and of
    shared prefixes are dropped.
    """
    output = attend(*rows, is_causal=True)
    tokens = output.transpose(1, 2).flatten(0, 1)
    return tokens if group.kept_positions is None else tokens.index_select(0, group.kept_positions)


def _attend_suffixes(
    calls: AttentionCalls, states: States, attend: Attend
) -> Iterator[torch.Tensor]:
    """Yield the attention output [tokens, H, D] of each causal call for long ends of rows.

    An end is the last tokens of a row whose prefix is shared with another row. Long ends are
    computed together with their prefix, whose outputs are dropped.
    """
    suffix_positions = calls.suffix_positions
    if suffix_positions is None:
        return
    group_sizes = [group.num_rows * group.row_length for group in calls.suffix_groups]
    split_states = (
        x.transpose(0, 1).index_select(0, suffix_positions).split(group_sizes) for x in states
    )
    for group, *rows in zip(calls.suffix_groups, *split_states, strict=True):
        shape = (group.num_rows, group.row_length)
        yield _attend_group(group, [x.unflatten(0, shape).transpose(1, 2) for x in rows], attend)


def _attend_blocks(calls: AttentionCalls, states: States, attend: Attend) -> Iterator[torch.Tensor]:
    """Yield the attention output [tokens, H, D] of each masked call for short ends of rows.

    An end is the last tokens of a row whose prefix is shared with another row. A block contains
    the queries of one or more short ends.
    """
    if calls.block_key_positions is None:
        return
    query, key, value = states
    num_queries, num_keys = zip(*(mask.shape for mask in calls.block_masks), strict=True)
    queries = query.split([query.shape[1] - sum(num_queries), *num_queries], dim=1)[1:]
    keys, values = (
        x.transpose(0, 1).index_select(0, calls.block_key_positions).split(num_keys)
        for x in (key, value)
    )
    blocks = zip(queries, keys, values, calls.block_masks, strict=True)
    for block_query, block_keys, block_values, mask in blocks:
        output = attend(
            block_query[None],
            block_keys.transpose(0, 1)[None],
            block_values.transpose(0, 1)[None],
            attn_mask=mask.to(query.dtype),
        )
        yield output[0].transpose(0, 1)


def register_packed_attention() -> None:
    """Register ``verl_packed`` and ``verl_packed_flex`` as ``attn_implementation``."""
    from transformers import AttentionInterface

    AttentionInterface.register(FLEX_ATTENTION, packed_attention)
    # torch.compile must skip this function: it would compile it again for every new layout.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))


# ---- one call of FlexAttention -------------------------------------------------------------------
#
# Packed rows form a tree, because a prefix that several rows share is packed once. A token attends
# to the earlier tokens of its row. ``_attend_by_calls`` needs several attention calls for this.
# Here one mask function for a query token q and a key token k replaces them:
#
#     q attends to k    if enter[k] <= enter[q] < leave[k]
#
# The numbers ``enter`` and ``leave`` come from a depth-first traversal of the tree
# (``number_tokens_depth_first``).
#
# Blocks of token pairs that are completely masked are skipped. On a GPU the call is compiled with
# the mask function. On a CPU the call computes all pairs, and torch does not support gradients
# there. The CPU call is only used to check that both kinds of attention agree.

# Largest number of graphs of a compiled function. Beyond it, torch computes without compilation,
# and FlexAttention then stores the logits of all pairs of tokens. torch's default of 8 is too
# small: there are graphs for one token, one block of 128 tokens and several blocks, each with and
# without gradient.
MAX_GRAPHS = 64
BLOCK_SIZE = 128  # tokens of a block, as in torch's ``create_block_mask``
# Pairs of tokens that are compared at once. ``create_block_mask`` compares all pairs at once, which
# takes about 10 bytes per pair: too much memory for long sequences.
MAX_PAIRS = 2**24


def with_block_mask(layout: PackedLayout, device: torch.device) -> PackedLayout:
    """Return the layout with a FlexAttention block mask, which all layers of a forward share.

    The mask equals that of torch's ``create_block_mask``. The T tokens are N blocks of
    ``BLOCK_SIZE`` tokens, of which the last is padded. The mask lists which blocks of keys a block
    of queries sees in part, where the mask function is evaluated, and which completely.
    """
    from torch.nn.attention.flex_attention import BlockMask

    enter, leave = (
        torch.from_numpy(numbers).to(device) for numbers in number_tokens_depth_first(layout)
    )

    def is_visible(
        _batch: torch.Tensor, _head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return (enter[key] <= enter[query]) & (enter[query] < leave[key])

    num_tokens = len(enter)
    num_pairs = _count_visible_pairs(is_visible, torch.arange(num_tokens, device=device))
    is_full = num_pairs == BLOCK_SIZE**2
    block_mask = BlockMask.from_kv_blocks(
        *_list_key_blocks((num_pairs > 0) & ~is_full),
        *_list_key_blocks(is_full),
        BLOCK_SIZE=BLOCK_SIZE,
        mask_mod=is_visible,
        seq_lengths=(num_tokens, num_tokens),
    )
    return replace(layout, block_mask=block_mask)


def _count_visible_pairs(
    is_visible: Callable[..., torch.Tensor], positions: torch.Tensor
) -> torch.Tensor:
    """Return the number of visible pairs of tokens in each pair of blocks, [N, N]."""
    num_tokens = len(positions)
    blocks_at_once = max(1, MAX_PAIRS // (BLOCK_SIZE * num_tokens))
    pair_counts = []
    for queries in positions.split(blocks_at_once * BLOCK_SIZE):
        # The mask function ignores batch and head, so position 0 stands for them.
        visible_mask = is_visible(positions[0], positions[0], queries[:, None], positions)
        visible_mask = F.pad(
            visible_mask, (0, -num_tokens % BLOCK_SIZE, 0, -len(queries) % BLOCK_SIZE)
        )
        pair_counts.append(
            visible_mask.unflatten(1, (-1, BLOCK_SIZE)).unflatten(0, (-1, BLOCK_SIZE)).sum((1, 3))
        )
    return torch.cat(pair_counts)


def _list_key_blocks(is_listed: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the number of key blocks of each query block, [1, 1, N], and their indices.

    ``is_listed`` [N, N] marks them. The indices [1, 1, N, N] of a query block begin with those that
    are marked, in ascending order.
    """
    num_listed = is_listed.sum(-1, dtype=torch.int32)
    indices = is_listed.char().argsort(dim=-1, descending=True, stable=True).int()
    return num_listed[None, None], indices[None, None]


def _attend_by_flex(
    layout: PackedLayout, states: States, scaling: float | None, dropout: float
) -> torch.Tensor:
    """Return the attention output [1, T, H, D] of one call of FlexAttention."""
    from torch.nn.attention.flex_attention import flex_attention

    if dropout:
        raise UnsupportedAttentionError(
            f"attention dropout={dropout}: FlexAttention has no dropout; allowed: 0"
        )
    query, key, value = states
    has_shared_keys = query.shape[1] != key.shape[1]
    # Inside a compiled layer, FlexAttention is compiled as part of the layer.
    if query.is_cuda and not torch.compiler.is_compiling():
        attention_function = _compile_flex_attention()
    else:
        attention_function = flex_attention
    output = attention_function(
        query, key, value, block_mask=layout.block_mask, scale=scaling, enable_gqa=has_shared_keys
    )
    return output.transpose(1, 2)


@cache
def _compile_flex_attention() -> Callable[..., Any]:
    from torch.nn.attention.flex_attention import flex_attention

    # dynamic=True, because the number of tokens differs between micro-batches
    increase_recompile_limit()
    return torch.compile(flex_attention, dynamic=True)


def increase_recompile_limit() -> None:
    """Let ``torch.compile`` make up to ``MAX_GRAPHS`` graphs of one function."""
    from torch._dynamo import config

    config.recompile_limit = max(MAX_GRAPHS, config.recompile_limit)
