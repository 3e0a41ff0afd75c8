"""Policy losses beside PPO's. With ``d`` the new less the old log-prob of a token, ``r = exp(d)``
its ratio and ``A`` its advantage, each docstring gives the loss of a token; ``loss_agg_mode`` says
how tokens become a number, for all of them.

A *sequence* is a row here, also with ``algorithm.row_weight=trajectory``: the ratio of a sequence
belongs to one context and what was sampled after it, and with several rows per trajectory
(``env.history=window``) each has a context of its own. So a ratio depends on its row alone, and
micro-batches and ranks do not show; ``row_weight`` still decides what the rows count.
"""

import torch
from torch import Tensor

from verl.algos.algorithm_registry import LossNeeds
from verl.algos.token_losses import SampledTokens, TokenLosses, clipped_surrogate, token_loss


def _only_gradient(values: Tensor) -> Tensor:
    """1, with the gradient of ``values``; times x it is x with the gradient of ``x values``."""
    return (values - values.detach()).exp()


@token_loss("gspo")
def compute_policy_loss_gspo(tokens: SampledTokens) -> TokenLosses:
    """GSPO (Zheng et al., 2025, arXiv 2507.18071), in the form with an advantage per token.

    ``-min(s A, clip(s, 1 - low, 1 + high) A)`` with the ratio of the row, ``s = exp(mean of d over
    its tokens)``, whose value every token shares, each with the gradient of its own log-prob. With
    one advantage per row and ``seq-mean-token-mean`` that is the sequence form. Clip ranges are
    small: the paper's are 3e-4 and 4e-4.
    """
    mean = tokens.row_mean(tokens.log_ratio).detach()
    ratio = mean.clamp(-20.0, 20.0).exp() * _only_gradient(tokens.log_prob)
    return clipped_surrogate(ratio, tokens)


@token_loss("cispo")
def compute_policy_loss_cispo(tokens: SampledTokens) -> TokenLosses:
    """CISPO (MiniMax-M1, 2025, arXiv 2506.13585): ``-sg(clip(r, 1 - low, 1 + high)) A log p``.

    The clipped ratio is a weight without a gradient (``sg``): tokens beyond the range go on
    learning.
    """
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(1 - tokens.low, 1 + tokens.high)
    return TokenLosses(-weight * tokens.advantages * tokens.log_prob, weight != ratio)


@token_loss("sapo", needs=LossNeeds({"tau_pos": "tau_pos", "tau_neg": "tau_neg"}))
def compute_policy_loss_sapo(
    tokens: SampledTokens, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLosses:
    """SAPO (Gao et al., 2025, arXiv 2511.20347): ``-4/tau sigmoid(tau (r - 1)) A``.

    A soft gate instead of a clip: at r = 1 its gradient is that of ``r A``, away from it it fades.
    tau is ``tau_pos`` where A > 0, else ``tau_neg``. Raises ``ValueError`` unless both are
    positive.
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    tau = torch.where(tokens.advantages > 0, tau_pos, tau_neg)
    gate = torch.sigmoid(tau * (tokens.ratio - 1)) * 4 / tau
    return TokenLosses(-gate * tokens.advantages, torch.zeros_like(tokens.mask))


@token_loss("geo_mean", "gmpo")
def compute_policy_loss_geo_mean(tokens: SampledTokens) -> TokenLosses:
    """GMPO (Zhao et al., 2025, arXiv 2507.20673): ``-g A`` with ``g = exp(mean of c over the row's
    tokens)``.

    ``c`` is d limited in the direction of its advantage: ``min(d, high)`` where A > 0, ``max(d,
    -low)`` where A < 0; the range is one of log-ratios (the paper's is 0.4 on both sides). The
    paper aggregates by ``seq-mean-token-mean``.
    """
    difference = tokens.log_ratio.clamp(-20.0, 20.0)
    above = (tokens.advantages > 0) & (difference > tokens.high)
    below = (tokens.advantages < 0) & (difference < -tokens.low)
    limited = torch.where(above, tokens.high, torch.where(below, -tokens.low, difference))
    mean = tokens.row_mean(limited).exp()
    return TokenLosses(-mean * tokens.advantages, above | below)


@token_loss("gpg")
def compute_policy_loss_gpg(tokens: SampledTokens) -> TokenLosses:
    """GPG (Chu et al., 2025, arXiv 2504.02546): ``-A log p``, REINFORCE without a ratio."""
    return TokenLosses(-tokens.advantages * tokens.log_prob, torch.zeros_like(tokens.mask))


@token_loss("dppo_tv", "dppo")
def compute_policy_loss_dppo_tv(tokens: SampledTokens) -> TokenLosses:
    """DPPO with binary total variation (Qi et al., 2026, arXiv 2602.04879): ``-m min(r, c) A``.

    m is 0 where the token's probability p has gone too far the way its advantage points: ``p -
    p_old > high`` where A > 0, ``p_old - p > low`` where A < 0; else 1. So a rare token may change
    its ratio much, and a likely one may not. The bound c is ``clip_ratio_c``; beyond it the
    gradient is that of a ratio of c.
    """
    change = tokens.log_prob.detach().exp() - tokens.old_log_prob.exp()
    return _within(tokens, change > tokens.high, change < -tokens.low)


@token_loss("dppo_kl")
def compute_policy_loss_dppo_kl(tokens: SampledTokens) -> TokenLosses:
    """DPPO with binary KL (Qi et al., 2026, arXiv 2602.04879): as ``dppo_tv``, and m is 0 where r
    has gone the way of the advantage and ``KL((p_old, 1 - p_old) || (p, 1 - p))`` exceeds ``high``
    (A > 0) or ``low`` (A < 0).
    """
    old = tokens.old_log_prob.double().exp()
    new = tokens.log_prob.detach().double().exp()
    # 1 - p of a certain token is 0, and the divergence from it very large instead of infinite.
    others = ((1 - old).clamp(min=1e-12) / (1 - new).clamp(min=1e-12)).log()
    divergence = -old * tokens.log_ratio.detach().double() + (1 - old) * others
    rose = (new > old) & (divergence > tokens.high)
    fell = (new < old) & (divergence > tokens.low)
    return _within(tokens, rose, fell)


def _within(tokens: SampledTokens, rose: Tensor, fell: Tensor) -> TokenLosses:
    """``-min(r, c) A`` but for tokens that ``rose`` (A > 0) or ``fell`` (A < 0) too far."""
    beyond = (tokens.advantages > 0) & rose | (tokens.advantages < 0) & fell
    ratio = tokens.ratio.detach()
    weight = ratio.clamp(max=tokens.ceiling) * _only_gradient(tokens.log_prob)
    losses = torch.where(beyond, 0.0, -weight * tokens.advantages)
    return TokenLosses(losses, beyond, ~beyond & (ratio > tokens.ceiling))
