"""Floating-point operations of a model's passes, in closed form.

    forward    2 W T + 2 V N + 4 A P
    backward   the forward's operations for the gradients of layer inputs
               + those of the trained weights' products for the weight gradients

W: decoder weights that one token is multiplied with. T: tokens. V: weights of the output head.
N: positions where the head computes logits. A: size of a token's queries, summed over layers.
P: pairs of a query token and a key token that it attends to, including itself.

A multiplication and an addition count as two operations. Not counted: norms, rotary embeddings,
softmax, the second forward of gradient checkpointing, and masked pairs. With LoRA the input of the
first layer needs no gradient; its share of the backward is counted nevertheless.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from verl.models.policy import PackedModel

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class ForwardSize:
    """Size of one or more forward passes: T, N and P of the module docstring."""

    tokens: int = 0
    positions: int = 0
    pairs: int = 0

    def __add__(self, other: "ForwardSize") -> "ForwardSize":
        pairs = self.pairs + other.pairs
        return ForwardSize(self.tokens + other.tokens, self.positions + other.positions, pairs)


@dataclass(frozen=True)
class ModelFlops:
    """Weight counts of a model, from which FLOPs are computed.

    ``weights``, ``head`` and ``queries`` are W, V and A of the module docstring. ``trained`` and
    ``trained_head`` are the parts of W and V that require gradients.
    """

    weights: float
    trained: float
    head: int
    trained_head: int
    queries: int

    def forward(self, size: ForwardSize) -> float:
        """Return the number of operations of forward passes."""
        weight_products = self.weights * size.tokens + self.head * size.positions
        return 2 * weight_products + 4 * self.queries * size.pairs

    def update(self, size: ForwardSize) -> float:
        """Return the number of operations of forward and backward passes."""
        trained_weight_products = self.trained * size.tokens + self.trained_head * size.positions
        # Attention has two matrix products, and both factors of each need a gradient.
        return 2 * self.forward(size) + 2 * trained_weight_products + 4 * self.queries * size.pairs


def model_flops(module: PackedModel) -> ModelFlops:
    """Count the weights of ``module``, which may be sharded or not."""
    text_config = module.config.get_text_config()
    width = (
        getattr(text_config, "head_dim", None)
        or text_config.hidden_size // text_config.num_attention_heads
    )
    parameters = module.sharded_layers.parameters()
    layers = [_count_weights_per_token(parameter, text_config) for parameter in parameters]
    head = module.head_weight
    return ModelFlops(
        weights=sum(count for count, _ in layers),
        trained=sum(count for count, trained in layers if trained),
        head=head.numel(),
        trained_head=head.numel() * head.requires_grad,
        queries=len(module.sharded_layers) * text_config.num_attention_heads * width,
    )


def _count_weights_per_token(
    parameter: nn.Parameter, text_config: "PreTrainedConfig"
) -> tuple[float, bool]:
    """Return the number of weights that one token is multiplied with, and ``requires_grad``."""
    count = float(parameter.numel()) if parameter.dim() > 1 else 0.0
    if parameter.dim() == 3:  # mixture of experts: each token uses only some of them
        count *= text_config.num_experts_per_tok / parameter.shape[0]
    return count, parameter.requires_grad
