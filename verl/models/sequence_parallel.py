"""Sequence parallelism (Ulysses): several ranks compute one packed sequence.

Each rank has a slice of the tokens. For attention, each rank has all tokens of a part of the heads.

    rank 0  tokens [0, t)  ──┐            ┌─ heads [0, h)  ──┐            ┌── tokens [0, t)
                             ├ all-to-all ┤    attention     ├ all-to-all ┤
    rank 1  tokens [t, 2t) ──┘            └─ heads [h, 2h) ──┘            └── tokens [t, 2t)

The ranks of a group take turns. In each turn all ranks compute, but rows, targets and loss are
those of one rank. A row belongs to one rank throughout, so sums over ranks count it once. The
gradients of the slices on all ranks add up to the gradient of the row.
"""

from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import once_differentiable

from verl.models.backbone import find_length_dependent_rope, last_hidden
from verl.models.packed_attention import BranchBlock, PackedLayout, layout_of_rows

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

KEY = "ulysses_sequence_parallel_size"


class SequenceGroup:
    """Neighbouring ranks that compute each other's rows together.

    ``owner`` is the index in the group of the rank whose rows the current pass computes. ``tokens``
    is the number of tokens of these rows.
    """

    def __init__(self, ranks: dist.ProcessGroup, device: str) -> None:
        self.ranks = ranks
        self.size = dist.get_world_size(ranks)
        self.index = dist.get_rank(ranks)
        self.device = device
        self.owner = 0
        self.tokens = 0

    def begin_turn(self, owner: int) -> bool:
        """Begin a pass for the rows of rank ``owner`` of the group. Return True for this rank."""
        self.owner = owner
        return owner == self.index

    def compute_hidden(
        self,
        backbone: nn.Module,
        inputs: tuple[torch.Tensor, torch.Tensor, PackedLayout] | None,
        window: int | None,
    ) -> torch.Tensor:
        """Return the last hidden states [T, H] of the owner's packed sequence, on every rank.

        ``inputs`` are ids [T], positions [T] and layout on the owner, None on other ranks.
        """
        ids, positions, layout = self._broadcast_inputs(inputs)
        self.tokens = len(ids)
        layout = replace(layout, group=self)
        local_hidden = last_hidden(
            backbone, self._slice_tokens(ids), self._slice_tokens(positions), layout, window
        )
        # Send this slice to every rank. Backward sums the gradients of the copies.
        copies = local_hidden.expand(self.size, *local_hidden.shape)
        slices: torch.Tensor = _ExchangeParts.apply(copies, self.ranks)
        return slices.flatten(0, 1)[: self.tokens]

    def _broadcast_inputs(
        self, inputs: tuple[torch.Tensor, torch.Tensor, PackedLayout] | None
    ) -> tuple[torch.Tensor, torch.Tensor, PackedLayout]:
        numbers = torch.zeros(0, dtype=torch.long)
        if inputs is not None:
            ids, positions, layout = inputs
            header = torch.tensor(_encode_layout(layout))
            numbers = torch.cat([torch.tensor([len(header)]), header, ids.cpu(), positions.cpu()])
        size = torch.tensor([len(numbers)], device=self.device)
        dist.broadcast(size, group=self.ranks, group_src=self.owner)
        # All ranks need a buffer of the same size. The broadcast overwrites it.
        numbers = numbers.new_zeros(int(size)) if inputs is None else numbers
        numbers = numbers.to(self.device)
        dist.broadcast(numbers, group=self.ranks, group_src=self.owner)
        if inputs is not None:
            return inputs
        header_end = 1 + int(numbers[0])
        ids, positions = numbers[header_end:].chunk(2)
        return ids, positions, _decode_layout(numbers[1:header_end].tolist(), self.device)

    def _slice_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of ``values`` [T], padded at the end to equal length."""
        length = -(-len(values) // self.size)
        padded = F.pad(values, (0, length * self.size - len(values)))
        return padded[self.index * length :][:length]

    def to_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange all heads of this rank's tokens [1, A, t, D] for its heads of all tokens.

        The result is [1, A / size, T, D]. If there are fewer heads than ranks, several ranks get
        the same head.
        """
        repeats = max(1, self.size // states.shape[1])
        heads = states[0].repeat_interleave(repeats, 0).unflatten(0, (self.size, -1))
        exchanged: torch.Tensor = _ExchangeParts.apply(heads, self.ranks)
        return exchanged.transpose(0, 1).flatten(1, 2)[None, :, : self.tokens]

    def to_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange this rank's heads of all tokens [1, T, A / size, D] for all heads of its tokens.

        The result is [1, t, A, D].
        """
        length = -(-self.tokens // self.size)
        padded = F.pad(states[0], (0, 0, 0, 0, 0, length * self.size - self.tokens))
        slices = padded.unflatten(0, (self.size, length))
        exchanged: torch.Tensor = _ExchangeParts.apply(slices, self.ranks)
        return exchanged.transpose(0, 1).flatten(1, 2)[None]


def create_sequence_group(
    config: "PreTrainedConfig", size: int, device: str, timeout: timedelta
) -> SequenceGroup | None:
    """Create the group of ``size`` ranks that this rank is in, None for ``size=1``.

    A collective call. Raises ``ValueError`` if ``size`` does not fit the number of ranks or heads,
    or if the rotary embeddings depend on the sequence length.
    """
    if size == 1:
        return None
    text = config.get_text_config()
    rope_type = find_length_dependent_rope(config)
    if rope_type:
        raise ValueError(
            f"{KEY}={size}: the rotary embeddings of the model ({rope_type}) depend on the longest "
            f"position, which is unknown to a slice of the tokens; allowed: 1; fix: {KEY}=1"
        )
    heads: int = text.num_attention_heads
    keys: int = getattr(text, "num_key_value_heads", None) or heads
    if heads % size or (keys % size and size % keys):
        allowed = [n for n in range(1, heads + 1) if not heads % n and not (keys % n and n % keys)]
        raise ValueError(
            f"{KEY}={size}: the model has {heads} attention heads and {keys} key heads, which "
            f"cannot be divided equally; allowed: {allowed}; fix: {KEY}={max(allowed)} or less"
        )
    world = dist.get_world_size()
    if world % size:
        raise ValueError(
            f"{KEY}={size} does not divide the {world} ranks; allowed: divisors of {world}; "
            f"fix: {KEY}=1"
        )
    ranks, _ = dist.new_subgroups(size, timeout=timeout)
    assert isinstance(ranks, dist.ProcessGroup)  # every rank is in one of the groups
    return SequenceGroup(ranks, device)


def _encode_layout(layout: PackedLayout) -> list[int]:
    """Encode a layout as integers.

    The order is: number of rows, their lengths, and then for each block of branches ``start``,
    ``trunk``, number of branches, their sizes, their starts.
    """
    numbers = [len(layout.lengths), *layout.lengths]
    for block in layout.blocks:
        numbers += [block.start, block.trunk, len(block.sizes), *block.sizes, *block.starts]
    return numbers


def _decode_layout(numbers: Sequence[int], device: str) -> PackedLayout:
    rows = numbers[0]
    layout = layout_of_rows(list(numbers[1 : 1 + rows]), device)
    blocks: list[BranchBlock] = []
    longest_end = 0
    at = 1 + rows
    while at < len(numbers):
        block_start, trunk, count = numbers[at : at + 3]
        sizes = tuple(numbers[at + 3 : at + 3 + count])
        branch_starts = tuple(numbers[at + 3 + count : at + 3 + 2 * count])
        blocks.append(BranchBlock(block_start, trunk, sizes, branch_starts))
        longest_end = max(longest_end, *map(sum, zip(sizes, branch_starts, strict=True)))
        at += 3 + 2 * count
    return replace(layout, blocks=tuple(blocks), longest_branch=longest_end)


class _ExchangeParts(torch.autograd.Function):
    """All-to-all of ``parts`` [size, ...]: part i is sent to rank i and replaced by the part that
    rank i sent. Backward exchanges the gradients in the same way.
    """

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return _all_to_all(parts, ranks)

    @staticmethod
    @once_differentiable  # hides the parameters' names from the type checker
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  see above
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.ranks), None


def _all_to_all(parts: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received_parts = torch.empty_like(parts)
    dist.all_to_all_single(received_parts, parts, group=ranks)
    return received_parts
