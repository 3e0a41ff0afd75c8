"""Access to parts of a causal LM for packed forwards: backbone, output head, decoder layers."""

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import nn

from verl.models.attention_calls import AttentionCalls
from verl.models.packed_attention import FLEX_ATTENTION, check_attention_window, with_block_mask
from verl.models.packed_layout import PackedLayout

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel


def compute_packed_hidden(
    backbone: nn.Module,
    input_ids: torch.Tensor,
    position_ids: torch.Tensor,
    layout: PackedLayout,
    window: int | None = None,
) -> torch.Tensor:
    """Return the last hidden states [T, H] of one packed sequence.

    ``window`` is the smallest attention window of a layer in tokens, or None. Raises
    ``UnsupportedAttentionError`` for a row or branch that is longer than the window.
    """
    # Check the attention window here: some models pass it to the mask function only.
    check_attention_window(window, layout)
    config: PreTrainedConfig = backbone.config  # pyright: ignore[reportAssignmentType]  it exists
    if config._attn_implementation == FLEX_ATTENTION:
        layout = with_block_mask(layout, input_ids.device)
    else:
        # Masks have the dtype of the layers. Otherwise FSDP would cast them again in each layer.
        weight = next(backbone.parameters())
        layout = replace(layout, calls=AttentionCalls(layout, input_ids.device, weight.dtype))
    backbone_output = backbone(
        input_ids=input_ids[None], position_ids=position_ids[None], use_cache=False, layout=layout
    )
    return backbone_output.last_hidden_state[0]


def find_backbone(lm: "PreTrainedModel") -> nn.Module:
    """Return the part of ``lm`` that computes hidden states, without the output head."""
    for module in (lm.base_model, getattr(lm, "model", None), lm.get_decoder()):
        if isinstance(module, nn.Module) and module is not lm:
            return module
    raise ValueError(f"{type(lm).__name__} has no backbone that can be called without its head")


def output_head(lm: "PreTrainedModel") -> nn.Module:
    """Return the layer that maps hidden states to logits."""
    head = lm.get_output_embeddings()
    if head is None:
        raise ValueError(f"{type(lm).__name__} has no output head: it is not a causal LM")
    return head


def decoder_layers(model: nn.Module) -> nn.ModuleList:
    """Return the stack of decoder layers: the ``ModuleList`` with most parameters."""
    module_lists = [module for module in model.modules() if isinstance(module, nn.ModuleList)]
    if not module_lists:
        raise ValueError(f"{type(model).__name__} has no stack of decoder layers")
    return max(module_lists, key=lambda layers: sum(p.numel() for p in layers.parameters()))


def attention_window(config: "PreTrainedConfig") -> int | None:
    """Return the smallest attention window of any layer in tokens, including the query itself.

    None means that all layers have full causal attention.
    """
    text_config = config.get_text_config()
    layer_types = getattr(text_config, "layer_types", None)
    window_sizes = []
    uses_sliding_window = getattr(text_config, "use_sliding_window", True)
    if uses_sliding_window and (layer_types is None or "sliding_attention" in layer_types):
        window_sizes.append(getattr(text_config, "sliding_window", None))
    if layer_types is None or "chunked_attention" in layer_types:
        window_sizes.append(getattr(text_config, "attention_chunk_size", None))
    return min((window for window in window_sizes if window), default=None)


def find_length_dependent_rope(config: "PreTrainedConfig") -> str:
    """Return the type of rotary embeddings that depend on the sequence length, "" for others."""
    rope = getattr(config.get_text_config(), "rope_parameters", None) or {}
    # In some models, each type of layer has its own rope parameters.
    nested = [value for value in rope.values() if isinstance(value, dict)]
    rope_types = [str(rope_settings.get("rope_type", "")) for rope_settings in (rope, *nested)]
    return next((kind for kind in rope_types if "dynamic" in kind or kind == "longrope"), "")


def get_max_packed_length(config: "PreTrainedConfig") -> int | None:
    """Return the largest length (tokens) of a row that can be packed; None if there is no limit.

    With sliding-window attention the limit is the window. If the rotary embeddings depend on the
    longest row of a pass, the limit is the length from which they change.
    """
    length_limits = [attention_window(config)]
    if find_length_dependent_rope(config):
        text_config = config.get_text_config()
        rope = getattr(text_config, "rope_parameters", None) or {}
        length_limits.append(
            rope.get("original_max_position_embeddings")
            or getattr(text_config, "original_max_position_embeddings", None)
            or text_config.max_position_embeddings
        )
    return min((length_limit for length_limit in length_limits if length_limit), default=None)
