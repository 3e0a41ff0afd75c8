"""Paths from a micro-batch to the hidden states of its tokens: packed, or row by row.

A micro-batch is one flat sequence of T tokens (``PackedLayout``). It contains rows, and branches
(alternative continuations of rows). A prefix that several of them share occurs once. Every path
returns the last hidden states of these tokens in this order. Targets, log-probs, heads and losses
are therefore the same code for all models::

    PackedForward   one pass of [1, T] with attention that keeps rows and branches apart
    RowWiseForward  passes of right-padded sequences [N, L], or of single sequences [1, L], with
                    the model's own attention and state

In the row-wise path each row and each branch is a separate sequence, including its shared prefix.
Right padding needs no mask: in a causal model no token depends on later ones.
"""

import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule
from torch.nn.utils.rnn import pad_sequence

from verl.models.backbone import attention_window, compute_packed_hidden
from verl.models.packed_attention import PACKED_ATTENTION
from verl.models.packed_layout import PackedLayout, layout_of_rows
from verl.names import MAX_PADDING, PrefixTree
from verl.records import BranchRequest

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

# Maximum number of tokens in a row-wise pass of several sequences. It bounds the memory of scoring,
# where branches (alternative continuations) can have many times the tokens of the rows.
PASS_TOKENS = 16384


@dataclass(frozen=True)
class RowWiseForward:
    """Row-wise forward: passes of separate sequences, with the model's own attention and state.

    ``attention`` is the name of the attention implementation of transformers. With ``should_pad``,
    sequences of similar length share a right-padded pass. ``computes_logits_by_forward`` is True if
    the model's ``forward`` must compute the logits, because it scales or caps them.
    ``not_packed_reason`` says why the model does not use packed rows.
    """

    attention: str
    should_pad: bool = True
    computes_logits_by_forward: bool = False
    not_packed_reason: str = ""

    def compute_hidden(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,  # noqa: ARG002  the model counts positions from 0
        layout: PackedLayout,
    ) -> torch.Tensor:
        """Return the last hidden states [T, H] by one pass per group of sequences."""
        set_attention_implementation(backbone, self.attention)
        sequences = list(list_sequences(layout, input_ids.device))
        passes = plan_passes([len(positions) for positions, _ in sequences], self.should_pad)
        num_dummy_passes = _count_dummy_passes(backbone, len(passes))
        hidden_parts: list[torch.Tensor] = []
        part_positions: list[torch.Tensor] = []
        for indices in passes:
            # Padding repeats the first token of the micro-batch, which any model can embed.
            padded_positions = pad_sequence([sequences[i][0] for i in indices], batch_first=True)
            hidden = run_backbone(backbone, input_ids[padded_positions])
            for row, index in enumerate(indices):
                positions, num_unshared = sequences[index]
                length = len(positions)
                hidden_parts.append(hidden[row, length - num_unshared : length])
                part_positions.append(positions[length - num_unshared :])
        packed_hidden = torch.cat(hidden_parts).index_select(0, torch.cat(part_positions).argsort())
        first_token = input_ids[:1, None]
        return packed_hidden + _run_dummy_passes(
            num_dummy_passes, lambda: run_backbone(backbone, first_token)
        )

    def count_tokens(self, length: int, branches: Sequence[BranchRequest]) -> int:
        """Return the number of tokens of a row and of its branches, each with its prefix."""
        return length + sum(branch.start + len(branch.token_ids) for branch in branches)


