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
from verl.models.token_scores import Targets, TokenScores, scores_from_hidden

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel


class PackedModel(nn.Module):
    """A model that reads packed rows and is sharded block by block."""

    config: "PreTrainedConfig"

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        raise NotImplementedError

    @property
    def head_weight(self) -> nn.Parameter:
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
    def head_weight(self) -> nn.Parameter:
        """The weight of the output head [V, H]."""
        return output_head(self.lm).get_parameter("weight")

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: PackedLayout,
        targets: Sequence[Targets],
        choice_token_ids: torch.Tensor | None = None,
    ) -> list[TokenScores]:
        """Score each group of ``targets`` in one packed sequence; input_ids, position_ids [T]."""
        hidden = last_hidden(self.lm.base_model, input_ids, position_ids, layout, self.window)
        head = output_head(self.lm)
        return [scores_from_hidden(head, hidden, group, choice_token_ids) for group in targets]


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
    def head_weight(self) -> nn.Parameter:
        """The weight of the scalar head [1, H]."""
        return self.value_head.weight

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: PackedLayout,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Values [N] float32 at packed positions ``index`` [N]; input_ids, position_ids [T]."""
        hidden = last_hidden(self.backbone, input_ids, position_ids, layout, self.window)
        values = self.value_head(hidden.index_select(0, index)).float()
        return values[:, 0].clone()  # what an FSDP module returns must not be a view


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
    return ValueModel(load_causal_lm(path, **options))
