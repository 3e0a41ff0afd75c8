"""Sample one token per row by inverting the cumulative distribution.

Pure tensor functions, shared by the engines.
"""

import numpy as np
import torch

from verl.workers.rollout.base import GREEDY_BELOW, counter_seeds


def uniform_numbers(seeds: np.ndarray, counters: np.ndarray) -> torch.Tensor:
    """Return one float64 in [0, 1) per row [N] from request seeds [N] and token counters [N].

    Values are multiples of 2**-40. With 40 bits, ``u * total < total`` also holds after rounding,
    so a token of probability 0 is never sampled.
    """
    bits = counter_seeds(seeds, counters) >> np.uint64(24)
    return torch.from_numpy(bits.astype(np.float64) * 2.0**-40)


def truncate_logits(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Set ``logits`` [N, V] to -inf outside of top-k and top-p; ``top_k`` and ``top_p`` are [N].

    Top-p is applied after top-k: it keeps the fewest most likely tokens whose probabilities reach
    ``top_p``. A ``top_k`` below 1 or above V keeps all tokens, and so does None. Ties with the k-th
    token are kept.
    """
    vocab = logits.shape[-1]
    if top_k is not None:
        keep = torch.where((top_k < 1) | (top_k > vocab), vocab, top_k).long()
        lowest_kept_logit = logits.sort(dim=-1, descending=True).values.gather(
            -1, keep.unsqueeze(-1) - 1
        )
        logits = logits.masked_fill(logits < lowest_kept_logit, float("-inf"))
    if top_p is not None:
        ordered, order = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        cumulative_before = ordered.cumsum(dim=-1) - ordered
        is_outside = cumulative_before >= top_p.unsqueeze(-1)
        is_outside[:, 0] = False  # a top_p of 0 keeps the most likely token
        logits = logits.masked_fill(is_outside.scatter(-1, order, is_outside), float("-inf"))
    return logits


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    uniform: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [N] and their log-probs [N] from float32 ``logits`` [N, V].

    ``uniform`` [N] holds random numbers in [0, 1). Rows are sampled after temperature, top-k and
    top-p, and their log-probs are those of that distribution. Rows whose ``temperature`` [N] is
    below ``GREEDY_BELOW`` take the argmax, with its untruncated log-prob at temperature 1.
    ``temperature=None`` makes all rows greedy.

    Example: probabilities [0.2, 0.5, 0.3] have the cumulative sums [0.2, 0.7, 1.0]. So uniform
    numbers 0.1, 0.6 and 0.9 give the tokens 0, 1 and 2.
    """
    if temperature is None:
        return _sample_greedy(logits)
    greedy = temperature < GREEDY_BELOW
    scaled = logits / torch.where(greedy, 1.0, temperature).unsqueeze(-1)
    logprobs = truncate_logits(scaled, top_k, top_p).log_softmax(dim=-1)
    cumulative = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # scaled by the total, which differs from 1 by rounding
    thresholds = uniform.to(cumulative.device) * cumulative[:, -1]
    token_index = torch.searchsorted(cumulative, thresholds.unsqueeze(-1), right=True)
    token_index = token_index.clamp_(max=logits.shape[-1] - 1)
    token_logprobs = logprobs.gather(-1, token_index).squeeze(-1)
    tokens = token_index.squeeze(-1)
    if bool(greedy.any()):
        greedy_tokens, best_logprobs = _sample_greedy(logits)
        tokens = torch.where(greedy, greedy_tokens, tokens)
        token_logprobs = torch.where(greedy, best_logprobs, token_logprobs)
    return tokens, token_logprobs


def _sample_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, tokens = logits.log_softmax(dim=-1).max(dim=-1)
    return tokens, logprobs
