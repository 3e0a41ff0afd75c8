"""From hidden states to log-probabilities and entropies of chosen tokens, without keeping all
logits.
"""

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from verl.names import MAX_LOGITS
from verl.utils.torch_functional import logprobs_and_entropy_from_logits, subset_entropy


@dataclass(frozen=True)
class Targets:
    """Tokens to be scored in one packed sequence.

    ``index`` [N] packed position *before* each target, ``tokens`` [N] the targets, at one
    ``temperature``.
    """

    index: torch.Tensor
    tokens: torch.Tensor
    temperature: float = 1.0


class TokenScores(NamedTuple):
    """Scores of N targets, float32: ``log_probs`` and ``entropy`` [N]; ``level_entropy`` [N] where
    it was asked for.

    A named tuple, because FSDP looks for the tensors of a model's output in the containers it
    knows.
    """

    log_probs: torch.Tensor
    entropy: torch.Tensor
    level_entropy: torch.Tensor | None = None


def scores_from_hidden(
    head: nn.Module,
    hidden: torch.Tensor,
    targets: Targets,
    level_token_ids: torch.Tensor | None = None,
) -> TokenScores:
    """Score ``targets`` under ``softmax(head(hidden) / temperature)``; hidden [T, H].

    ``level_token_ids`` [K] adds the entropy of the distribution restricted to those tokens.
    """

    def score(hidden: torch.Tensor, tokens: torch.Tensor) -> tuple[torch.Tensor, ...]:
        logits = full_logits(head, hidden)
        # clones, because what an FSDP module returns must not be a view
        found = [
            x.clone() for x in logprobs_and_entropy_from_logits(logits, tokens, targets.temperature)
        ]
        if level_token_ids is None:
            return tuple(found)
        return *found, subset_entropy(logits / targets.temperature, level_token_ids)

    chosen = hidden.index_select(0, targets.index)
    size = max(1, MAX_LOGITS // head_width(head))
    if len(chosen) <= size:
        return TokenScores(*score(chosen, targets.tokens))
    parts = []
    for piece in zip(chosen.split(size), targets.tokens.split(size), strict=True):
        parts.append(
            checkpoint(score, *piece, use_reentrant=False)
            if torch.is_grad_enabled()
            else score(*piece)
        )
    return TokenScores(*(torch.cat(column) for column in zip(*parts, strict=True)))


def full_logits(head: nn.Module, hidden: torch.Tensor) -> torch.Tensor:
    """Logits [N, V] in float32, also where the layers compute in bfloat16; hidden [N, H].

    Rounded to bfloat16, a logit of 20 is off by up to 0.06. A head that is more than a linear map
    (an adapter) computes in its own type.
    """
    if hidden.dtype == torch.float32 or not isinstance(head, nn.Linear):
        return head(hidden).float()
    return nn.functional.linear(
        hidden.float(), head.weight.float(), None if head.bias is None else head.bias.float()
    )


def head_width(head: nn.Module) -> int:
    """Number of logits per position that ``head`` gives."""
    return getattr(head, "out_features", None) or head.weight.shape[0]
