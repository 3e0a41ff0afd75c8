"""Policy losses that limit the entropy decrease (Cui et al., 2025, arXiv 2505.22617).

The losses treat the tokens with the largest covariance of log-prob and advantage differently. The
selection of these tokens depends on the whole mini-batch. A ``CovarianceRange`` is therefore
computed from the old log-probs before the mini-batch is split. It selects the same tokens for any
split. Tokens of equal covariance are selected together or not at all, so their order does not
matter.
"""

import math
from dataclasses import dataclass

import torch

from verl.algos.algorithm_registry import LossNeeds
from verl.algos.shapes import PerElement, PerToken, TokenMask
from verl.algos.token_losses import (
    SampledTokens,
    TokenLosses,
    compute_clipped_surrogate,
    register_token_loss,
)


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
        """Return the mask ``[B, R]`` of sampled tokens whose covariance is in the range.

        It is the covariance of the token's log-prob and advantage.
        """
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

    They are covariances of log-prob and advantage (see ``CovarianceRange``). ``share`` is the
    fraction of all tokens to select. The number of selected tokens is rounded down, but at least
    one. ``old_log_prob [N]`` and ``advantages [N]`` are those of all sampled tokens of a
    mini-batch, in any order. The range is empty if no positive covariance is within the limits.
    Example: with covariances (0.5, 0.1, -0.3, 0.2) and ``share=0.5`` the range is 0.2 to
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
def compute_policy_loss_clip_cov(tokens: SampledTokens) -> TokenLosses:
    """Compute the Clip-Cov loss: 0 for selected tokens, and PPO's clipped loss for all others.

    The fraction ``clip_cov_ratio`` of all tokens is selected: those with the largest covariance of
    log-prob and advantage within ``clip_cov_lb`` to ``clip_cov_ub``. The paper draws them at random
    from that range. Here the selection is deterministic, so that all micro-batches and ranks agree.
    """
    surrogate = compute_clipped_surrogate(tokens.prob_ratio, tokens)
    losses = torch.where(tokens.selected, 0.0, surrogate.losses)
    return TokenLosses(losses, surrogate.clipped | tokens.selected)


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
def compute_policy_loss_kl_cov(tokens: SampledTokens, ppo_kl_coef: float = 1.0) -> TokenLosses:
    """Compute the KL-Cov loss: ``-r A + ppo_kl_coef |d|`` for selected tokens, else ``-r A``.

    ``d`` is the new minus the old log-prob, ``r = exp(d)``, and A is the advantage. The fraction
    ``kl_cov_ratio`` of all tokens is selected: those with the largest covariance of log-prob and
    advantage, if it is above 0.
    """
    plain_losses = -tokens.prob_ratio * tokens.advantages
    losses_with_kl = plain_losses + ppo_kl_coef * tokens.log_ratio.abs()
    return TokenLosses(torch.where(tokens.selected, losses_with_kl, plain_losses), tokens.selected)
