"""Attention over packed rows: many rows in one sequence of tokens, each attending to itself alone.

A micro-batch is one sequence ``[1, T]``: the rows' real tokens one after another (the trunk), then,
optionally, the branches of all rows::

    | row 0 | row 1 | row 2 |  branches of row 0 | branches of row 1 | ...
      causal  causal  causal    trunk[0:start) of their row + themselves, causally

``PackedLayout`` says where everything lies. It reaches the attention layers as keyword argument
``layout`` through transformers' ``AttentionInterface``, so every architecture that uses the
interface works unchanged. Neither padding nor a ``[T, T]`` mask is ever made: each row is one
causal call of scaled dot-product attention, rows of similar length share a call, and a branch block
is one call against the keys it may see.
"""

from dataclasses import dataclass, field
from itertools import accumulate

import torch
import torch.nn.functional as F

PACKED_ATTENTION = "verl_packed"
# Share of padding up to which rows are attended to in one call. On a CPU that saves a seventh of
# the time of rows of about 200 tokens; with more padding, or longer rows, there is nothing to gain.
MAX_ROW_PADDING = 0.05


@dataclass(frozen=True)
class RowGroup:
    """Rows of similar length that share one attention call.

    ``gather`` [G * L] packed positions of the padded rows (None: a single row, taken as a slice);
    ``scatter`` [sum of lengths] positions of the real tokens in the padded result.
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
    prefix)`` and the queries' own positions. ``mask`` [end - start, prefix + end - start] is added
    to the logits: 0 or -inf.
    """

    start: int
    end: int
    trunk: int
    prefix: int
    mask: torch.Tensor


@dataclass(frozen=True)
class PackedLayout:
    """Which packed token may see which: trunk rows of ``lengths`` and, after them, ``blocks`` of
    branch tokens.
    """

    lengths: tuple[int, ...]
    groups: tuple[RowGroup, ...]
    blocks: tuple[BranchBlock, ...] = field(default=())

    @property
    def trunk(self) -> int:
        """Number of trunk tokens."""
        return sum(self.lengths)


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
    if len(lengths) == 1:
        return RowGroup(start, end, 1, longest)
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


def packed_attention(
    module: torch.nn.Module,  # noqa: ARG001  given by transformers
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,  # noqa: ARG001  given by transformers; layout replaces it
    scaling: float | None = None,
    dropout: float = 0.0,
    layout: PackedLayout | None = None,
    sliding_window: int | None = None,
    **_others: object,
) -> tuple[torch.Tensor, None]:
    """Attention function for ``AttentionInterface``.

    query [1, H, T, D], key and value [1, K, T, D] with H a multiple of K; returns ([1, T, H, D],
    None). Raises ``ValueError`` without a layout, and for a sliding window shorter than a row.
    """
    if layout is None:
        raise ValueError("a model with packed attention is called without layout=PackedLayout(...)")
    if sliding_window is not None and max(layout.lengths, default=0) > sliding_window:
        raise ValueError(
            f"rows longer than the sliding window of {sliding_window} tokens cannot be packed"
        )
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:  # grouped-query attention: several query heads share a key head
        key = key.repeat_interleave(repeats, 1)
        value = value.repeat_interleave(repeats, 1)
    parts = [_attend_rows(group, query, key, value, scaling, dropout) for group in layout.groups]
    parts += [_attend_block(block, query, key, value, scaling, dropout) for block in layout.blocks]
    return torch.cat(parts, dim=1), None


def _attend_rows(
    group: RowGroup,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scaling: float | None,
    dropout: float,
) -> torch.Tensor:
    """Causal attention of one row group; returns [1, tokens, H, D]."""
    if group.gather is None or group.scatter is None:
        one = [x[:, :, group.start : group.end] for x in (query, key, value)]
        out = F.scaled_dot_product_attention(*one, is_causal=True, scale=scaling, dropout_p=dropout)
        return out.transpose(1, 2)
    rows = [_padded_rows(x, group, group.gather) for x in (query, key, value)]
    out = F.scaled_dot_product_attention(*rows, is_causal=True, scale=scaling, dropout_p=dropout)
    return out.transpose(1, 2).flatten(0, 1).index_select(0, group.scatter)[None]


def _padded_rows(x: torch.Tensor, group: RowGroup, gather: torch.Tensor) -> torch.Tensor:
    """The group's rows of ``x`` [1, H, T, D] as a padded batch [rows, H, length, D]."""
    tokens = x[0].transpose(0, 1).index_select(0, gather)
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

    AttentionInterface.register(PACKED_ATTENTION, packed_attention)
