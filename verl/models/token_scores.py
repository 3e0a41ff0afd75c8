"""From hidden states to log-probabilities and entropies of chosen tokens, without keeping all
logits.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils.checkpoint import checkpoint

from verl.names import MAX_LOGITS
from verl.utils.torch_functional import (
    logprobs_and_entropy_from_logits,
    logprobs_from_logits,
    subset_entropy,
)


@dataclass(frozen=True)
class Targets:
    """Tokens to be scored in one packed sequence.

    ``index`` [N] packed position *before* each target, ``tokens`` [N] the targets, at one
    ``temperature``; ``with_entropy`` false where nobody reads entropies, which cost as much again.
    """

    index: torch.Tensor
    tokens: torch.Tensor
    temperature: float = 1.0
    with_entropy: bool = True


class TokenScores(NamedTuple):
    """Scores of N targets, float32: ``log_probs`` [N]; ``entropy`` and ``choice_entropy`` [N] where
    they were asked for.

    A named tuple, because FSDP looks for the tensors of a model's output in the containers it
    knows.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor | None = None
    choice_entropy: torch.Tensor | None = None

    @property
    def asked_entropy(self) -> torch.Tensor:
        """``entropy``; raises ``ValueError`` where nobody asked for it."""
        if self.entropy is None:
            raise ValueError("no entropies were computed: ask with Targets(with_entropy=True)")
        return self.entropy


def scores_from_hidden(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: Targets,
    choice_token_ids: torch.Tensor | None = None,
) -> TokenScores:
    """Score ``targets`` under ``softmax(head(hidden) / temperature)``; hidden [T, H].

    ``choice_token_ids`` [K] adds the entropy of the distribution restricted to those tokens.
    """

    def score(hidden: torch.Tensor, tokens: torch.Tensor) -> TokenScores:
        logits = full_logits(head, hidden)
        temperature = targets.temperature
        # clones, because what an FSDP module returns must not be a view
        if targets.with_entropy:
            both = logprobs_and_entropy_from_logits(logits, tokens, temperature)
            found = TokenScores(*(values.clone() for values in both))
        else:
            found = TokenScores(logprobs_from_logits(logits, tokens, temperature).clone())
        if choice_token_ids is None:
            return found
        return found._replace(choice_entropy=subset_entropy(logits / temperature, choice_token_ids))

    chosen = hidden.index_select(0, targets.index)
    size = max(1, MAX_LOGITS // head_width(head))
    if len(chosen) <= size:
        return score(chosen, targets.tokens)
    parts: list[TokenScores] = []
    for piece in zip(chosen.split(size), targets.tokens.split(size), strict=True):
        # in training the logits of a chunk are computed again in backward instead of being kept
        if torch.is_grad_enabled():
            parts.append(checkpoint(score, *piece, use_reentrant=False))
        else:
            parts.append(score(*piece))
    log_probs = torch.cat([part.log_probs for part in parts])
    entropy = _joined([part.entropy for part in parts])
    return TokenScores(log_probs, entropy, _joined([part.choice_entropy for part in parts]))


def _joined(parts: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    found = [values for values in parts if values is not None]
    return torch.cat(found) if found else None


def full_logits(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] in float32, also where the layers compute in bfloat16; hidden [N, H].

    Rounded to bfloat16, a logit of 20 is off by up to 0.06. Two bfloat16 numbers have an exact
    product in float32: a GPU multiplies them as they are and adds up in float32, a CPU computes in
    float32 throughout. A head that is more than a linear map (an adapter) computes in its own type.
    """
    if hidden.dtype == torch.float32 or not isinstance(head, nn.Linear):
        return head(hidden).float()
    if not hidden.is_cuda:
        bias = None if head.bias is None else head.bias.float()
        return nn.functional.linear(hidden.float(), head.weight.float(), bias)
    logits: torch.Tensor = Float32Logits.apply(hidden, head.weight)
    return logits if head.bias is None else logits + head.bias.float()


class Float32Logits(torch.autograd.Function):
    """``hidden [N, H] @ weight [V, H].T`` in float32 of bfloat16 factors, without float32 copies of
    them.

    Backward rounds the gradient of the logits to the factors' type, in which both get theirs.
    """

    @staticmethod
    def forward(ctx: Any, hidden: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(hidden, weight)
        if hidden.is_cuda:
            return torch.mm(hidden, weight.t(), out_dtype=torch.float32)
        return hidden.float() @ weight.t().float()  # a CPU has no kernel for it

    @staticmethod
    @once_differentiable  # hides the parameters' names from the type checker
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]  see above
        ctx: Any, grad_logits: torch.Tensor
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        hidden, weight = ctx.saved_tensors
        of_hidden, of_weight = ctx.needs_input_grad
        rounded = grad_logits.to(weight.dtype)
        return (
            rounded @ weight if of_hidden else None,
            rounded.t() @ hidden if of_weight else None,
        )


def head_width(head: nn.Module) -> int:
    """Number of logits per position that ``head`` gives."""
    if isinstance(head, nn.Linear):
        return head.out_features
    # an adapter around the head says it as well; what does not has the shape of its weight
    width = getattr(head, "out_features", None)
    return int(width) if width else head.get_parameter("weight").shape[0]
