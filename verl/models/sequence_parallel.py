"""Sequence parallelism (Ulysses): several ranks compute one packed sequence.

Each rank has a slice of the tokens. For attention, each rank has all tokens of a part of the heads.

    rank 0  tokens [0, t)  ──┐            ┌─ heads [0, h)  ──┐            ┌── tokens [0, t)
                             ├ all-to-all ┤    attention     ├ all-to-all ┤
    rank 1  tokens [t, 2t) ──┘            └─ heads [h, 2h) ──┘            └── tokens [t, 2t)

A group of n ranks runs n passes, one after the other. In each pass all ranks work on the rows,
targets and loss of one rank, the owner. A row belongs to one rank only, so sums of metrics over
ranks count it once. The gradients of the slices on all ranks add up to the gradient of the row.
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

from verl.models.backbone import compute_packed_hidden, find_length_dependent_rope
from verl.models.packed_layout import PackedLayout

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

CONFIG_KEY = "ulysses_sequence_parallel_size"


class SequenceGroup:
    """Neighbouring ranks that compute each other's rows together.

    ``owner`` is the index in the group of the rank whose rows the current pass computes.
    ``num_tokens`` is the number of tokens of these rows.
    """

    def __init__(self, ranks: dist.ProcessGroup, device: str) -> None:
        self.ranks = ranks
        self.size = dist.get_world_size(ranks)
        self.rank_in_group = dist.get_rank(ranks)
        self.device = device
        self.owner = 0
        self.num_tokens = 0

    def begin_pass_for_rank(self, owner: int) -> bool:
        """Begin a pass for the rows of rank ``owner``; return True if it is this rank."""
        self.owner = owner
        return owner == self.rank_in_group

    def compute_hidden(
        self,
        backbone: nn.Module,
        inputs: tuple[torch.Tensor, torch.Tensor, PackedLayout] | None,
        window: int | None,
    ) -> torch.Tensor:
        """Return the last hidden states [T, H] of the owner's sequence, on every rank.

        ``inputs`` are ids [T], positions [T] and layout on the owner, None on other ranks.
        """
        ids, positions, layout = self._broadcast_inputs(inputs)
        self.num_tokens = len(ids)
        layout = replace(layout, sequence_group=self)
        local_hidden = compute_packed_hidden(
            backbone, self._slice_tokens(ids), self._slice_tokens(positions), layout, window
        )
        # Send the hidden states of this slice to every rank. Backward sums the gradients of the
        # copies.
        copies = local_hidden.expand(self.size, *local_hidden.shape)
        slices: torch.Tensor = _ExchangeParts.apply(copies, self.ranks)
        return slices.flatten(0, 1)[: self.num_tokens]

    def _broadcast_inputs(
        self, inputs: tuple[torch.Tensor, torch.Tensor, PackedLayout] | None
    ) -> tuple[torch.Tensor, torch.Tensor, PackedLayout]:
        message = torch.zeros(0, dtype=torch.long)
        if inputs is not None:
            ids, positions, layout = inputs
            encoded_layout = torch.tensor(_encode_layout(layout))
            message = torch.cat(
                [torch.tensor([len(encoded_layout)]), encoded_layout, ids.cpu(), positions.cpu()]
            )
        message_length = torch.tensor([len(message)], device=self.device)
        dist.broadcast(message_length, group=self.ranks, group_src=self.owner)
        # A rank without inputs receives the message in a buffer of the same length.
        message = message.new_zeros(int(message_length)) if inputs is None else message
        message = message.to(self.device)
        dist.broadcast(message, group=self.ranks, group_src=self.owner)
        if inputs is not None:
            return inputs
        layout_end = 1 + int(message[0])
        ids, positions = message[layout_end:].chunk(2)
        return ids, positions, _decode_layout(message[1:layout_end].tolist())

    def _slice_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return this rank's slice of ``values`` [T], padded at the end to equal length."""
        slice_length = -(-len(values) // self.size)
        padded_values = F.pad(values, (0, slice_length * self.size - len(values)))
        return padded_values[self.rank_in_group * slice_length :][:slice_length]

    def exchange_tokens_for_heads(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange data so that this rank has all tokens for its part of the heads.

        ``states`` [1, A, t, D] are all A heads for the t tokens of this rank. The result for all T
        tokens is [1, A / size, T, D], where ``size`` is the number of ranks. If there are fewer
        heads than ranks, several ranks get the same head.
        """
        copies_per_head = max(1, self.size // states.shape[1])
        heads = states[0].repeat_interleave(copies_per_head, 0).unflatten(0, (self.size, -1))
        received_heads: torch.Tensor = _ExchangeParts.apply(heads, self.ranks)
        return received_heads.transpose(0, 1).flatten(1, 2)[None, :, : self.num_tokens]

    def exchange_heads_for_tokens(self, states: torch.Tensor) -> torch.Tensor:
        """Exchange data so that this rank has all heads for its part of the tokens.

        ``states`` [1, T, A / size, D] are all T tokens for this rank's part of the A heads. The
        result is [1, t, A, D] for the t tokens of this rank.
        """
        slice_length = -(-self.num_tokens // self.size)
        padded_states = F.pad(
            states[0], (0, 0, 0, 0, 0, slice_length * self.size - self.num_tokens)
        )
        slices = padded_states.unflatten(0, (self.size, slice_length))
        received_tokens: torch.Tensor = _ExchangeParts.apply(slices, self.ranks)
        return received_tokens.transpose(0, 1).flatten(1, 2)[None]


def create_sequence_group(
    config: "PreTrainedConfig", size: int, device: str, timeout: timedelta
) -> SequenceGroup | None:
    """Create the group of ``size`` ranks that this rank is in, None for ``size=1``.

    A collective call. Raises ``ValueError`` if ``size`` does not fit the number of ranks or heads,
    or if the rotary embeddings depend on the sequence length.
    """
    if size == 1:
        return None
    text_config = config.get_text_config()
    rope_type = find_length_dependent_rope(config)
    if rope_type:
        raise ValueError(
            f"{CONFIG_KEY}={size}: the rotary embeddings of the model ({rope_type}) depend on the "
            f"longest position, which is unknown to a slice of the tokens; allowed: 1; "
            f"fix: {CONFIG_KEY}=1"
        )
    num_heads: int = text_config.num_attention_heads
    num_key_heads: int = getattr(text_config, "num_key_value_heads", None) or num_heads
    if num_heads % size or (num_key_heads % size and size % num_key_heads):
        allowed_sizes = [
            n
            for n in range(1, num_heads + 1)
            if not num_heads % n and not (num_key_heads % n and n % num_key_heads)
        ]
        raise ValueError(
            f"{CONFIG_KEY}={size}: the model has {num_heads} attention heads and {num_key_heads} "
            f"key heads, which cannot be divided equally; allowed: {allowed_sizes}; "
            f"fix: {CONFIG_KEY}={max(allowed_sizes)} or less"
        )
    num_ranks = dist.get_world_size()
    if num_ranks % size:
        raise ValueError(
            f"{CONFIG_KEY}={size} does not divide the {num_ranks} ranks; "
            f"allowed: divisors of {num_ranks}; fix: {CONFIG_KEY}=1"
        )
    ranks, _ = dist.new_subgroups(size, timeout=timeout)
    assert isinstance(ranks, dist.ProcessGroup)  # every rank is in one of the groups
    return SequenceGroup(ranks, device)


def _encode_layout(layout: PackedLayout) -> list[int]:
    """Encode packed segments as integers: their lengths, then their starts, then their parents."""
    return [*layout.lengths, *layout.prefix_lengths, *layout.parents]


def _decode_layout(encoded_layout: Sequence[int]) -> PackedLayout:
    num_segments = len(encoded_layout) // 3
    lengths, starts, parents = (
        tuple(encoded_layout[i * num_segments : (i + 1) * num_segments]) for i in range(3)
    )
    return PackedLayout(lengths, starts, parents)


class _ExchangeParts(torch.autograd.Function):
    """All-to-all exchange of ``parts`` [size, ...]: part i is exchanged with rank i."""

    @staticmethod
    def forward(ctx: Any, parts: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
        ctx.ranks = ranks
        return _all_to_all(parts, ranks)

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  hidden by the decorator
        ctx: Any, gradient: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        return _all_to_all(gradient, ctx.ranks), None


def _all_to_all(parts: torch.Tensor, ranks: dist.ProcessGroup) -> torch.Tensor:
    parts = parts.contiguous()
    received_parts = torch.empty_like(parts)
    dist.all_to_all_single(received_parts, parts, group=ranks)
    return received_parts
