"""Attention over packed rows: many rows in one sequence of tokens, each attending to itself alone.

A micro-batch is one sequence ``[1, T]``: the rows' real tokens one after another (the trunk), then,
optionally, the branches of all rows::

    | row 0 | row 1 | row 2 |  branches of row 0 | branches of row 1 | ...
      causal  causal  causal    trunk[0:start) of their row + themselves, causally

``PackedLayout`` says where everything lies. It reaches the attention layers as keyword argument
``layout`` through transformers' ``AttentionInterface``, so architectures that use the interface and
add nothing to plain causal attention work unchanged; ``verl.models.architecture`` tells which do.
Neither padding nor a ``[T, T]`` mask is ever made: each row is one causal call of scaled
dot-product attention, rows of similar length share a call, and a branch block is one call against
the keys it may see. ``verl.models.flex_attention`` computes the same in one call.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

if TYPE_CHECKING:  # the first brings torch's compiler along, the second imports this module
    from torch.nn.attention.flex_attention import BlockMask

    from verl.models.sequence_parallel import SequenceGroup

PACKED_ATTENTION = "verl_packed"
# Share of padding up to which rows are attended to in one call. On a CPU that saves a seventh of
# the time of rows of about 200 tokens; with more padding, or longer rows, there is nothing to gain.
MAX_ROW_PADDING = 0.05
# What reaches an attention function beside what it computes with, and changes no result.
HARMLESS = frozenset(
    (
        "position_ids",
        "use_cache",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    )
)
# What is known not to be computed here.
KNOWN_ARGUMENTS = {
    "s_aux": "attention sinks, which take a share of every token's attention",
    "softcap": "a soft cap on the attention's logits",
    "position_bias": "a bias by position on the attention's logits",
    "is_causal": "tokens that see what comes after them",
}


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length that share one attention call.

    ``gather`` [G * L] packed positions of the padded rows, ``scatter`` [sum of lengths] positions
    of the real tokens in the padded result; both None for rows of one length, which are a slice.
    """

    start: int
    end: int
    rows: int
    length: int
    gather: torch.Tensor | None = None
    scatter: torch.Tensor | None = None


@dataclass(frozen=True)
class BranchBlock:
    """Consecutive branch tokens that share one attention call.

    Queries are packed positions ``[start, end)``; keys are trunk positions ``[trunk, trunk +
    prefix)`` and the queries' own positions. ``sizes`` are the tokens of its branches, which go on
    from the first ``starts`` of the row. ``mask`` [end - start, prefix + end - start] is added to
    the logits: 0 or -inf; None until ``with_masks``.
    """

    start: int
    end: int
    trunk: int
    prefix: int
    sizes: tuple[int, ...]
    starts: tuple[int, ...]
    mask: torch.Tensor | None = None


@dataclass(frozen=True)
class PackedLayout:
    """Which packed token may see which: trunk rows of ``lengths`` and, after them, ``blocks`` of
    branch tokens.

    ``longest_branch`` is the largest number of tokens that a branch's last token sees, the row's
    prefix and itself included. ``flex`` says all of it once more for FlexAttention, where that
    computes, and ``group`` whose ranks compute together.
    """

    lengths: tuple[int, ...]
    groups: tuple[RowGroup, ...]
    blocks: tuple[BranchBlock, ...] = field(default=())
    longest_branch: int = 0
    flex: "BlockMask | None" = None
    group: "SequenceGroup | None" = None

    @property
    def trunk(self) -> int:
        """Number of trunk tokens."""
        return sum(self.lengths)

    @property
    def longest(self) -> int:
        """The largest number of tokens that any token sees, itself included."""
        return max(self.longest_branch, *self.lengths)


class UnsupportedAttention(ValueError):
    """What a model asks of its attention and packed rows do not compute."""


def layout_of_rows(lengths: list[int], device: torch.device | str = "cpu") -> PackedLayout:
    """Layout of rows with the given lengths (tokens), without branches; neighbours of similar
    length share a call.
    """
    offsets = [0, *accumulate(lengths)]
    groups: list[RowGroup] = []
    first = 0
    for i in range(1, len(lengths) + 1):
        if i == len(lengths) or _padding(lengths[first : i + 1]) > MAX_ROW_PADDING:
            groups.append(_row_group(lengths[first:i], offsets[first], device))
            first = i
    return PackedLayout(tuple(lengths), tuple(groups))


def _padding(lengths: list[int]) -> float:
    return 1.0 - sum(lengths) / (len(lengths) * max(lengths))


def _row_group(lengths: list[int], start: int, device: torch.device | str) -> RowGroup:
    end = start + sum(lengths)
    longest = max(lengths)
    if min(lengths) == longest:
        return RowGroup(start, end, len(lengths), longest)
    size = torch.tensor(lengths)
    column = torch.arange(longest)
    real = column[None, :] < size[:, None]  # [G, L]
    first = torch.tensor([0, *accumulate(lengths)][:-1])
    # a padded key position repeats the row's last token; causality hides it from every real query
    gather = start + first[:, None] + torch.minimum(column[None, :], size[:, None] - 1)
    scatter = real.reshape(-1).nonzero().squeeze(-1)
    return RowGroup(
        start, end, len(lengths), longest, gather.reshape(-1).to(device), scatter.to(device)
    )


