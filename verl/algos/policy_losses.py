"""Policy losses other than PPO's. Each docstring gives the loss of a token.

p is the new and p_old the old probability of the token, ``r = p / p_old`` their ratio and A the
advantage. ``loss_agg_mode`` selects the aggregation over tokens for all losses.

A *sequence* ratio is the ratio of a row (one prompt and its response), also if a trajectory has
several rows and ``algorithm.row_weight=trajectory``.
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
    """Return a tensor of ones that has the gradient of ``values``.

    The product of ``x`` (without gradient) and this tensor has the value x and the gradient
    ``x * grad(values)``.
    """
    return (values - values.detach()).exp()


@register_token_loss("gspo")
def compute_policy_loss_gspo(tokens: SampledTokens) -> TokenLosses:
    """Compute the GSPO loss with an advantage per token (Zheng et al., 2025, arXiv 2507.18071).

    The loss is ``-min(s A, clip(s, 1 - low, 1 + high) A)`` with advantage A. s is the exponential
    of the mean of ``log p - log p_old`` over the row. All tokens of a row have the ratio s, and
    each token has the gradient of its log-prob. With one advantage per row and
    ``seq-mean-token-mean`` this equals the loss with one ratio per sequence. Use small clip ranges,
    such as the paper's 3e-4 and 4e-4.
    """
    mean_log_ratio = tokens.compute_row_mean(tokens.log_ratio).detach()
    ratio = mean_log_ratio.clamp(-20.0, 20.0).exp() * _ones_with_gradient(tokens.log_prob)
    return compute_clipped_surrogate(ratio, tokens)


@register_token_loss("cispo")
def compute_policy_loss_cispo(tokens: SampledTokens) -> TokenLosses:
    """Compute the CISPO loss ``-sg(clip(r, 1 - low, 1 + high)) A log p`` (arXiv 2506.13585).

    r is the ratio of the new probability p over the old one, A the advantage. The clipped ratio is
    a weight without a gradient (``sg``, stop-gradient), so tokens beyond the clip range still have
    a gradient.
    """
    ratio = tokens.prob_ratio.detach()
    weight = ratio.clamp(1 - tokens.low, 1 + tokens.high)
    return TokenLosses(-weight * tokens.advantages * tokens.log_prob, weight != ratio)


@register_token_loss("sapo", needs=LossNeeds({"tau_pos": "tau_pos", "tau_neg": "tau_neg"}))
def compute_policy_loss_sapo(
    tokens: SampledTokens, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLosses:
    """Compute the SAPO loss ``-4/tau sigmoid(tau (r - 1)) A`` (Gao et al., 2025, arXiv 2511.20347).

    r is the new over the old probability, A the advantage. The sigmoid replaces the clip. At r = 1
    the gradient equals that of ``-r A``. It decreases with the distance of r from 1. tau is
    ``tau_pos`` where A > 0, else ``tau_neg``. Raises ``ValueError`` unless both are positive.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    soft_gate = torch.sigmoid(tau * (tokens.prob_ratio - 1)) * 4 / tau
    return TokenLosses(-soft_gate * tokens.advantages, torch.zeros_like(tokens.mask))


@register_token_loss("geo_mean", "gmpo")
def compute_policy_loss_geo_mean(tokens: SampledTokens) -> TokenLosses:
    """Compute the GMPO loss ``-g A`` (Zhao et al., 2025, arXiv 2507.20673).

    A is the advantage. g is the exponential of the mean of c over the row. c is the log-ratio
    ``d = log p - log p_old``, limited in the direction of the advantage. It is ``min(d, high)``
    where A > 0, and ``max(d, -low)`` where A < 0. The paper uses 0.4 for both limits and aggregates
    with ``seq-mean-token-mean``.
    """
    log_ratio = tokens.log_ratio.clamp(-20.0, 20.0)
    is_too_high = (tokens.advantages > 0) & (log_ratio > tokens.high)
    is_too_low = (tokens.advantages < 0) & (log_ratio < -tokens.low)
    limited_log_ratio = torch.where(
        is_too_high, tokens.high, torch.where(is_too_low, -tokens.low, log_ratio)
    )
    geometric_mean_ratio = tokens.compute_row_mean(limited_log_ratio).exp()
    return TokenLosses(-geometric_mean_ratio * tokens.advantages, is_too_high | is_too_low)