@dataclass(frozen=True)
class PackedForward:
    """Packed forward: one pass of a micro-batch whose rows form one sequence without padding.

    A micro-batch with a row or branch (alternative continuation) longer than ``max_row_tokens``
    tokens is computed by the row-wise passes ``long_row_forward`` instead. The limit is an
    attention window, for example; None allows any length. ``computes_logits_by_forward`` is True if
    the model's ``forward`` must compute the logits, because it scales or caps them.
    """

    attention: str
    max_row_tokens: int | None = None
    long_row_forward: RowWiseForward | None = None
    computes_logits_by_forward: bool = False

    def compute_hidden(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: PackedLayout,
    ) -> torch.Tensor:
        """Return the last hidden states [T, H] by one packed pass.

        If a row or branch exceeds ``max_row_tokens``, use the row-wise passes ``long_row_forward``
        instead.
        """
        if self.long_row_forward is None:
            return compute_packed_hidden(
                backbone, input_ids, position_ids, layout, self.max_row_tokens
            )
        if self._exceeds_packing_limit(layout.longest_context):
            return self.long_row_forward.compute_hidden(backbone, input_ids, position_ids, layout)
        # Another rank may need several row-wise passes, because its rows are longer than
        # ``self.limit``. All ranks must run the same number of passes.
        num_dummy_passes = _count_dummy_passes(backbone, 1)
        set_attention_implementation(backbone, self.attention)
        hidden = compute_packed_hidden(
            backbone, input_ids, position_ids, layout, self.max_row_tokens
        )
        one_token_inputs = (input_ids[:1], position_ids[:1], layout_of_rows([1]))
        return hidden + _run_dummy_passes(
            num_dummy_passes, lambda: compute_packed_hidden(backbone, *one_token_inputs)
        )

    def count_tokens(self, length: int, branches: Sequence[BranchRequest]) -> int:
        """Return the number of tokens to compute for a row of ``length`` tokens and its branches.

        Branches are alternative continuations of the row. Their prefix is computed once, unless the
        row or a branch exceeds the limit of packed passes.
        """
        branch_ends = [branch.start + len(branch.token_ids) for branch in branches]
        if self.long_row_forward is not None and self._exceeds_packing_limit(
            max([length, *branch_ends])
        ):
            return self.long_row_forward.count_tokens(length, branches)
        return length + sum(len(branch.token_ids) for branch in branches)

    def _exceeds_packing_limit(self, num_tokens: int) -> bool:
        return self.max_row_tokens is not None and num_tokens > self.max_row_tokens


ForwardKind = PackedForward | RowWiseForward


@dataclass(frozen=True)
class ForwardSettings:
    """Kind of a model's forward passes, and whether they merge rows that share prefixes.

    These settings determine how many tokens the model computes for given rows. ``prefix_tree`` is
    the value of the config key, or False for row-wise passes, which compute each row alone.
    """

    kind: ForwardKind = PackedForward("")
    prefix_tree: PrefixTree = False

    def resolve_prefix_tree(self, longest: int) -> PrefixTree:
        """Return ``prefix_tree``, or False if rows of ``longest`` tokens cannot be merged."""
        if not isinstance(self.kind, PackedForward):
            return False
        limit = self.kind.max_row_tokens
        return self.prefix_tree if limit is None or longest <= limit else False


PACKED_SETTINGS = ForwardSettings()  # packed passes for rows of any length, without merging


def run_backbone(backbone: nn.Module, input_ids: torch.Tensor) -> torch.Tensor:
    """Return the last hidden states [N, L, H] of a plain pass of ``input_ids`` [N, L]."""
    return backbone(input_ids=input_ids, use_cache=False).last_hidden_state


def set_attention_implementation(model: nn.Module, attention: str) -> None:
    """Make the layers of ``model`` use the named attention implementation of transformers.

    It is not restored after a pass: gradient checkpointing repeats the layers in backward.
    """
    lm: PreTrainedModel = model  # pyright: ignore[reportAssignmentType]  a backbone is one
    current_implementation = lm.config._attn_implementation
    if not attention or current_implementation == attention:
        return
    if lm._can_set_attn_implementation():
        lm.set_attn_implementation(attention)
    elif current_implementation == PACKED_ATTENTION:
        # The layers of this model ignore the name of the implementation. The name only decides
        # which mask transformers makes.
        lm.config._attn_implementation = attention


