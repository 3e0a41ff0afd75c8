"""Draw one token per row by inverting the cumulative distribution.

Pure tensor functions, shared by the engines.
"""

import numpy as np
import torch

from verl.workers.rollout.base import GREEDY_BELOW, counter_seeds


def uniforms(seeds: np.ndarray, counters: np.ndarray) -> torch.Tensor:
    """One float64 in [0, 1) per row [N], a multiple of 2**-40, determined by request seed [N] and
    token counter [N].

    With 40 bits, ``u * total < total`` survives rounding, so a token of probability 0 is never
    drawn.
    """
    bits = counter_seeds(seeds, counters) >> np.uint64(24)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-40)


def truncate(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """``logits`` [N, V] with -inf outside the ``top_k`` [N] largest and the nucleus ``top_p`` [N];
    None: no truncation.

    The nucleus is taken after top-k: the fewest most likely tokens that together reach ``top_p``. A
    ``top_k`` below 1 or above V keeps all tokens. Ties at the border of top-k are kept.
    """
    vocab = logits.shape[-1]
    if top_k is not None:
        keep = torch.where((top_k < 1) | (top_k > vocab), vocab, top_k).long()
        border = logits.sort(dim=-1, descending=True).values.gather(-1, keep.unsqueeze(-1) - 1)
        logits = logits.masked_fill(logits < border, float("-inf"))
    if top_p is not None:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        before = ordered.cumsum(dim=-1) - ordered
        outside = before >= top_p.unsqueeze(-1)
        outside[:, 0] = False  # a top_p of 0 keeps the most likely token
        logits = logits.masked_fill(outside.scatter(-1, order, outside), float("-inf"))
    return logits


def draw(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [N] and their log-probs [N] from ``logits`` [N, V] (float32) with ``uniform``
    [N] in [0, 1).

    Rows whose ``temperature`` [N] is below ``GREEDY_BELOW`` take the argmax, with its untruncated
    log-prob at temperature 1; ``temperature`` None means that all rows do. The others are sampled
    after temperature, top-k and top-p, and their log-probs are those of that distribution.
    """
    if temperature is None:
        return _greedy(logits)
    greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    logprobs = truncate(scaled, top_k, top_p).log_softmax(dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # of the total, which rounding leaves a little beside 1
    target = uniform.to(cumulative.device) * cumulative[:, -1]
    found = torch.searchsorted(cumulative, target.unsqueeze(-1), right=True)
    found = found.clamp_(max=logits.shape[-1] - 1)
    chosen = logprobs.gather(-1, found).squeeze(-1)
    tokens = found.squeeze(-1)
    if bool(greedy.any()):
        best, best_logprobs = _greedy(logits)
        tokens = torch.where(greedy, best, tokens)
        chosen = torch.where(greedy, best_logprobs, chosen)
    return tokens, chosen


def _greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, tokens = logits.log_softmax(dim=-1).max(dim=-1)
    return tokens, logprobs
