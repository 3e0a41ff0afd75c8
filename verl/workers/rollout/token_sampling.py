"""Sample one token per row by inverting the cumulative distribution.

Pure tensor functions, shared by the engines.
"""

import numpy as np
import torch

from verl.workers.rollout.base import GREEDY_BELOW, derive_counter_seeds


def derive_uniform_numbers(seeds: np.ndarray, counters: np.ndarray) -> torch.Tensor:
    """Return one float64 in [0, 1) per row [N] from request seeds [N] and token counters [N].

    Values are multiples of 2**-40. With 40 bits, ``u * total < total`` also holds after rounding,
    so a token of probability 0 is never sampled.
    """
    random_bits = derive_counter_seeds(seeds, counters) >> np.uint64(24)
    return torch.from_numpy(random_bits.astype(np.float64) * 2.0**-40)


def truncate_logits(
    logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None
) -> torch.Tensor:
    """Set ``logits`` [N, V] to -inf outside of top-k and top-p; ``top_k`` and ``top_p`` are [N].

    Top-p is applied after top-k: it keeps the fewest most likely tokens whose probabilities reach
    ``top_p``. A ``top_k`` of None, below 1 or above V keeps all tokens. Tokens that tie with the
    k-th token are kept.
    """
    vocab_size = logits.shape[-1]
    if top_k is not None:
        num_kept_tokens = torch.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k).long()
        lowest_kept_logit = logits.sort(dim=-1, descending=True).values.gather(
            -1, num_kept_tokens.unsqueeze(-1) - 1
        )
        logits = logits.masked_fill(logits < lowest_kept_logit, float("-inf"))
    if top_p is not None:
        sorted_probs, sorted_ids = logits.softmax(dim=-1).sort(dim=-1, descending=True)
        cumulative_prob_before = sorted_probs.cumsum(dim=-1) - sorted_probs
        is_removed = cumulative_prob_before >= top_p.unsqueeze(-1)
        is_removed[:, 0] = False  # a top_p of 0 keeps the most likely token
        logits = logits.masked_fill(is_removed.scatter(-1, sorted_ids, is_removed), float("-inf"))
    return logits


def sample_tokens(
    logits: torch.Tensor,
    temperature: torch.Tensor | None,
    top_k: torch.Tensor | None,
    top_p: torch.Tensor | None,
    random_numbers: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Sample tokens [N] and their log-probs [N] from float32 ``logits`` [N, V].

    ``random_numbers`` [N] are in [0, 1). Log-probs are those of the distribution after temperature,
    top-k and top-p. Rows whose ``temperature`` [N] is below ``GREEDY_BELOW`` take the argmax, with
    its untruncated log-prob at temperature 1. ``temperature=None`` makes all rows greedy.

    Example: probabilities [0.2, 0.5, 0.3] have the cumulative sums [0.2, 0.7, 1.0]. So uniform
    numbers 0.1, 0.6 and 0.9 give the tokens 0, 1 and 2.
    """
    if temperature is None:
        return _sample_greedy(logits)
    is_greedy = temperature < GREEDY_BELOW
    scaled_logits = logits / torch.where(is_greedy, 1.0, temperature).unsqueeze(-1)
    logprobs = truncate_logits(scaled_logits, top_k, top_p).log_softmax(dim=-1)
    cumulative_probs = logprobs.exp().cumsum(dim=-1, dtype=torch.float64)
    # Scale by the total probability, which differs from 1 by rounding.
    thresholds = random_numbers.to(cumulative_probs.device) * cumulative_probs[:, -1]
    token_index = torch.searchsorted(cumulative_probs, thresholds.unsqueeze(-1), right=True)
    token_index = token_index.clamp_(max=logits.shape[-1] - 1)
    token_logprobs = logprobs.gather(-1, token_index).squeeze(-1)
    tokens = token_index.squeeze(-1)
    if bool(is_greedy.any()):
        greedy_tokens, best_logprobs = _sample_greedy(logits)
        tokens = torch.where(is_greedy, greedy_tokens, tokens)
        token_logprobs = torch.where(is_greedy, best_logprobs, token_logprobs)
    return tokens, token_logprobs


def _sample_greedy(logits: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    logprobs, tokens = logits.log_softmax(dim=-1).max(dim=-1)
    return tokens, logprobs