def list_sequences(
    layout: PackedLayout, device: torch.device | str = "cpu"
) -> Iterator[tuple[torch.Tensor, int]]:
    """Yield (positions, length) for each segment of a packed micro-batch.

    ``positions`` are those of all tokens of the row that ends with the segment, prefix included.
    The last ``length`` of them are the tokens of the segment.
    """
    for segment, length in enumerate(layout.lengths):
        yield torch.from_numpy(layout.list_row_positions(segment)).to(device), length


def plan_passes(lengths: Sequence[int], padded: bool = True) -> list[list[int]]:
    """Return the indices of the sequences of each pass, longest sequences first.

    Example: lengths [9, 2, 8] give [[0, 2], [1]] if padded, else [[0], [2], [1]].
    """
    passes: list[list[int]] = []
    tokens = 0  # number of tokens in the last pass
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        if passes and padded:
            padded_tokens = (len(passes[-1]) + 1) * lengths[passes[-1][0]]
            padding_share = 1 - (tokens + lengths[index]) / padded_tokens
            if padding_share <= MAX_PADDING and padded_tokens <= PASS_TOKENS:
                passes[-1].append(index)
                tokens += lengths[index]
                continue
        passes.append([index])
        tokens = lengths[index]
    return passes


def _count_dummy_passes(backbone: nn.Module, num_passes: int) -> int:
    """Return the largest ``num_passes`` of any rank minus that of this rank.

    This rank must run so many additional passes, because passes through a sharded model are
    collective operations. The result is 0 for a model that is not sharded yet: only rank 0 passes
    tokens through it, to compare packed and row-wise passes.
    """
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return 0
    if not any(isinstance(module, FSDPModule) for module in backbone.modules()):
        return 0
    # gloo reduces CPU tensors, NCCL only GPU tensors.
    device = "cpu" if "gloo" in dist.get_backend_config() else "cuda"
    max_passes = torch.tensor([num_passes], device=device)
    dist.all_reduce(max_passes, dist.ReduceOp.MAX)
    return int(max_passes) - num_passes


def _run_dummy_passes(
    num_passes: int, run_pass: Callable[[], torch.Tensor]
) -> torch.Tensor | float:
    """Call ``run_pass`` ``num_passes`` times, so that all ranks run equally many passes.

    Passes through a sharded model are collective operations. Returns a zero that depends on the
    outputs, so that backward runs through these passes too.
    """
    zero: torch.Tensor | float = 0.0
    for _ in range(num_passes):
        zero = zero + run_pass().sum() * 0.0
    return zero


# ---------------------------------------------------------------------- paths of models


def get_forward_kind(lm: nn.Module) -> ForwardKind:
    """Return the forward kind chosen at the load of ``lm``, or packed passes without a choice."""
    chosen_kind: ForwardKind | None = getattr(lm, "forward_kind", None)
    if chosen_kind is not None:
        return chosen_kind
    config: PreTrainedConfig = lm.config  # pyright: ignore[reportAssignmentType]  has one
    return PackedForward(config._attn_implementation or "", attention_window(config))


def set_forward_kind(lm: nn.Module, forward_kind: ForwardKind) -> None:
    """Store ``forward_kind`` in ``lm`` and set its attention in all layers."""
    set_attention_implementation(lm, forward_kind.attention)
    lm.forward_kind = forward_kind  # pyright: ignore[reportArgumentType]  a plain attribute


def encode_forward_kind(forward_kind: ForwardKind) -> str:
    """Return ``forward_kind`` as text, which rank 0 sends to other ranks."""
    return json.dumps({"kind": type(forward_kind).__name__, **asdict(forward_kind)})


def decode_forward_kind(text: str) -> ForwardKind:
    """Return the kind of forward passes that ``encode_forward_kind`` encoded as ``text``."""
    fields = json.loads(text)
    if fields.pop("kind") == RowWiseForward.__name__:
        return RowWiseForward(**fields)
    if fields["long_row_forward"] is not None:
        fields["long_row_forward"] = RowWiseForward(**fields["long_row_forward"])
    return PackedForward(**fields)
