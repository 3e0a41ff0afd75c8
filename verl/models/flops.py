"""Floating-point operations of a model's passes, in closed form.

    forward    2 W T + 2 V N + 4 A P
    backward   as much for the gradients of what layers read, and for those of trained weights

W weights of the decoder layers that a token meets, T tokens; V weights of the head, N positions
that it is asked for; A numbers of a token's queries in all layers, P pairs of a token and one that
it sees, itself included. A product and the sum it goes into are two operations. Norms, rotations
and softmax are left out, and so is what is computed without being needed: a second time under
gradient checkpointing, or for pairs that a mask hides. Of LoRA the first layer reads what has no
gradient; its share of backward is counted all the same.
"""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import nn

from verl.models.policy import PackedModel

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig


@dataclass(frozen=True)
class Work:
    """What passes were asked for: tokens T, positions N of the head, pairs P."""

    tokens: int = 0
    positions: int = 0
    pairs: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(
            self.tokens + other.tokens,
            self.positions + other.positions,
            self.pairs + other.pairs,
        )


@dataclass(frozen=True)
class ModelFlops:
    """A model's W, V and A, and how much of W and V is trained."""

    weights: float
    trained: float
    head: int
    trained_head: int
    queries: int

    def forward(self, work: Work) -> float:
        """Operations of a pass that scores."""
        of_weights = self.weights * work.tokens + self.head * work.positions
        return 2 * of_weights + 4 * self.queries * work.pairs

    def update(self, work: Work) -> float:
        """Operations of a pass and its gradient."""
        of_trained = self.trained * work.tokens + self.trained_head * work.positions
        # Of attention's two products both sides have a gradient.
        return 2 * self.forward(work) + 2 * of_trained + 4 * self.queries * work.pairs


def model_flops(module: PackedModel) -> ModelFlops:
    """The numbers of ``module``, sharded or not."""
    text = module.config.get_text_config()
    width = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    layers = [_met(parameter, text) for parameter in module.blocks.parameters()]
    head = module.head_weight
    return ModelFlops(
        weights=sum(count for count, _ in layers),
        trained=sum(count for count, trained in layers if trained),
        head=head.numel(),
        trained_head=head.numel() * head.requires_grad,
        queries=len(module.blocks) * text.num_attention_heads * width,
    )


def _met(parameter: nn.Parameter, text: "PreTrainedConfig") -> tuple[float, bool]:
    """How many of the weights a token is multiplied with, and whether they are trained."""
    count = float(parameter.numel()) if parameter.dim() > 1 else 0.0
    if parameter.dim() == 3:  # the experts of a mixture, of which a token goes to a few
        count *= text.num_experts_per_tok / parameter.shape[0]
    return count, parameter.requires_grad