@register_token_loss("gpg")
def compute_policy_loss_gpg(tokens: SampledTokens) -> TokenLosses:
    """Compute the GPG loss ``-A log p``, as in REINFORCE (Chu et al., 2025, arXiv 2504.02546)."""
    return TokenLosses(-tokens.advantages * tokens.log_prob, torch.zeros_like(tokens.mask))


@register_token_loss("dppo_tv", "dppo")
def compute_policy_loss_dppo_tv(tokens: SampledTokens) -> TokenLosses:
    """Compute DPPO's loss with binary total variation, ``-m min(r, c) A`` (arXiv 2602.04879).

    r is the ratio p / p_old of the new and old probability, A the advantage. The mask m is 0 if p
    has moved too far in the direction of the advantage, else 1. Too far means ``p - p_old > high``
    for A > 0, and ``p_old - p > low`` for A < 0. The ratio of an improbable token may therefore
    change more than that of a probable token. The bound c is ``clip_ratio_c``. A token with
    ``r > c`` has the gradient ``-c A grad(log p)``.
    """
    prob_change = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    return _compute_masked_token_losses(
        tokens, prob_change > tokens.high, prob_change < -tokens.low
    )


@register_token_loss("dppo_kl")
def compute_policy_loss_dppo_kl(tokens: SampledTokens) -> TokenLosses:
    """Compute DPPO's loss with binary KL, ``-m min(r, c) A`` (arXiv 2602.04879).

    r is the ratio p / p_old of the new and old probability, A the advantage. The mask m is 0 if p
    has moved too far in the direction of the advantage, else 1. The limit of the divergence
    ``KL((p_old, 1 - p_old) || (p, 1 - p))`` is ``high`` for A > 0 and ``low`` for A < 0. The bound
    c is ``clip_ratio_c``.
    """
    old_prob = tokens.old_log_prob.double().exp()
    new_prob = tokens.log_prob.detach().double().exp()
    # The clamp keeps the divergence finite if p is 1, because 1 - p is then 0.
    log_complement_ratio = ((1 - old_prob).clamp(min=1e-12) / (1 - new_prob).clamp(min=1e-12)).log()
    divergence = (
        -old_prob * tokens.log_ratio.detach().double() + (1 - old_prob) * log_complement_ratio
    )
    rose_too_far = (new_prob > old_prob) & (divergence > tokens.high)
    fell_too_far = (new_prob < old_prob) & (divergence > tokens.low)
    return _compute_masked_token_losses(tokens, rose_too_far, fell_too_far)


def _compute_masked_token_losses(
    tokens: SampledTokens, rose_too_far: Tensor, fell_too_far: Tensor
) -> TokenLosses:
    """Return the token losses ``-min(r, c) A``, but 0 where the probability moved too far.

    ``rose_too_far`` and ``fell_too_far`` [B, R] mark such tokens. The first counts where the
    advantage A is above 0, the second where it is below 0. r is the probability ratio and c is
    ``clip_ratio_c``.
    """
    moved_too_far = (tokens.advantages > 0) & rose_too_far | (tokens.advantages < 0) & fell_too_far
    ratio = tokens.prob_ratio.detach()
    weight = ratio.clamp(max=tokens.ceiling) * _ones_with_gradient(tokens.log_prob)
    losses = torch.where(moved_too_far, 0.0, -weight * tokens.advantages)
    return TokenLosses(losses, moved_too_far, ~moved_too_far & (ratio > tokens.ceiling))
