"""How good the chosen level of a step was among the four: advantage, factor, bonus, and their place
on tokens.

S counts steps; level k is column k - 1, and "chosen" is that column, -1 where the step could not be
parsed.
"""

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rlvcr.levels import LEVELS
from rlvcr.names import SCORES
from rlvcr.shapes import Column, Ids, LevelMask, PerLevel, PerStep, StepMask
from verl.algos import choose, factorize, group_mean_std
from verl.names import NORM_MODES
from verl.records import SegmentScore

MODES = NORM_MODES
NUM_LEVELS = len(LEVELS)


def score_of(entry: SegmentScore, score: str) -> float:
    """The score of one context from its measurements over the action's tokens.

    ``entropy`` is -H, ``logprob`` the mean log-prob S, ``prob`` the geometric mean exp(S) of the
    tokens' probabilities.
    """
    choose(score, SCORES, "score (algorithm.rlvcr.score)")
    if score == "entropy":
        return -entry.entropy
    return entry.logprob if score == "logprob" else entry.geometric_prob


def thinking_price(tokens: Tensor, cost_coef: float, cost_max: float) -> Tensor:
    """``cost_coef min(T, cost_max) / cost_max`` of thoughts of ``tokens`` tokens ``[...]``,
    float64.
    """
    if cost_max <= 0:
        raise ValueError(f"cost_max must be positive, got {cost_max}")
    # The price has a ceiling, so that one endless thought does not decide the mean of its group.
    return cost_coef * tokens.double().clamp(max=cost_max) / cost_max


class Utilities(NamedTuple):
    """What the contexts of every step are worth.

    ``utility`` and ``price`` are float64 and 0 where not ``valid``; ``column`` is the chosen one,
    0 where there is none; ``counts`` says which steps can be compared at all.
    """

    utility: PerLevel
    price: PerLevel
    valid: LevelMask
    column: Tensor  # [S, 1], as gather takes it
    counts: StepMask


def _utilities(
    scores: PerLevel,
    valid: LevelMask,
    chosen: Column,
    costs: PerLevel,
    cost_coef: float,
    cost_max: float,
) -> Utilities:
    if scores.shape[-1] != NUM_LEVELS or not scores.shape == valid.shape == costs.shape:
        raise ValueError(
            "scores, valid and costs must be [S, 4], "
            f"got {scores.shape}, {valid.shape}, {costs.shape}"
        )
    usable = valid.bool() & scores.isfinite()
    price = torch.where(usable, thinking_price(costs, cost_coef, cost_max), 0.0)
    utility = torch.where(usable, scores.double() - price, 0.0)
    known = (chosen >= 0) & (chosen < NUM_LEVELS)
    column = torch.where(known, chosen, 0).long().unsqueeze(-1)
    # A comparison needs the chosen context and at least one other.
    counts = known & usable.gather(-1, column).squeeze(-1) & (usable.sum(-1) >= 2)
    return Utilities(utility, price, usable, column, counts)


def thinking_advantage(
    scores: PerLevel,
    valid: LevelMask,
    chosen: Column,
    costs: PerLevel,
    mode: str = "mean_norm",
    cost_coef: float = 0.0,
    cost_max: float = 64,
    std_floor: float = 0.1,
    alternatives: str = "all",
) -> tuple[PerStep, PerStep]:
    """``A_think [S]`` of the chosen level within its group of four, and the share of it that is due
    to cost ``[S]``.

    ``scores [S, 4]``, ``valid [S, 4]`` (which contexts exist), ``chosen [S]`` (0..3, -1 unparsed),
    ``costs [S, 4]`` thought tokens. ``U_k = score_k - cost_coef min(T_k, cost_max) / cost_max``.
    ``mean_norm`` gives ``U_l - mean U`` over the valid contexts; ``mean_std_norm`` divides by the
    larger of their (population) standard deviation and ``std_floor``. With ``alternatives="one"`` a
    single other level j was drawn and ``3/4 (U_l - U_j)``, which has the same expectation, replaces
    the difference. The second result is already contained in the first: subtracting it leaves the
    advantage by score alone. Steps with an unparsed level, an invalid chosen context or fewer than
    two valid ones get 0; so does a tie.
    """
    choose(mode, MODES, "mode (algorithm.rlvcr.mode)")
    choose(alternatives, ("all", "one"), "alternatives (algorithm.rlvcr.alternatives)")
    found = _utilities(scores, valid, chosen, costs, cost_coef, cost_max)
    members = found.valid.sum(-1, keepdim=True).clamp(min=1)
    # Deviations from the chosen context: equal utilities then cancel exactly.
    own = found.utility.gather(-1, found.column)
    deviation = torch.where(found.valid, found.utility - own, 0.0)
    mean = deviation.sum(-1, keepdim=True) / members
    advantage = -mean.squeeze(-1)
    mean_price = found.price.sum(-1, keepdim=True) / members
    cost_share = (mean_price - found.price.gather(-1, found.column)).squeeze(-1)
    if alternatives == "one":
        # U_l minus the mean of l and j is half of U_l - U_j; m / (m - 1) = 2 makes it whole. Over
        # the draw of j, 3/4 (U_l - U_j) has the mean U_l minus the mean of all four.
        factor = 0.75 * members.squeeze(-1) / (members.squeeze(-1) - 1).clamp(min=1)
        advantage = advantage * factor
        cost_share = cost_share * factor
    if mode == "mean_std_norm":
        squares = torch.where(found.valid, (deviation - mean) ** 2, 0.0)
        variance = squares.sum(-1) / members.squeeze(-1)
        divisor = variance.sqrt().clamp(min=std_floor)
        divisor = torch.where(divisor > 0, divisor, 1.0)
        advantage = advantage / divisor
        cost_share = cost_share / divisor
    return (
        torch.where(found.counts, advantage, 0.0).float(),
        torch.where(found.counts, cost_share, 0.0).float(),
    )


