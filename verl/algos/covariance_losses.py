"""Losses that hold entropy up at the few tokens that would lower it most (Cui et al., 2025, arXiv
2505.22617): those whose log-prob and advantage covary most.

Which tokens these are depends on all tokens of a mini-batch. It is found before the mini-batch is
cut, from the log-probs that the policy had when it sampled, as a ``CovarianceRange``; with it any
part picks its tokens alone, and the parts pick what the whole would. Tokens of equal covariance are
picked together or not at all, so that their order does not matter.
"""

import math
from dataclasses import dataclass

import torch

from verl.algos.algorithm_registry import LossNeeds
from verl.algos.shapes import PerElement, PerToken, TokenMask
from verl.algos.token_losses import SampledTokens, TokenLosses, clipped_surrogate, token_loss


@dataclass(frozen=True, slots=True)
class CovarianceRange:
    """Means of a whole mini-batch, and the covariances that are picked: ``lowest`` to ``highest``.

    The covariance of a token is ``(A - mean_advantage) (log p_old - mean_log_prob)``.
    """

    mean_advantage: float
    mean_log_prob: float
    lowest: float
    highest: float

    def covariances(self, old_log_prob: PerToken, advantages: PerToken) -> PerToken:
        """Of each token, float64."""
        return (advantages.double() - self.mean_advantage) * (
            old_log_prob.double() - self.mean_log_prob
        )

    def selects(
        self, old_log_prob: PerToken, advantages: PerToken, response_mask: TokenMask
    ) -> TokenMask:
        """``[B, R]`` bool: the sampled tokens that are picked."""
        found = self.covariances(old_log_prob, advantages)
        return response_mask.bool() & (found >= self.lowest) & (found <= self.highest)


NOTHING = CovarianceRange(0.0, 0.0, math.inf, -math.inf)


def highest_covariances(
    old_log_prob: PerElement,
    advantages: PerElement,
    share: float,
    lowest: float = 0.0,
    highest: float = math.inf,
) -> CovarianceRange:
    """The range that picks, of the covariances above 0 and from ``lowest`` to ``highest``, the
    largest: ``share`` of all tokens, at least one.

    ``old_log_prob [N]`` and ``advantages [N]`` are all sampled tokens of a mini-batch, in any
    order.
    """
    if not len(advantages) or share <= 0:
        return NOTHING
    # Sorted, so that the mean does not depend on the order, which differs with the ranks.
    whole = CovarianceRange(
        advantages.double().sort().values.mean().item(),
        old_log_prob.double().sort().values.mean().item(),
        lowest,
        highest,
    )
    found = whole.covariances(old_log_prob[None], advantages[None])[0]
    candidates = found[(found > 0) & (found >= lowest) & (found <= highest)]
    if not len(candidates):
        return NOTHING
    count = min(len(candidates), max(1, int(share * len(advantages))))
    least = candidates.topk(count).values[-1].item()
    return CovarianceRange(whole.mean_advantage, whole.mean_log_prob, least, highest)


@token_loss(
    "clip_cov",
    needs=LossNeeds(
        picker=highest_covariances,
        picker_params={
            "share": "policy_loss.clip_cov_ratio",
            "lowest": "policy_loss.clip_cov_lb",
            "highest": "policy_loss.clip_cov_ub",
        },
    ),
)
def compute_policy_loss_clip_cov(tokens: SampledTokens) -> TokenLosses:
    """Clip-Cov: PPO's clipped loss, and 0 for the tokens that are picked: ``clip_cov_ratio`` of
    all, with a covariance from ``clip_cov_lb`` to ``clip_cov_ub``.

    The paper draws them at random among those in the range; here they are the largest of them,
    which needs no draw that a split would have to share.
    """
    surrogate = clipped_surrogate(tokens.ratio, tokens)
    losses = torch.where(tokens.selected, 0.0, surrogate.losses)
    return TokenLosses(losses, surrogate.clipped | tokens.selected)


# A token without advantage may be picked too, and then it has a gradient.
@token_loss(
    "kl_cov",
    advantages_only=False,
    needs=LossNeeds(
        params={"ppo_kl_coef": "policy_loss.ppo_kl_coef"},
        picker=highest_covariances,
        picker_params={"share": "policy_loss.kl_cov_ratio"},
    ),
)
def compute_policy_loss_kl_cov(tokens: SampledTokens, ppo_kl_coef: float = 1.0) -> TokenLosses:
    """KL-Cov: ``-r A``, and ``-r A + ppo_kl_coef |d|`` for the ``kl_cov_ratio`` of all tokens with
    the largest covariance above 0.
    """
    plain = -tokens.ratio * tokens.advantages
    held = plain + ppo_kl_coef * tokens.log_ratio.abs()
    return TokenLosses(torch.where(tokens.selected, held, plain), tokens.selected)
