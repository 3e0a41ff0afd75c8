"""Floating-point operations of a model's passes, in closed form.

    forward    2 W T + 2 V N + 4 A P
    backward   2 (W + W') T + 2 (V + V') N + 8 A P

W: decoder weights that one token is multiplied with. T: tokens. V: weights of the output head.
W' and V': the parts of W and V that are trained. Their gradients need these additional operations.
N: positions where the head computes logits. A: size of a token's queries, summed over layers.
P: pairs of a query token and a key token that it attends to, including itself.

A multiplication and an addition count as two operations. Not counted: norms, rotary embeddings,
softmax, recurrent states, padding, the second forward of gradient checkpointing, and masked pairs.
With LoRA the input of the first layer needs no gradient; its share of the backward is counted
nevertheless.
"""

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

from torch import nn

from verl.models.policy import PackedModel

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ForwardSize:
    """Size of one or more forward passes, from which FLOPs are computed.

    ``head_positions`` is the number of tokens with logits. ``attention_pairs`` is the number of
    pairs of a query token and a key token that it attends to. ``sequence_tokens`` is the number of
    tokens of all sequences. It is larger than ``tokens`` if sequences share a prefix, which is
    computed once.
    """

    tokens: int = 0
    head_positions: int = 0
    attention_pairs: int = 0
    sequence_tokens: int = 0

    def __add__(self, other: "ForwardSize") -> "ForwardSize":
        return ForwardSize(*map(sum, zip(astuple(self), astuple(other), strict=True)))


@dataclass(frozen=True)
class ModelFlops:
    """Weight counts of a model, from which FLOPs are computed.

    ``weights`` counts the decoder weights that one token is multiplied with, and ``head_weights``
    those of the output head. ``trained_weights`` and ``trained_head_weights`` are the parts that
    require gradients. ``query_size`` is the size of a token's queries, summed over layers.
    """

    weights: float
    trained_weights: float
    head_weights: int
    trained_head_weights: int
    query_size: int

    def compute_forward_flops(self, size: ForwardSize) -> float:
        """Return the number of floating-point operations of forward passes of ``size``."""
        weight_products = self.weights * size.tokens + self.head_weights * size.head_positions
        return 2 * weight_products + 4 * self.query_size * size.attention_pairs

    def compute_update_flops(self, size: ForwardSize) -> float:
        """Return the number of floating-point operations of forward and backward passes."""
        trained_weight_products = (
            self.trained_weights * size.tokens + self.trained_head_weights * size.head_positions
        )
        # Both factors of the two matrix products of attention need a gradient, so the backward pass
        # has twice the attention operations of the forward pass.
        return (
            2 * self.compute_forward_flops(size)
            + 2 * trained_weight_products
            + 4 * self.query_size * size.attention_pairs
        )


def count_model_weights(module: PackedModel) -> ModelFlops:
    """Count the weights of ``module``, which may be sharded or not."""
    text_config = module.config.get_text_config()
    weight_counts = [
        _count_weights_per_token(name, parameter, text_config)
        for name, parameter in module.sharded_layers.named_parameters()
    ]
    head_weight = module.head_weight
    return ModelFlops(
        weights=sum(count for count, _ in weight_counts),
        trained_weights=sum(count for count, is_trained in weight_counts if is_trained),
        head_weights=head_weight.numel(),
        trained_head_weights=head_weight.numel() * head_weight.requires_grad,
        query_size=_count_attention_layers(module) * _query_width(text_config),
    )


def _count_attention_layers(module: PackedModel) -> int:
    """Return the number of layers in which a token attends to other tokens."""
    layer_types = getattr(module.config.get_text_config(), "layer_types", None)
    if not layer_types:
        return len(module.sharded_layers)
    layer_types_without_attention = {"linear_attention", "conv", "moe", "mlp"}
    return sum(layer_type not in layer_types_without_attention for layer_type in layer_types)


def _query_width(text_config: "PreTrainedConfig") -> int:
    """Return the size of a token's queries in one layer, 0 for a model without attention heads."""
    num_heads: int = getattr(text_config, "num_attention_heads", 0)
    head_width = getattr(text_config, "head_dim", None)
    return num_heads * (head_width or text_config.hidden_size // num_heads) if num_heads else 0


def _count_weights_per_token(
    name: str, parameter: nn.Parameter, text_config: "PreTrainedConfig"
) -> tuple[float, bool]:
    """Return the number of weights of ``parameter`` that one token is multiplied with.

    Also return True if ``parameter`` is trained.
    """
    num_weights = float(parameter.numel()) if parameter.dim() > 1 else 0.0
    if parameter.dim() == 3 and "expert" in name:  # each token uses only some of the experts
        num_experts = parameter.shape[0]
        num_weights *= getattr(text_config, "num_experts_per_tok", num_experts) / num_experts
    return num_weights, parameter.requires_grad
