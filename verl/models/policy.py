"""The two trained models: a policy (log-probs of tokens) and a value model (values of states).

The input of both models is packed rows.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.models.backbone import attention_window, decoder_layers, find_backbone, output_head
from verl.models.forward_kind import ForwardKind, get_forward_kind
from verl.models.packed_layout import PackedLayout
from verl.models.sequence_parallel import SequenceGroup
from verl.models.token_scores import (
    TargetLogProbs,
    Targets,
    compute_float32_logits,
    log_probs_from_hidden,
    make_head,
)

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel
LM_PREFIX = "lm."  # prefix that PolicyModel adds to the weight names of its causal LM


class PackedModel(nn.Module):
    """Base class of models that take packed rows and that FSDP shards layer by layer."""

    config: "PreTrainedConfig"
    forward_kind: ForwardKind
    sequence_group: SequenceGroup | None = None  # ranks that compute a row together

    def compute_last_hidden(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layout: PackedLayout | None,
    ) -> torch.Tensor:
        """Return the last hidden states [T, H] of a packed sequence.

        With sequence parallelism, a rank whose arguments are None computes a part of the sequence
        of another rank.
        """
        packed_inputs = None
        if input_ids is not None and position_ids is not None and layout is not None:
            packed_inputs = (input_ids, position_ids, layout)
        if self.sequence_group is not None:
            return self.sequence_group.compute_hidden(
                backbone, packed_inputs, attention_window(self.config)
            )
        assert packed_inputs is not None  # only ranks of a sequence group may lack inputs
        return self.forward_kind.compute_hidden(backbone, *packed_inputs)

    def compute_zero_loss(self) -> torch.Tensor:
        """Take part in the pass for the rows of another rank (sequence parallelism).

        Return a zero loss. It depends on the output head, whose gradient is reduced over all ranks.
        """
        raise NotImplementedError

    @property
    def head_weight(self) -> torch.Tensor:
        """Weight of the output head: [V, H] of a policy, [1, H] of a value model."""
        raise NotImplementedError

    @property
    def sharded_layers(self) -> nn.ModuleList:
        """Decoder layers, which FSDP shards one by one."""
        return decoder_layers(self)

    def _make_placeholder_position(self) -> torch.Tensor:
        assert self.sequence_group is not None  # only ranks of a sequence group call this method
        return torch.zeros(1, dtype=torch.long, device=self.sequence_group.device)


class PolicyModel(PackedModel):
    """Causal LM whose forward computes logits, log-probs and entropies only at given positions."""

    lm: "PreTrainedModel"

    def __init__(self, lm: "PreTrainedModel") -> None:
        super().__init__()
        self.lm = lm
        self.config = lm.config
        self.forward_kind = get_forward_kind(lm)

    @property
    def head_weight(self) -> torch.Tensor:
        return output_head(self.lm).get_parameter("weight")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layout: PackedLayout | None,
        targets: Sequence[Targets],
        allowed_token_ids: torch.Tensor | None = None,
    ) -> list[TargetLogProbs]:
        """Return log-probs and entropies for each of ``targets``, which are groups of tokens.

        ``input_ids`` and ``position_ids`` [T] are one packed sequence, described by ``layout``.
        ``allowed_token_ids`` [K] adds the log-probs of these tokens at every target.
        """
        hidden = self.compute_last_hidden(find_backbone(self.lm), input_ids, position_ids, layout)
        head = make_head(self.lm, self.forward_kind.computes_logits_by_forward)
        return [
            log_probs_from_hidden(head, hidden, target_group, allowed_token_ids)
            for target_group in targets
        ]

    def compute_zero_loss(self) -> torch.Tensor:
        position = self._make_placeholder_position()
        return self(None, None, None, [Targets(position, position)])[0].log_probs.sum() * 0.0


class ValueModel(PackedModel):
    """Backbone of a causal LM with a scalar head, for the value of the state before each token."""

    backbone: nn.Module

    def __init__(self, lm: "PreTrainedModel") -> None:
        super().__init__()
        self.config = lm.config
        self.forward_kind = get_forward_kind(lm)
        self.backbone = find_backbone(lm)
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
        # Values are 0 at first, so that the first advantages are the returns.
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def head_weight(self) -> torch.Tensor:
        return self.value_head.weight

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layout: PackedLayout | None,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Return the values [N] float32 at packed positions ``index`` [N]."""
        hidden = self.compute_last_hidden(self.backbone, input_ids, position_ids, layout)
        values = compute_float32_logits(self.value_head, hidden.index_select(0, index))
        return values[:, 0].clone()  # the output of an FSDP module must not be a view

    def compute_zero_loss(self) -> torch.Tensor:
        return self(None, None, None, self._make_placeholder_position()).sum() * 0.0
