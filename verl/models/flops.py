"""Floating-point operations of a model's passes, in closed form.

    forward    2 W T + 2 V N + 4 A P
    backward   the same again for the gradients of layer inputs, and for those of trained weights

W: decoder weights that one token is multiplied with. T: tokens. V: weights of the output head.
N: positions where the head computes logits. A: size of a token's queries, summed over layers.
P: pairs of a query token and a key token that it sees, itself included.

A multiplication and an addition count as two operations. Not counted: norms, rotary embeddings,
softmax, recurrent states, padding, the second forward of gradient checkpointing, and masked pairs.
With LoRA the input of the first layer needs no gradient; its share of the backward is counted
nevertheless.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from verl.models.policy import PackedModel

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Work:
    """Size of one or more forward passes: T, N and P of the module docstring."""

    tokens: int = 0
    positions: int = 0
    pairs: int = 0

    def __add__(self, other: "Work") -> "Work":
        pairs = self.pairs + other.pairs
        return Work(self.tokens + other.tokens, self.positions + other.positions, pairs)


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

    def forward(self, work: Work) -> float:
        """Return the number of operations of forward passes of size ``work``."""
        of_weights = self.weights * work.tokens + self.head * work.positions
        return 2 * of_weights + 4 * self.queries * work.pairs

    def update(self, work: Work) -> float:
        """Return the number of operations of forward and backward passes of size ``work``."""
        of_trained = self.trained * work.tokens + self.trained_head * work.positions
        # Attention has two matrix products, and both factors of each need a gradient.
        return 2 * self.forward(work) + 2 * of_trained + 4 * self.queries * work.pairs


def model_flops(module: PackedModel) -> ModelFlops:
    """Count the weights of ``module``, which may be sharded or not."""
    text = module.config.get_text_config()
    layers = [
        _count_weights_per_token(name, parameter, text)
        for name, parameter in module.sharded_layers.named_parameters()
    ]
    head = module.head_weight
    return ModelFlops(
        weights=sum(count for count, _ in layers),
        trained=sum(count for count, trained in layers if trained),
        head=head.numel(),
        trained_head=head.numel() * head.requires_grad,
        queries=_count_attention_layers(module) * _query_width(text),
    )


def _count_attention_layers(module: PackedModel) -> int:
    """Return the number of layers in which a token attends to other tokens."""
    kinds = getattr(module.config.get_text_config(), "layer_types", None)
    if not kinds:
        return len(module.sharded_layers)
    without = {"linear_attention", "conv", "moe", "mlp"}
    return sum(kind not in without for kind in kinds)


def _query_width(text: "PreTrainedConfig") -> int:
    """Return the size of a token's queries in one layer, 0 for a model without attention heads."""
    heads: int = getattr(text, "num_attention_heads", 0)
    width = getattr(text, "head_dim", None) or (text.hidden_size // heads if heads else 0)
    return heads * width


def _count_weights_per_token(
    name: str, parameter: nn.Parameter, text: "PreTrainedConfig"
) -> tuple[float, bool]:
    """Return the number of weights that one token is multiplied with, and ``requires_grad``."""
    count = float(parameter.numel()) if parameter.dim() > 1 else 0.0
    if parameter.dim() == 3 and "expert" in name:  # a token is sent to a few of them
        count *= getattr(text, "num_experts_per_tok", parameter.shape[0]) / parameter.shape[0]
    return count, parameter.requires_grad