def with_masks(
    layout: PackedLayout, device: torch.device, dtype: torch.dtype = torch.float32
) -> PackedLayout:
    """The layout with the masks of its branch blocks, once for all layers of a forward."""
    blocks = [replace(block, mask=_branch_mask(block).to(device, dtype)) for block in layout.blocks]
    return replace(layout, blocks=tuple(blocks))


def _branch_mask(block: BranchBlock) -> torch.Tensor:
    sizes = torch.tensor(block.sizes)
    starts = torch.tensor(block.starts)
    owner = torch.repeat_interleave(torch.arange(len(sizes)), sizes)  # [Q], the branch of a query
    order = torch.arange(len(owner))
    # a query sees its row up to the start of its branch, and of the block its own branch causally
    in_row = torch.arange(block.prefix)[None, :] < starts[owner][:, None]
    in_branch = (owner[:, None] == owner[None, :]) & (order[:, None] >= order[None, :])
    visible = torch.cat([in_row, in_branch], dim=1)
    return torch.zeros(visible.shape).masked_fill_(~visible, float("-inf"))


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
    **others: object,
) -> tuple[torch.Tensor, None]:
    """Attention function for ``AttentionInterface``.

    query [1, H, T, D], key and value [1, K, T, D] with H a multiple of K; returns ([1, T, H, D],
    None). Raises ``UnsupportedAttention`` without a layout, for a row or branch that a sliding
    window would cut, and for every argument that would change the result.
    """
    if layout is None:
        raise UnsupportedAttention("packed attention is called without layout=PackedLayout(...)")
    check_window(sliding_window, layout)
    refuse(attention_mask, others)
    if layout.group is not None:
        query, key, value = map(layout.group.to_heads, (query, key, value))
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # grouped-query attention: several query heads share a key head
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    parts = [_attend_rows(group, query, key, value, scaling, dropout) for group in layout.groups]
    parts += [_attend_block(block, query, key, value, scaling, dropout) for block in layout.blocks]
    out = torch.cat(parts, dim=1)
    return (out if layout.group is None else layout.group.to_tokens(out)), None


def check_window(window: int | None, layout: PackedLayout) -> None:
    """Raise ``UnsupportedAttention`` where a token of ``layout`` would not see all that is before
    it.
    """
    if window is not None and layout.longest > window:
        raise UnsupportedAttention(
            f"a row or branch of {layout.longest} tokens (a branch counts with what it continues) "
            f"is longer than the sliding window of {window} tokens, and packed rows compute no "
            "windows"
        )


def refuse(mask: torch.Tensor | None, others: Mapping[str, object]) -> None:
    """Raise ``UnsupportedAttention`` for what the model wants beside scaled dot products."""
    if mask is not None:
        # transformers makes none for a custom attention: this one is the model's own
        raise UnsupportedAttention("it makes an attention mask of its own, which is not applied")
    for name, value in others.items():
        if value is None or name in HARMLESS or (name == "is_causal" and value is True):
            continue
        why = KNOWN_ARGUMENTS.get(name, "what it would change is not known")
        raise UnsupportedAttention(f"its attention is called with {name}: {why}")


def _attend_rows(
    group: RowGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Causal attention of one row group; returns [1, tokens, H, D]."""
    cut = _even_rows if group.gather is None else _padded_rows
    rows = [cut(x, group) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, dropout_p=dropout)
    tokens = out.transpose(1, 2).flatten(0, 1)
    return (tokens if group.scatter is None else tokens.index_select(0, group.scatter))[None]


def _even_rows(x: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """The group's rows of ``x`` [1, H, T, D], all of one length, as [rows, H, length, D]."""
    tokens = x[0, :, group.start : group.end]
    return tokens.unflatten(1, (group.rows, group.length)).transpose(0, 1)


def _padded_rows(x: torch.Tensor, group: RowGroup) -> torch.Tensor:
    """The group's rows of ``x`` [1, H, T, D] as a padded batch [rows, H, length, D]."""
    assert group.gather is not None
    tokens = x[0].transpose(0, 1).index_select(0, group.gather)
    return tokens.unflatten(0, (group.rows, group.length)).transpose(1, 2)


def _attend_block(
    block: BranchBlock,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Attention of one block of branch tokens; returns [1, tokens, H, D]."""
    own = slice(block.start, block.end)
    seen = slice(block.trunk, block.trunk + block.prefix)
    keys = torch.cat([key[:, :, seen], key[:, :, own]], dim=2)
    values = torch.cat([value[:, :, seen], value[:, :, own]], dim=2)
    assert block.mask is not None  # ``with_masks`` comes before the layers
    mask = block.mask.to(query.dtype)
    out = F.scaled_dot_product_attention(
        query[:, :, own], keys, values, attn_mask=mask, scale=scaling, dropout_p=dropout
    )
    return out.transpose(1, 2)


def register_packed_attention() -> None:
    """Make ``attn_implementation="verl_packed"`` known to transformers; calling it again changes
    nothing.
    """
    from transformers import AttentionInterface

    # A layer that is compiled calls it as it is: traced, it would be compiled anew for the numbers
    # of every layout.
    AttentionInterface.register(PACKED_ATTENTION, torch.compiler.disable(packed_attention))
