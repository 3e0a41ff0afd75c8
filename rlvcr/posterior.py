"""Posterior credit: the drawn level as a latent variable, given the action and all four thoughts.

Let z_k be one thought per level, c_k the context with level k and z_k, and a the sampled action.
Sampling all four thoughts first and drawing the level afterwards gives the same turn. Given a and
the four thoughts, level k was drawn with probability

    w_k = pi(k) p(a | c_k) / sum_j pi(j) p(a | c_j)

The level's policy gradient ``A_l grad log pi(l)`` is replaced by its expectation
``sum_k w_k A_k grad log pi(k)``. A_k is the advantage with the token price of thought k. With
``env.history=window`` the future depends on the thought through the action only. Then this is the
conditional expectation of GRPO's own gradient: unbiased, with lower variance (Rao-Blackwell).
"""

import torch

from rlvcr.shapes import LevelMask, PerLevel


def compute_level_posterior(
    level_log_probs: PerLevel, action_log_probs: PerLevel, valid: LevelMask
) -> PerLevel:
    """Return ``w [S, 4]`` float64, the probabilities of the drawn level given the action.

    ``level_log_probs [S, 4]`` are the log-probs of the four digits, ``action_log_probs [S, 4]`` the
    sums of the log-probs of the action's tokens after each thought. A level that is not ``valid``
    gets 0: with its thought, which was cut or unreadable, the turn would have had no action. A row
    without a valid level is 0.

        pi = (1/2, 1/2, 0, 0), p(a | c) = (0.2, 0.6, -, -): w = (1/4, 3/4, 0, 0)
    """
    joint = torch.where(
        valid.bool(), level_log_probs.double() + action_log_probs.double(), -torch.inf
    )
    has_level = valid.bool().any(-1, keepdim=True)
    return torch.where(has_level, joint, 0.0).softmax(-1) * has_level


def subtract_expected_price(
    prices: PerLevel, level_log_probs: PerLevel, valid: LevelMask
) -> PerLevel:
    """Return ``prices [S, 4]`` minus their mean over the policy's distribution of ``valid`` levels.

    The mean does not depend on the drawn level, so subtracting it changes no expectation.
    """
    probabilities = compute_level_posterior(level_log_probs, torch.zeros_like(prices), valid)
    return prices - (probabilities * prices).sum(-1, keepdim=True)
