"""Executed alternatives: what another level would have led to, found out by playing on with it.

    play     s0 ──3── s1 ──2── s2 ──4── ...   return R
    branch             └───1── s2' ── ...     return R'     credit of level 2 at s1: 3/4 (R - R')

Confidence says how well a thought prepared an action, and never whether the action was any good.
Returns do: the difference is an unbiased estimate of what the level was worth, and a noisy one, of
one play each. So it is measured at a share of the steps, and used there alone, or also to find out
what a difference of confidence is worth at all the others.
"""

from typing import NamedTuple

import torch

from rlvcr.alternatives import SEED_RANGE
from rlvcr.levels import LEVELS, ParsedStep
from rlvcr.settings import RLVCRSettings
from rlvcr.shapes import PerStep, StepMask
from rlvcr.thinking import thinking_price
from verl.utils.seeds import derive_seed
from verl.utils.statistics import rank_correlation

# One of three other levels was drawn: 3/4 of the difference has the mean of "own less all four".
SHARE_OF_OTHERS = 0.75
BELIEF = 1.0  # in confidence, before any other level was executed
TINY = 1e-12


def level_to_try(
    parsed: ParsedStep | None, share: float, seed: int, traj_uid: str, step: int
) -> int | None:
    """Another level than the one that was chosen, drawn uniformly at a ``share`` of the steps; None
    at the others, and where no level digit was sampled.

    Depends on seed, trajectory, step and chosen level alone: a step that was cut after its level,
    or cannot be read, is tried like any other. A branch counts whatever its turn came to, and so
    does the step itself; otherwise a level would be credited with its better turns only.
    """
    chosen = None if parsed is None else parsed.sampled_level
    if chosen is None:
        return None
    if derive_seed(seed, "executed", traj_uid, step) / SEED_RANGE >= share:
        return None
    others = [level for level in LEVELS if level != chosen]
    return others[derive_seed(seed, "executed level", traj_uid, step) % len(others)]


def priced_tokens(parsed: ParsedStep | None, turn_tokens: int) -> int:
    """Tokens of the thought of a turn of ``turn_tokens`` tokens, for its price.

    Where no thought can be told apart, because the turn was cut or written in another form, all
    tokens between level digit and action count: being unreadable saves nothing.
    """
    if parsed is None:
        return 0
    if parsed.thought_span is not None:
        return parsed.thought_tokens
    first = 0 if parsed.choice is None else parsed.choice.position + 1
    last = turn_tokens if parsed.action_span is None else parsed.action_span[0]
    return max(0, last - first)


def worth(reward: float, won: bool, thought_tokens: int, rlvcr: RLVCRSettings) -> float:
    """The return of a play, less the price of the thought that is judged."""
    if rlvcr.price_in == "won" and not won:
        return reward
    price = thinking_price(torch.tensor(thought_tokens), rlvcr.cost_coef, rlvcr.cost_max)
    return reward - float(price)


class JoinedCredit(NamedTuple):
    """``weight`` [S] multiplies the credit that confidence gives; ``executed`` [S] is credited
    besides.
    """

    weight: PerStep
    executed: PerStep
    metrics: dict[str, float]


def join_credit(
    scored: PerStep, differences: PerStep, counts: StepMask, rule: str, scale: float
) -> JoinedCredit:
    """Credit from confidence ``scored`` [S] and from ``differences`` [S] of what plays were worth,
    NaN where no other level was executed.

    ``executed`` uses the differences alone, divided by ``scale``. ``corrected`` also gives all
    other steps their confidence, times ``belief`` in it: what the executed steps say where
    ``counts`` [S], that is where confidence is credited at all.
    """
    tried = ~differences.isnan()
    executed = torch.where(tried, differences / scale, 0.0)
    compared = tried & counts & (scored != 0)
    size = executed.abs().sum() / tried.sum().clamp(min=1)
    metrics = {
        "rlvcr/executed_steps": float(tried.sum()),
        "rlvcr/executed_advantage_abs_mean": float(size),
    }
    if compared.any():
        metrics["rlvcr/executed_correlation"] = rank_correlation(
            scored[compared].tolist(), executed[compared].tolist()
        )
    if rule == "executed":
        return JoinedCredit(torch.zeros_like(scored), executed, metrics)
    slope = belief(scored[compared], executed[compared])
    metrics["rlvcr/executed_slope"] = slope
    return JoinedCredit(torch.where(tried, 0.0, slope), executed, metrics)


def belief(confidence: PerStep, executed: PerStep) -> float:
    """How much of ``confidence`` [E] is credited, from what the same steps were found to be worth,
    ``executed`` [E]: 1 as long as they say nothing, 0 where they show that it says nothing.

    The slope of the least squares line, joined with a slope of ``BELIEF`` that is known as well as
    to 1, each weighed by its precision; never negative. The line has an intercept: both are
    positive in the mean, and through the origin would have a slope without any connection.
    """
    own = confidence.double() - confidence.double().mean()
    found = executed.double() - executed.double().mean()
    spread = float((own * own).sum())
    slope = float((own * found).sum()) / max(spread, TINY)
    left = float(((found - slope * own) ** 2).sum())
    # Two steps always lie on a line, and steps of one worth say nothing about what made it.
    if len(own) < 3 or float((found * found).sum()) < TINY:
        return BELIEF
    precision = spread * (len(own) - 2) / max(left, TINY)
    return max(0.0, (BELIEF + precision * slope) / (1.0 + precision))