def thinking_reweight(
    scores: PerLevel,
    valid: LevelMask,
    chosen: Column,
    costs: PerLevel,
    cost_coef: float = 0.0,
    cost_max: float = 64,
    spread_floor: float = 0.02,
) -> PerStep:
    """``g [S]``: factor of the trajectory advantage by within-step confidence (CoPO).

    ``g_k = exp(2 c_k) / mean_j exp(2 c_j)`` with ``c_k = (U_k - min U) / max(max U - min U,
    spread_floor)`` over the valid contexts: utilities, price included, and not scores alone. The
    floor (in units of the score, positive) keeps contexts that differ by rounding noise from being
    told apart as far as the best and the worst. Other arguments as in ``thinking_advantage``. Steps
    that get no thinking advantage there, and ties, have g = 1.
    """
    if not spread_floor > 0:
        raise ValueError(f"spread_floor must be positive, got {spread_floor}")
    found = _utilities(scores, valid, chosen, costs, cost_coef, cost_max)
    low = torch.where(found.valid, found.utility, torch.inf).amin(-1, keepdim=True)
    high = torch.where(found.valid, found.utility, -torch.inf).amax(-1, keepdim=True)
    # Where no context is valid the distance is -inf, and the floor holds as well.
    distance = (high - low).clamp(min=spread_floor)
    scaled = torch.where(found.valid, (found.utility - low) / distance, 0.0)
    # These lie in [0, 1], so weights differ by e^2 = 7.4 at most.
    weight = torch.where(found.valid, (2 * scaled).exp(), 0.0)
    mean = weight.sum(-1, keepdim=True) / found.valid.sum(-1, keepdim=True).clamp(min=1)
    relative = weight / torch.where(mean > 0, mean, 1.0)
    factor = relative.gather(-1, found.column).squeeze(-1)
    return torch.where(found.counts, factor, 1.0).float()


def place_step_values(
    length: int, spans: Sequence[Sequence[tuple[int, int]]], values: Sequence[float] | Tensor
) -> Tensor:
    """``[length]`` float32 with ``values[s]`` on the half-open index ranges ``spans[s]``, 0
    elsewhere.

    ``spans[s]`` are the level digit and the thought of step s in response coordinates. Raises
    ``ValueError`` for a range outside the response or one that another step already fills.
    """
    placed = torch.zeros(length)
    taken = torch.zeros(length, dtype=torch.bool)
    for ranges, value in zip(spans, values, strict=True):
        for start, end in ranges:
            if not 0 <= start <= end <= length:
                raise ValueError(
                    f"span [{start}, {end}) lies outside a response of {length} tokens"
                )
            if taken[start:end].any():
                raise ValueError(f"span [{start}, {end}) overlaps another one")
            placed[start:end] = float(value)
            taken[start:end] = True
    return placed


def level_count_bonus(levels: Column, group_index: Ids) -> PerStep:
    """``[S]`` count bonus: ``-log f_l``, f_l the frequency of the step's level in its group, minus
    the group's mean.

    ``levels [S]`` 0..3 (-1: unparsed, not counted, bonus 0), ``group_index [S]`` e.g. the uid of
    each step. The mean is taken off so that a group's bonuses sum to 0 and only rare levels gain.
    """
    every_group = factorize(group_index).to(levels.device)
    known = levels >= 0
    bonus = torch.zeros(len(levels), dtype=torch.float64, device=levels.device)
    if not known.any():
        return bonus.float()
    groups = every_group[known]
    cells = groups * NUM_LEVELS + levels[known]  # one number per group and level
    ones = torch.ones_like(groups, dtype=torch.float64)
    size = torch.zeros(int(groups.max()) + 1, dtype=torch.float64, device=levels.device)
    members = size.index_add(0, groups, ones)[groups]
    counts = torch.bincount(cells)[cells].double()
    # Up to a constant, -log f is the slope of the levels' entropy: the bonus leads uphill.
    surprise = -(counts / members).log()
    bonus[known] = surprise - group_mean_std(surprise, groups).mean
    return bonus.float()
