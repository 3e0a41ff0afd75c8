"""The two trained models: a policy that scores tokens, a value model that scores states.

Both read packed rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import nn

from verl.models.backbone import attention_window, decoder_layers, last_hidden, output_head
from verl.models.loader import load_causal_lm
from verl.models.packed_attention import PackedLayout
from verl.models.sequence_parallel import SequenceGroup
from verl.models.token_scores import Targets, TokenScores, scores_from_hidden

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel


class PackedModel(nn.Module):
    """A model that reads packed rows and is sharded block by block."""

    config: "PreTrainedConfig"
    window: int | None
    group: SequenceGroup | None = None  # of ranks that compute a row together

    def last_hidden(
        self,
        backbone: nn.Module,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layout: PackedLayout | None,
    ) -> torch.Tensor:
        """Last hidden states [T, H] of a packed sequence; without one, of the rank's whose turn it
        is.
        """
        inputs = None
        if input_ids is not None and position_ids is not None and layout is not None:
            inputs = (input_ids, position_ids, layout)
        if self.group is not None:
            return self.group.hidden(backbone, inputs, self.window)
        assert inputs is not None  # only in a group another rank may have them
        return last_hidden(backbone, *inputs, self.window)

    def take_part(self) -> torch.Tensor:
        """A pass over rows of another rank of the group: zero, whose gradient is zero."""
        raise NotImplementedError

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        raise NotImplementedError

    @property
    def head_weight(self) -> torch.Tensor:
        """What the last hidden states are multiplied with, [width of the output, H]."""
        raise NotImplementedError


class PolicyModel(PackedModel):
    """A causal LM whose forward returns scores of chosen tokens only; logits of other tokens are
    never computed.
    """

    lm: "PreTrainedModel"

    def __init__(self, lm: "PreTrainedModel") -> None:
        super().__init__()
        self.lm = lm
        self.config = lm.config
        self.window = attention_window(lm.config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        return decoder_layers(self.lm)

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight of the output head [V, H]."""
        return output_head(self.lm).get_parameter("weight")

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layout: PackedLayout | None,
        targets: Sequence[Targets],
        choice_token_ids: torch.Tensor | None = None,
    ) -> list[TokenScores]:
        """Score each group of ``targets`` in one packed sequence; input_ids, position_ids [T]."""
        hidden = self.last_hidden(self.lm.base_model, input_ids, position_ids, layout)
        head = output_head(self.lm)
        return [scores_from_hidden(head, hidden, group, choice_token_ids) for group in targets]

    def take_part(self) -> torch.Tensor:
        """A pass over rows of another rank of the group: zero, whose gradient is zero."""
        first = _first_position(self)
        # With the head, whose gradient all ranks reduce together.
        return self(None, None, None, [Targets(first, first)])[0].log_probs.sum() * 0.0


class ValueModel(PackedModel):
    """The backbone of a causal LM with a scalar head: the value of the state before each chosen
    token.
    """

    backbone: nn.Module

    def __init__(self, lm: "PreTrainedModel") -> None:
        super().__init__()
        self.config = lm.config
        self.window = attention_window(lm.config)
        self.backbone = lm.base_model
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
        # values start at 0, so that the first advantages are the returns
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        return decoder_layers(self.backbone)

    @property
    def head_weight(self) -> torch.Tensor:
        """The weight of the scalar head [1, H]."""
        return self.value_head.weight

    def forward(
        self,
        input_ids: torch.Tensor | None,
        position_ids: torch.Tensor | None,
        layout: PackedLayout | None,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Values [N] float32 at packed positions ``index`` [N]; input_ids, position_ids [T]."""
        hidden = self.last_hidden(self.backbone, input_ids, position_ids, layout)
        values = self.value_head(hidden.index_select(0, index)).float()
        return values[:, 0].clone()  # what an FSDP module returns must not be a view

    def take_part(self) -> torch.Tensor:
        """A pass over rows of another rank of the group: zero, whose gradient is zero."""
        return self(None, None, None, _first_position(self)).sum() * 0.0


def _first_position(module: PackedModel) -> torch.Tensor:
    assert module.group is not None  # alone, a rank has rows of its own
    return torch.zeros(1, dtype=torch.long, device=module.group.device)


class LoadOptions(TypedDict, total=False):
    """How the backbone of a value model is loaded; see ``load_causal_lm``."""

    dtype: torch.dtype
    trust_remote_code: bool
    override_config: Mapping[str, object] | None
    external_lib: str | None
    gradient_checkpointing: bool
    attention: str
    empty: bool


def value_model_from(path: str | Path | None, **options: Unpack[LoadOptions]) -> ValueModel:
    """A value model whose backbone starts from the causal LM at ``path`` (options as
    ``load_causal_lm``).
    """
    return ValueModel(load_causal_lm(path, use="value", **options))
