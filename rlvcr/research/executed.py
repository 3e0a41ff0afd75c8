"""Credit from replays: returns of branches in which another level is forced in one turn.

    original   s0 ──3── s1 ──2── s2 ──4── ...   return R
    branch               └───1── s2' ── ...     return R'     credit of level 2 at s1: 3/4 (R - R')

A score measures how likely a thought makes the sampled action, not whether the action was good. The
difference of returns is an unbiased estimate of the effect of the level. It is noisy, because each
return is from one rollout. The returns are compared at a share of the turns. With
``credit=executed`` all other turns get no credit. With ``credit=corrected`` they get credit from
scores, scaled by a fitted slope.
"""

from typing import NamedTuple

import torch

from rlvcr.alternatives import SEED_RANGE
from rlvcr.levels import LEVELS, ParsedTurn
from rlvcr.settings import RLVCRSettings
from rlvcr.shapes import PerTurn, TurnMask
from rlvcr.thinking import compute_token_cost
from verl.utils.seeds import derive_seed
from verl.utils.statistics import compute_rank_correlation

# The replayed level is drawn from the three levels that were not chosen. The expectation of 3/4 of
# the difference of returns is the return of the chosen level minus the mean over all four levels.
DIFFERENCE_FACTOR = 0.75
PRIOR_SLOPE = 1.0  # prior mean of the slope of credit from returns against credit from scores
MIN_SUM_OF_SQUARES = 1e-12


def choose_executed_level(
    parsed: ParsedTurn | None, share: float, seed: int, traj_uid: str, step: int
) -> int | None:
    """Draw the level to force in a replay of a turn, at a ``share`` of the turns.

    The level is drawn uniformly from the three levels that were not chosen. The result is None for
    turns without replay, and for turns without a sampled level digit. The draw depends only on
    seed, trajectory, turn and chosen level. Turns that were cut by length or cannot be parsed are
    included. Otherwise a level would get credit for its better turns only.
    """
    chosen_level = None if parsed is None else parsed.sampled_level
    if chosen_level is None:
        return None
    if derive_seed(seed, "executed", traj_uid, step) / SEED_RANGE >= share:
        return None
    other_levels = [level for level in LEVELS if level != chosen_level]
    return other_levels[derive_seed(seed, "executed level", traj_uid, step) % len(other_levels)]


def count_priced_tokens(parsed: ParsedTurn | None, turn_tokens: int) -> int:
    """Return the number of tokens of a turn that have a token cost: those of its thought.

    Where no thought can be located, all tokens between level digit and action count. Without an
    action they count up to the end of the turn (``turn_tokens``). A turn that cannot be parsed is
    therefore not cheaper.
    """
    if parsed is None:
        return 0
    if parsed.thought_span is not None:
        return parsed.thought_tokens
    start_index = 0 if parsed.choice is None else parsed.choice.position + 1
    end_index = turn_tokens if parsed.action_span is None else parsed.action_span[0]
    return max(0, end_index - start_index)


def compute_priced_return(
    reward: float, is_success: bool, thought_tokens: int, rlvcr: RLVCRSettings
) -> float:
    """Return ``reward``, the return of a trajectory, minus the token cost of one thought.

    With ``price_in=won`` an unsuccessful trajectory has no token cost.
    """
    if rlvcr.price_in == "won" and not is_success:
        return reward
    price = compute_token_cost(torch.tensor(thought_tokens), rlvcr.cost_coef, rlvcr.cost_max)
    return reward - float(price)


class JoinedCredit(NamedTuple):
    """Credit of S turns, ``weight * c + executed``, with metrics.

    c is the credit from scores (log-probs or entropies of the action). ``executed`` is the credit
    from returns of replays with another level.
    """

    weight: PerTurn
    executed: PerTurn
    metrics: dict[str, float]


def join_credit(
    scored_credit: PerTurn, differences: PerTurn, is_counted: TurnMask, rule: str, scale: float
) -> JoinedCredit:
    """Combine credit from scores, ``scored_credit`` [S], with ``differences`` [S] of returns.

    ``differences`` are NaN at turns without a replay. With the rule ``executed``, replayed turns
    get ``differences / scale`` and all other turns get 0. With the rule ``corrected``, all other
    turns get their credit from scores times a slope. The slope is fitted to the replayed turns
    where ``is_counted`` [S] is true and ``scored_credit`` is not 0.
    """
    is_executed = ~differences.isnan()
    executed_credit = torch.where(is_executed, differences / scale, 0.0)
    is_compared = is_executed & is_counted & (scored_credit != 0)
    executed_abs_mean = executed_credit.abs().sum() / is_executed.sum().clamp(min=1)
    metrics = {
        "rlvcr/executed_steps": float(is_executed.sum()),
        "rlvcr/executed_advantage_abs_mean": float(executed_abs_mean),
    }
    if is_compared.any():
        metrics["rlvcr/executed_correlation"] = compute_rank_correlation(
            scored_credit[is_compared].tolist(), executed_credit[is_compared].tolist()
        )
    if rule == "executed":
        return JoinedCredit(torch.zeros_like(scored_credit), executed_credit, metrics)
    slope = fit_shrinkage_slope(scored_credit[is_compared], executed_credit[is_compared])
    metrics["rlvcr/executed_slope"] = slope
    return JoinedCredit(torch.where(is_executed, 0.0, slope), executed_credit, metrics)


def fit_shrinkage_slope(scored_credit: PerTurn, executed_credit: PerTurn) -> float:
    """Fit the factor for credit from scores to credit from returns, both [E] for E replayed turns.

    The factor is the least-squares slope, averaged with a prior slope of 1. The weights of the
    average are the precisions of the two slopes; the prior slope has precision 1. The result is at
    least 0. It is near 1 for few turns, and near 0 if the two credits do not correlate. The line
    has an intercept, because both credits have positive means: a line through the origin would have
    a positive slope without any correlation.

        E = 2 turns: 1.0.  Slope 0.2 with precision 3: (1 + 3 * 0.2) / (1 + 3) = 0.4
    """
    scored_deviation = scored_credit.double() - scored_credit.double().mean()
    executed_deviation = executed_credit.double() - executed_credit.double().mean()
    scored_squares = float((scored_deviation * scored_deviation).sum())
    slope = float((scored_deviation * executed_deviation).sum()) / max(
        scored_squares, MIN_SUM_OF_SQUARES
    )
    residual_squares = float(((executed_deviation - slope * scored_deviation) ** 2).sum())
    # The slope cannot be estimated from two turns, or from turns with equal executed credit.
    if (
        len(scored_deviation) < 3
        or float((executed_deviation * executed_deviation).sum()) < MIN_SUM_OF_SQUARES
    ):
        return PRIOR_SLOPE
    precision = (
        scored_squares * (len(scored_deviation) - 2) / max(residual_squares, MIN_SUM_OF_SQUARES)
    )
    return max(0.0, (PRIOR_SLOPE + precision * slope) / (1.0 + precision))
