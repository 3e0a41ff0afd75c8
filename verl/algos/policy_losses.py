"""Policy losses other than PPO's. Each docstring gives the loss of a token.

``d`` is the new minus the old log-prob of the token, ``r = exp(d)`` its ratio and ``A`` its
advantage. ``loss_agg_mode`` selects the aggregation over tokens for all losses.

A *sequence* is a row here, also with ``algorithm.row_weight=trajectory``. A sequence ratio is that
of one prompt and its response, and with ``env.history=window`` each row of a trajectory has a
different prompt. A ratio therefore depends only on its row, not on the split of the mini-batch.
``row_weight`` still determines the weights of the rows.
"""

import torch
from torch import Tensor

from verl.algos.algorithm_registry import LossNeeds
from verl.algos.token_losses import (
    SampledTokens,
    TokenLosses,
    compute_clipped_surrogate,
    register_token_loss,
)


def _ones_with_gradient(values: Tensor) -> Tensor:
    """Return ones whose gradient is that of ``values``: multiply by it to add this gradient."""
    return (values - values.detach()).exp()


@register_token_loss("gspo")
def compute_policy_loss_gspo(tokens: SampledTokens) -> TokenLosses:
    """GSPO (Zheng et al., 2025, arXiv 2507.18071), in the form with an advantage per token.

    ``-min(s A, clip(s, 1 - low, 1 + high) A)`` with ``s = exp(mean of d over the row's tokens)``.
    All tokens of a row have the value s, and each has the gradient of its log-prob. With one
    advantage per row and ``seq-mean-token-mean`` this equals the sequence form. Use small clip
    ranges: the paper's are 3e-4 and 4e-4.
    """
    mean = tokens.compute_row_mean(tokens.log_ratio).detach()
    ratio = mean.clamp(-20.0, 20.0).exp() * _ones_with_gradient(tokens.log_prob)
    return compute_clipped_surrogate(ratio, tokens)


@register_token_loss("cispo")
def compute_policy_loss_cispo(tokens: SampledTokens) -> TokenLosses:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585): ``-sg(clip(r, 1 - low, 1 + high)) A log p``.

    The clipped ratio is a weight without a gradient (``sg``, stop-gradient), so tokens beyond the
    clip range still have a gradient.
    """
    ratio = tokens.prob_ratio.detach()
    weight = ratio.clamp(1 - tokens.low, 1 + tokens.high)
    return TokenLosses(-weight * tokens.advantages * tokens.log_prob, weight != ratio)


@register_token_loss("sapo", needs=LossNeeds({"tau_pos": "tau_pos", "tau_neg": "tau_neg"}))
def compute_policy_loss_sapo(
    tokens: SampledTokens, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLosses:
    """SAPO (Gao et al., 2025, arXiv 2511.20347): ``-4/tau sigmoid(tau (r - 1)) A``.

    A soft gate replaces the clip. At r = 1 its gradient is that of ``r A``; it decreases with the
    distance from 1. tau is ``tau_pos`` where A > 0, else ``tau_neg``. Raises ``ValueError`` unless
    both are positive.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (tokens.prob_ratio - 1)) * 4 / tau
    return TokenLosses(-gate * tokens.advantages, torch.zeros_like(tokens.mask))


@register_token_loss("geo_mean", "gmpo")
def compute_policy_loss_geo_mean(tokens: SampledTokens) -> TokenLosses:
    """GMPO (Zhao et al., 2025, arXiv 2507.20673): ``-g A``, ``g = exp(mean of c over the row)``.

    ``c`` is d limited in the direction of the advantage: ``min(d, high)`` where A > 0, ``max(d,
    -low)`` where A < 0. The range limits log-ratios; the paper uses 0.4 on both sides. The paper
    aggregates with ``seq-mean-token-mean``.
    """
    difference = tokens.log_ratio.clamp(-20.0, 20.0)
    is_too_high = (tokens.advantages > 0) & (difference > tokens.high)
    is_too_low = (tokens.advantages < 0) & (difference < -tokens.low)
    limited = torch.where(
        is_too_high, tokens.high, torch.where(is_too_low, -tokens.low, difference)
    )
    mean = tokens.compute_row_mean(limited).exp()
    return TokenLosses(-mean * tokens.advantages, is_too_high | is_too_low)


@register_token_loss("gpg")
def compute_policy_loss_gpg(tokens: SampledTokens) -> TokenLosses:
    """GPG (Chu et al., 2025, arXiv 2504.02546): ``-A log p``, REINFORCE without a ratio."""
    return TokenLosses(-tokens.advantages * tokens.log_prob, torch.zeros_like(tokens.mask))


@register_token_loss("dppo_tv", "dppo")
def compute_policy_loss_dppo_tv(tokens: SampledTokens) -> TokenLosses:
    """DPPO with binary total variation (Qi et al., 2026, arXiv 2602.04879): ``-m min(r, c) A``.

    m is 0 if the probability p has moved too far in the direction of the advantage, else 1. Too far
    is ``p - p_old > high`` for A > 0, and ``p_old - p > low`` for A < 0. An improbable token may
    thus change its ratio more than a probable one. The bound c is ``clip_ratio_c``. Beyond it the
    gradient is that of a ratio of c.
    """
    change = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    return _mask_moved_tokens(tokens, change > tokens.high, change < -tokens.low)


@register_token_loss("dppo_kl")
def compute_policy_loss_dppo_kl(tokens: SampledTokens) -> TokenLosses:
    """DPPO with binary KL (Qi et al., 2026, arXiv 2602.04879): ``dppo_tv`` with another rule for m.

    m is 0 where p has moved in the direction of the advantage and ``KL((p_old, 1 - p_old) || (p, 1
    - p))`` exceeds ``high`` (A > 0) or ``low`` (A < 0).
    """
    old_prob = tokens.old_log_prob.double().exp()
    new_prob = tokens.log_prob.detach().double().exp()
    # If p is 1, 1 - p is 0. The limit makes the divergence very large instead of infinite.
    log_complement_ratio = ((1 - old_prob).clamp(min=1e-12) / (1 - new_prob).clamp(min=1e-12)).log()
    divergence = (
        -old_prob * tokens.log_ratio.detach().double() + (1 - old_prob) * log_complement_ratio
    )
    rose = (new_prob > old_prob) & (divergence > tokens.high)
    fell = (new_prob < old_prob) & (divergence > tokens.low)
    return _mask_moved_tokens(tokens, rose, fell)


def _mask_moved_tokens(tokens: SampledTokens, rose: Tensor, fell: Tensor) -> TokenLosses:
    """Return ``-min(r, c) A``; 0 for tokens that ``rose`` (A > 0) or ``fell`` (A < 0) too far."""
    moved_too_far = (tokens.advantages > 0) & rose | (tokens.advantages < 0) & fell
    ratio = tokens.prob_ratio.detach()
    weight = ratio.clamp(max=tokens.ceiling) * _ones_with_gradient(tokens.log_prob)
    losses = torch.where(moved_too_far, 0.0, -weight * tokens.advantages)
    return TokenLosses(losses, moved_too_far, ~moved_too_far & (ratio > tokens.ceiling))
