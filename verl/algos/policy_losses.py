"""Policy losses. Each docstring gives the loss of a token.

p is the new and p_old the old probability of the token, ``r = p / p_old`` their ratio and A the
advantage. ``loss_agg_mode`` selects the aggregation over tokens for all losses.

A *sequence* ratio is the ratio of a row (one prompt and its response), also if a trajectory has
several rows and ``algorithm.row_weight=trajectory``.
"""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from verl.algos.algorithm_registry import LossNeeds
from verl.algos.shapes import PerElement, PerToken, TokenMask
from verl.algos.token_losses import (
    PolicyLossInputs,
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


# takes_weights=False: the weights multiply the advantages, to which this loss is proportional.
@register_token_loss("vanilla", takes_weights=False)
def compute_policy_loss_vanilla(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute PPO's clipped loss with separate bounds (DAPO) and dual clip (Ye et al., 2020).

    With advantage A, the loss is ``-min(r A, clip(r, 1 - low, 1 + high) A)``. For A < 0 it is at
    most ``-clip_ratio_c A``. A clip bound of None is ``cliprange`` (default 0.2).

    All inputs are ``[B, R]``. Returns ``(loss, clipfrac, ppo_kl, clipfrac_lower)``. ``clipfrac`` is
    the fraction of tokens whose clipped term is used. ``ppo_kl`` is the mean of ``old - new``
    log-prob. ``clipfrac_lower`` is the fraction of tokens with the dual clip. With ``num_tokens``
    (sampled tokens of the whole mini-batch) these three add up over micro-batches. Raises
    ``ValueError`` unless ``clip_ratio_c > 1``.

    >>> old, new = torch.tensor([[0.4, 0.4]]).log(), torch.tensor([[0.6, 0.6]]).log()  # r = 1.5
    >>> advantages = torch.tensor([[1.0, -1.0]])  # token losses: -1.2 (clipped) and 1.5
    >>> compute_policy_loss_vanilla(old, new, advantages, torch.ones(1, 2), cliprange=0.2)
    (tensor(0.1500), tensor(0.5000), tensor(-0.4055), tensor(0.))
    """
    if loss_inputs.ratio_ceiling <= 1.0:
        raise ValueError(f"clip_ratio_c must be greater than 1.0, got {loss_inputs.ratio_ceiling}")
    surrogate = compute_clipped_surrogate(loss_inputs.prob_ratio, loss_inputs)
    # Dual clip: for a negative advantage the clipped loss would grow with the ratio without bound.
    dual_clip_limit = -loss_inputs.advantages * loss_inputs.ratio_ceiling
    is_dual_clipped = (loss_inputs.advantages < 0) & (surrogate.losses > dual_clip_limit)
    losses = torch.where(is_dual_clipped, dual_clip_limit, surrogate.losses)
    return TokenLosses(losses, surrogate.clipped, is_dual_clipped)


@register_token_loss("gspo")
def compute_policy_loss_gspo(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute the GSPO loss with an advantage per token (Zheng et al., 2025, arXiv 2507.18071).

    The loss is ``-min(s A, clip(s, 1 - low, 1 + high) A)`` with advantage A. s is the exponential
    of the mean of ``log p - log p_old`` over the row. All tokens of a row have the ratio s, and
    each token has the gradient of its log-prob. With one advantage per row and
    ``seq-mean-token-mean`` this equals the loss with one ratio per sequence. Use small clip ranges,
    such as the paper's 3e-4 and 4e-4.

    >>> old, new = torch.tensor([[0.4, 0.5]]).log(), torch.tensor([[0.6, 0.5]]).log()
    >>> ones = torch.ones(1, 2)  # s = (1.5 * 1)^(1/2) = 1.22, A = 1
    >>> compute_policy_loss_gspo(old, new, ones, ones, cliprange=0.3)[0]
    tensor(-1.2247)
    """
    mean_log_ratio = loss_inputs.compute_row_mean(loss_inputs.log_ratio).detach()
    ratio = mean_log_ratio.clamp(-20.0, 20.0).exp() * _ones_with_gradient(loss_inputs.log_prob)
    return compute_clipped_surrogate(ratio, loss_inputs)


@register_token_loss("cispo")
def compute_policy_loss_cispo(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute the CISPO loss ``-sg(clip(r, 1 - low, 1 + high)) A log p`` (arXiv 2506.13585).

    r is the ratio of the new probability p over the old one, A the advantage. The clipped ratio is
    a weight without a gradient (``sg``, stop-gradient), so tokens beyond the clip range still have
    a gradient.

    >>> old, new, one = torch.tensor([[0.4]]).log(), torch.tensor([[0.6]]).log(), torch.ones(1, 1)
    >>> compute_policy_loss_cispo(old, new, one, one, cliprange=0.2)[0]  # -1.2 log 0.6
    tensor(0.6130)
    """
    ratio = loss_inputs.prob_ratio.detach()
    weight = ratio.clamp(1 - loss_inputs.low, 1 + loss_inputs.high)
    return TokenLosses(-weight * loss_inputs.advantages * loss_inputs.log_prob, weight != ratio)


@register_token_loss("sapo", needs=LossNeeds({"tau_pos": "tau_pos", "tau_neg": "tau_neg"}))
def compute_policy_loss_sapo(
    loss_inputs: PolicyLossInputs, tau_pos: float = 1.0, tau_neg: float = 1.05
) -> TokenLosses:
    """Compute the SAPO loss ``-4/tau sigmoid(tau (r - 1)) A`` (Gao et al., 2025, arXiv 2511.20347).

    r is the new over the old probability, A the advantage. The sigmoid replaces the clip. At r = 1
    the gradient equals that of ``-r A``. It decreases with the distance of r from 1. tau is
    ``tau_pos`` where A > 0, else ``tau_neg``. Raises ``ValueError`` unless both are positive.

    >>> old, new, one = torch.tensor([[0.4]]).log(), torch.tensor([[0.6]]).log(), torch.ones(1, 1)
    >>> compute_policy_loss_sapo(old, new, one, one)[0]  # -4 sigmoid(1.5 - 1), and -2 at r = 1
    tensor(-2.4898)
    """
    if tau_pos <= 0 or tau_neg <= 0:
        raise ValueError(f"tau_pos and tau_neg must be positive, got {tau_pos} and {tau_neg}")
    tau = torch.where(loss_inputs.advantages > 0, tau_pos, tau_neg)
    soft_gate = torch.sigmoid(tau * (loss_inputs.prob_ratio - 1)) * 4 / tau
    return TokenLosses(-soft_gate * loss_inputs.advantages, torch.zeros_like(loss_inputs.mask))


@register_token_loss("geo_mean", "gmpo")
def compute_policy_loss_geo_mean(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute the GMPO loss ``-g A`` (Zhao et al., 2025, arXiv 2507.20673).

    A is the advantage. g is the exponential of the mean of c over the row. c is the log-ratio
    ``d = log p - log p_old``, limited in the direction of the advantage. It is ``min(d, high)``
    where A > 0, and ``max(d, -low)`` where A < 0. The paper uses 0.4 for both limits and aggregates
    with ``seq-mean-token-mean``.

    >>> old, new = torch.tensor([[0.4, 0.5]]).log(), torch.tensor([[0.8, 0.5]]).log()
    >>> ones = torch.ones(1, 2)  # d = 0.69, 0; c = 0.4, 0; g = exp(0.2)
    >>> compute_policy_loss_geo_mean(old, new, ones, ones, cliprange=0.4)[0]
    tensor(-1.2214)
    """
    log_ratio = loss_inputs.log_ratio.clamp(-20.0, 20.0)
    is_too_high = (loss_inputs.advantages > 0) & (log_ratio > loss_inputs.high)
    is_too_low = (loss_inputs.advantages < 0) & (log_ratio < -loss_inputs.low)
    limited_log_ratio = torch.where(
        is_too_high, loss_inputs.high, torch.where(is_too_low, -loss_inputs.low, log_ratio)
    )
    geometric_mean_ratio = loss_inputs.compute_row_mean(limited_log_ratio).exp()
    return TokenLosses(-geometric_mean_ratio * loss_inputs.advantages, is_too_high | is_too_low)


@register_token_loss("gpg")
def compute_policy_loss_gpg(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute the GPG loss ``-A log p``, as in REINFORCE (Chu et al., 2025, arXiv 2504.02546)."""
    return TokenLosses(
        -loss_inputs.advantages * loss_inputs.log_prob, torch.zeros_like(loss_inputs.mask)
    )


@register_token_loss("dppo_tv", "dppo")
def compute_policy_loss_dppo_tv(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute DPPO's loss with binary total variation, ``-m min(r, c) A`` (arXiv 2602.04879).

    r is the ratio p / p_old of the new and old probability, A the advantage. The mask m is 0 if p
    has moved too far in the direction of the advantage, else 1. Too far means ``p - p_old > high``
    for A > 0, and ``p_old - p > low`` for A < 0. The ratio of an improbable token may therefore
    change more than that of a probable token. The bound c is ``clip_ratio_c``. A token with
    ``r > c`` has the gradient ``-c A grad(log p)``.

    >>> old, new = torch.tensor([[0.1, 0.5]]).log(), torch.tensor([[0.25, 0.9]]).log()
    >>> ones = torch.ones(1, 2)  # p - p_old = 0.15 and 0.4: token losses -2.5 and 0
    >>> compute_policy_loss_dppo_tv(old, new, ones, ones, cliprange=0.2)[0]
    tensor(-1.2500)
    """
    prob_change = loss_inputs.log_prob.detach().exp() - loss_inputs.old_log_prob.exp()
    return _compute_masked_token_losses(
        loss_inputs, prob_change > loss_inputs.high, prob_change < -loss_inputs.low
    )


@register_token_loss("dppo_kl")
def compute_policy_loss_dppo_kl(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute DPPO's loss with binary KL, ``-m min(r, c) A`` (arXiv 2602.04879).

    r is the ratio p / p_old of the new and old probability, A the advantage. The mask m is 0 if p
    has moved too far in the direction of the advantage, else 1. The limit of the divergence
    ``KL((p_old, 1 - p_old) || (p, 1 - p))`` is ``high`` for A > 0 and ``low`` for A < 0. The bound
    c is ``clip_ratio_c``.

    >>> old, new = torch.tensor([[0.1, 0.5]]).log(), torch.tensor([[0.25, 0.9]]).log()
    >>> ones = torch.ones(1, 2)  # divergences 0.07 and 0.51: token losses -2.5 and 0
    >>> compute_policy_loss_dppo_kl(old, new, ones, ones, cliprange=0.2)[0]
    tensor(-1.2500)
    """
    old_prob = loss_inputs.old_log_prob.double().exp()
    new_prob = loss_inputs.log_prob.detach().double().exp()
    # The clamp keeps the divergence finite if p is 1, because 1 - p is then 0.
    log_complement_ratio = ((1 - old_prob).clamp(min=1e-12) / (1 - new_prob).clamp(min=1e-12)).log()
    divergence = (
        -old_prob * loss_inputs.log_ratio.detach().double() + (1 - old_prob) * log_complement_ratio
    )
    rose_too_far = (new_prob > old_prob) & (divergence > loss_inputs.high)
    fell_too_far = (new_prob < old_prob) & (divergence > loss_inputs.low)
    return _compute_masked_token_losses(loss_inputs, rose_too_far, fell_too_far)


def _compute_masked_token_losses(
    loss_inputs: PolicyLossInputs, rose_too_far: Tensor, fell_too_far: Tensor
) -> TokenLosses:
    """Return the token losses ``-min(r, c) A``, but 0 where the probability moved too far.

    ``rose_too_far`` and ``fell_too_far`` [B, R] mark such tokens. The first counts where the
    advantage A is above 0, the second where it is below 0. r is the probability ratio and c the
    bound ``ceiling`` of ``loss_inputs``.
    """
    moved_too_far = (loss_inputs.advantages > 0) & rose_too_far | (
        loss_inputs.advantages < 0
    ) & fell_too_far
    ratio = loss_inputs.prob_ratio.detach()
    weight = ratio.clamp(max=loss_inputs.ratio_ceiling) * _ones_with_gradient(loss_inputs.log_prob)
    losses = torch.where(moved_too_far, 0.0, -weight * loss_inputs.advantages)
    return TokenLosses(losses, moved_too_far, ~moved_too_far & (ratio > loss_inputs.ratio_ceiling))


# ---- losses that limit the entropy decrease (Cui et al., 2025, arXiv 2505.22617) -----------------
#
# They treat the tokens with the largest covariance of log-prob and advantage differently. The
# selection of these tokens depends on the whole mini-batch. A CovarianceRange is therefore computed
# from the old log-probs before the mini-batch is split. It selects the same tokens for any split.
# Tokens of equal covariance are selected together or not at all, so their order does not matter.


@dataclass(frozen=True, slots=True)
class CovarianceRange:
    """Rule that selects tokens with a covariance from ``lowest`` to ``highest``.

    The covariance of a token is ``(A - mean_advantage) (log p_old - mean_log_prob)``. A is its
    advantage and p_old its old probability. The means are those of the mini-batch.
    """

    mean_advantage: float
    mean_log_prob: float
    lowest: float
    highest: float

    def compute_covariances(self, old_log_prob: PerToken, advantages: PerToken) -> PerToken:
        """Return the covariance of log-prob and advantage of each token, float64 ``[B, R]``."""
        return (advantages.double() - self.mean_advantage) * (
            old_log_prob.double() - self.mean_log_prob
        )

    def select_tokens(
        self, old_log_prob: PerToken, advantages: PerToken, response_mask: TokenMask
    ) -> TokenMask:
        """Return the mask ``[B, R]`` of sampled tokens whose covariance is in the range."""
        token_covariances = self.compute_covariances(old_log_prob, advantages)
        return (
            response_mask.bool()
            & (token_covariances >= self.lowest)
            & (token_covariances <= self.highest)
        )


EMPTY_RANGE = CovarianceRange(0.0, 0.0, math.inf, -math.inf)


def find_covariance_range(
    old_log_prob: PerElement,
    advantages: PerElement,
    share: float,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> CovarianceRange:
    """Return the range of the largest positive covariances within ``lowest`` to ``highest``.

    ``share`` is the fraction of all tokens to select. The number of selected tokens is rounded
    down, but at least one. ``old_log_prob [N]`` and ``advantages [N]`` are those of all sampled
    tokens of a mini-batch, in any order. The range is empty if no positive covariance is within the
    limits. Example: with covariances (0.5, 0.1, -0.3, 0.2) and ``share=0.5`` the range is 0.2 to
    ``highest``.
    """
    if not len(advantages) or share <= 0:
        return EMPTY_RANGE
    # Sort the values before the mean. Their order depends on the number of ranks, and the order
    # would change the rounding of the mean.
    full_range = CovarianceRange(
        advantages.double().sort().values.mean().item(),
        old_log_prob.double().sort().values.mean().item(),
        lowest,
        highest,
    )
    token_covariances = full_range.compute_covariances(old_log_prob[None], advantages[None])[0]
    qualifying_covariances = token_covariances[
        (token_covariances > 0) & (token_covariances >= lowest) & (token_covariances <= highest)
    ]
    if not len(qualifying_covariances):
        return EMPTY_RANGE
    num_selected = min(len(qualifying_covariances), max(1, int(share * len(advantages))))
    lowest_selected = qualifying_covariances.topk(num_selected).values[-1].item()
    return CovarianceRange(
        full_range.mean_advantage, full_range.mean_log_prob, lowest_selected, highest
    )


@register_token_loss(
    "clip_cov",
    needs=LossNeeds(
        picker=find_covariance_range,
        token_selector_params={
            "share": "policy_loss.clip_cov_ratio",
            "lowest": "policy_loss.clip_cov_lb",
            "highest": "policy_loss.clip_cov_ub",
        },
    ),
)
def compute_policy_loss_clip_cov(loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Compute the Clip-Cov loss: 0 for selected tokens, and PPO's clipped loss for all others.

    The fraction ``clip_cov_ratio`` of all tokens is selected: those with the largest covariance of
    log-prob and advantage within ``clip_cov_lb`` to ``clip_cov_ub``. The paper draws them at random
    from that range. Here the selection is deterministic, so that all micro-batches and ranks agree.
    """
    surrogate = compute_clipped_surrogate(loss_inputs.prob_ratio, loss_inputs)
    losses = torch.where(loss_inputs.selected_tokens, 0.0, surrogate.losses)
    return TokenLosses(losses, surrogate.clipped | loss_inputs.selected_tokens)


# advantages_only=False: a row whose advantages are all 0 must not be skipped, because the KL term
# gives its selected tokens a gradient.
@register_token_loss(
    "kl_cov",
    advantages_only=False,
    needs=LossNeeds(
        params={"ppo_kl_coef": "policy_loss.ppo_kl_coef"},
        picker=find_covariance_range,
        token_selector_params={"share": "policy_loss.kl_cov_ratio"},
    ),
)
def compute_policy_loss_kl_cov(
    loss_inputs: PolicyLossInputs, ppo_kl_coef: float = 1.0
) -> TokenLosses:
    """Compute the KL-Cov loss: ``-r A + ppo_kl_coef |d|`` for selected tokens, else ``-r A``.

    ``d`` is the new minus the old log-prob, ``r = exp(d)``, and A is the advantage. The fraction
    ``kl_cov_ratio`` of all tokens is selected: those with the largest covariance of log-prob and
    advantage, if it is above 0.

    >>> old, new = torch.tensor([[0.4, 0.4]]).log(), torch.tensor([[0.6, 0.6]]).log()
    >>> ones = torch.ones(1, 2)  # token losses -1.5 + 0.41 (selected) and -1.5
    >>> compute_policy_loss_kl_cov(old, new, ones, ones, selected=torch.tensor([[1, 0]]))[0]
    tensor(-1.2973)
    """
    plain_losses = -loss_inputs.prob_ratio * loss_inputs.advantages
    losses_with_kl = plain_losses + ppo_kl_coef * loss_inputs.log_ratio.abs()
    return TokenLosses(
        torch.where(loss_inputs.selected_tokens, losses_with_kl, plain_losses),
        loss_inputs.selected_tokens,
    )
