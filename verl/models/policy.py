"""The two trained models: a policy that scores tokens, a value model that scores states.

Both read packed rows.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict, Unpack

import torch
from torch import nn

from verl.models.loader import load_causal_lm
from verl.models.packed_attention import PackedLayout
from verl.models.token_scores import Targets, TokenScores, scores_from_hidden

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel


class PackedModel(nn.Module):
    """A model that reads packed rows and is sharded block by block."""

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        raise NotImplementedError


class PolicyModel(PackedModel):
    """A causal LM whose forward returns scores of chosen tokens only; logits of other tokens are
    never computed.
    """

    lm: "PreTrainedModel"

    def __init__(self, lm: "PreTrainedModel") -> None:
        super().__init__()
        self.lm = lm
        refuse_scaled_logits(lm.config)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        return decoder_layers(self.lm)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: PackedLayout,
        targets: Sequence[Targets],
        choice_token_ids: torch.Tensor | None = None,
    ) -> list[TokenScores]:
        """Score each group of ``targets`` in one packed sequence; input_ids, position_ids [T]."""
        hidden = last_hidden(self.lm.base_model, input_ids, position_ids, layout)
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
        self.backbone = lm.base_model
        self.value_head = nn.Linear(lm.config.get_text_config().hidden_size, 1)
        # values start at 0, so that the first advantages are the returns
        nn.init.zeros_(self.value_head.weight)
        nn.init.zeros_(self.value_head.bias)

    @property
    def blocks(self) -> nn.ModuleList:
        """The decoder layers, which is what FSDP shards one by one."""
        return decoder_layers(self.backbone)

    def forward(
        self,
        input_ids: torch.Tensor,
        position_ids: torch.Tensor,
        layout: PackedLayout,
        index: torch.Tensor,
    ) -> torch.Tensor:
        """Values [N] float32 at packed positions ``index`` [N]; input_ids, position_ids [T]."""
        hidden = last_hidden(self.backbone, input_ids, position_ids, layout)
        values = self.value_head(hidden.index_select(0, index)).float()
        return values[:, 0].clone()  # what an FSDP module returns must not be a view


def output_head(lm: "PreTrainedModel") -> nn.Module:
    """The layer that turns hidden states into logits; ``ValueError`` for a model without one."""
    head = lm.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(lm).__name__} has no output head: it is no causal LM")
    return head


def last_hidden(
    backbone: nn.Module, input_ids: torch.Tensor, position_ids: torch.Tensor, layout: PackedLayout
) -> torch.Tensor:
    """Last hidden states [T, H] of one packed sequence."""
    out = backbone(
        input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, layout=layout
    )
    return out.last_hidden_state[0]


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """The stack of decoder layers: the ``ModuleList`` with most parameters."""
    lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not lists:
        raise ValueError(f"{type(model).__name__} has no stack of decoder layers")
    return max(lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def refuse_scaled_logits(config: "PreTrainedConfig") -> None:
    """Raise ``ValueError`` for architectures that change logits after the output head."""
    for name in ("final_logit_softcapping", "logit_scale", "logits_scaling"):
        if getattr(config, name, None) not in (None, 1.0):
            raise ValueError(
                f"{config.model_type}: {name} is not supported by the packed scoring pass"
            )


class LoadOptions(TypedDict, total=False):
    """How the backbone of a value model is loaded; see ``load_causal_lm``."""

    dtype: torch.dtype
    trust_remote_code: bool
    override_config: Mapping[str, object] | None
    external_lib: str | None
    gradient_checkpointing: bool


def value_model_from(path: str | Path | None, **options: Unpack[LoadOptions]) -> ValueModel:
    """A value model whose backbone starts from the causal LM at ``path`` (options as
    ``load_causal_lm``).
    """
    return ValueModel(load_causal_lm(path, **options))
