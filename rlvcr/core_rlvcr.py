"""The maths of RLVCR: how good a chosen thinking level was among the four, and how that joins the trajectory's credit.

A step's action a is held fixed and scored under the contexts of all four levels; ``U_k`` is the score of context k
minus the price of its thought. The thinking advantage compares the chosen level's U with the group's and goes to the
level digit and the thought tokens of that step; action tokens carry the trajectory advantage alone::

    scores [S, 4], costs [S, 4] --thinking_advantage--> A_think [S], cost share [S]
                                --thinking_reweight---> g [S]
    --place_step_values, row by row, before padding--> thinking_level_entropies, thinking_token_costs,
                                                       thinking_reweight (optional), each [B, R], 0 elsewhere
    token_level_rewards [B, R] --group normalisation--> A_traj
    A_traj, the above --combine_advantages--> advantages [B, R]

S counts steps; level k is column k - 1 and "chosen" is that column, -1 where the step could not be parsed.

What was sampled under the chosen context fits it: with log-prob scores E[A_think] is a sum of KL divergences and never
negative, so ``additive`` rewards whatever level was taken, and more the larger w is. ``returns`` holds A_traj, so
``advantages - returns`` is what thinking added, and ``credit_metrics`` reports how often it turned a sign.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from rlvcr.level_metrics import CollapseWatch, level_metrics
from verl.trainer.ppo.core_algos import (
    AdvantageEstimator,
    choose,
    compute_choice_entropy_loss,
    factorize,
    group_mean_std,
    group_normalised_scores,
    register_adv_est,
    spread,
)
from verl.utils.torch_functional import masked_mean

__all__ = [
    "COMBINES",
    "MODES",
    "SCORES",
    "CollapseWatch",
    "combine_advantages",
    "compute_copo_outcome_advantage",
    "compute_rlvcr_outcome_advantage",
    "credit_metrics",
    "level_count_bonus",
    "level_diversity_loss",
    "level_metrics",
    "mixture_log_prob",
    "place_step_values",
    "score_of",
    "thinking_advantage",
    "thinking_reweight",
]

MODES = ("mean_norm", "mean_std_norm")
COMBINES = ("additive", "gated", "success", "reweight")
SCORES = ("entropy", "logprob", "prob")
NUM_LEVELS = 4


def score_of(entry: Mapping[str, float], score: str) -> float:
    """The score of one context from its measurements: ``entropy`` -H, ``logprob`` S, ``prob`` exp(S).

    ``entry`` holds ``entropy`` (nats), ``logprob`` (mean over action tokens) and ``seq_prob`` (its exponential).
    """
    choose(score, SCORES, "score (algorithm.rlvcr.score)")
    if score == "entropy":
        return -entry["entropy"]
    return entry["logprob"] if score == "logprob" else entry["seq_prob"]


def _utilities(scores: Tensor, valid: Tensor, chosen: Tensor, costs: Tensor, cost_coef: float, cost_max: float):
    """Utilities and prices ``[S, 4]`` float64 (0 where not valid), the valid mask, and which steps count ``[S]``."""
    if scores.shape[-1] != NUM_LEVELS or not scores.shape == valid.shape == costs.shape:
        raise ValueError(f"scores, valid and costs must be [S, 4], got {scores.shape}, {valid.shape}, {costs.shape}")
    if cost_max <= 0:
        raise ValueError(f"cost_max must be positive, got {cost_max}")
    valid = valid.bool() & scores.isfinite()
    price = torch.where(valid, cost_coef * costs.double().clamp(max=cost_max) / cost_max, 0.0)
    utility = torch.where(valid, scores.double() - price, 0.0)
    known = (chosen >= 0) & (chosen < NUM_LEVELS)
    column = torch.where(known, chosen, 0).long().unsqueeze(-1)
    counts = known & valid.gather(-1, column).squeeze(-1) & (valid.sum(-1) >= 2)
    return utility, price, valid, column, counts


def thinking_advantage(
    scores: Tensor,
    valid: Tensor,
    chosen: Tensor,
    costs: Tensor,
    mode: str = "mean_norm",
    cost_coef: float = 0.0,
    cost_max: float = 64,
    std_floor: float = 0.1,
    alternatives: str = "all",
) -> tuple[Tensor, Tensor]:
    """``A_think [S]`` of the chosen level within its group of four, and the share of it that is due to cost ``[S]``.

    ``scores [S, 4]``, ``valid [S, 4]`` (which contexts exist), ``chosen [S]`` (0..3, -1 unparsed), ``costs [S, 4]``
    thought tokens. ``U_k = score_k - cost_coef min(T_k, cost_max) / cost_max``. ``mean_norm`` gives ``U_l - mean U``
    over the valid contexts; ``mean_std_norm`` divides by the larger of their (population) standard deviation and
    ``std_floor``. With ``alternatives="one"`` a single other level j was drawn and ``3/4 (U_l - U_j)``, which has the
    same expectation, replaces the difference. The second result is already contained in the first: subtracting it
    leaves the advantage by score alone.
    Steps with an unparsed level, an invalid chosen context or fewer than two valid ones get 0; so does a tie.
    """
    choose(mode, MODES, "mode (algorithm.rlvcr.mode)")
    choose(alternatives, ("all", "one"), "alternatives (algorithm.rlvcr.alternatives)")
    utility, price, valid, column, counts = _utilities(scores, valid, chosen, costs, cost_coef, cost_max)
    members = valid.sum(-1, keepdim=True).clamp(min=1)
    # Deviations from the chosen context: equal utilities then cancel exactly.
    deviation = torch.where(valid, utility - utility.gather(-1, column), 0.0)
    mean = deviation.sum(-1, keepdim=True) / members
    advantage = -mean.squeeze(-1)
    cost_share = ((price.sum(-1, keepdim=True) / members) - price.gather(-1, column)).squeeze(-1)
    if alternatives == "one":  # 3/4 of the distance to the mean of the others
        factor = 0.75 * members.squeeze(-1) / (members.squeeze(-1) - 1).clamp(min=1)
        advantage, cost_share = advantage * factor, cost_share * factor
    if mode == "mean_std_norm":
        variance = torch.where(valid, (deviation - mean) ** 2, 0.0).sum(-1) / members.squeeze(-1)
        divisor = variance.sqrt().clamp(min=std_floor)
        divisor = torch.where(divisor > 0, divisor, 1.0)
        advantage, cost_share = advantage / divisor, cost_share / divisor
    return torch.where(counts, advantage, 0.0).float(), torch.where(counts, cost_share, 0.0).float()


def thinking_reweight(
    scores: Tensor, valid: Tensor, chosen: Tensor, costs: Tensor, cost_coef: float = 0.0, cost_max: float = 64
) -> Tensor:
    """``g [S]``: factor of the trajectory advantage by within-step confidence (CoPO).

    ``g_k = exp(2 c_k) / mean_j exp(2 c_j)`` with c the utilities min-max-scaled over the valid contexts; arguments as
    in ``thinking_advantage``. Steps that get no thinking advantage there, and ties, have g = 1.
    """
    utility, _, valid, column, counts = _utilities(scores, valid, chosen, costs, cost_coef, cost_max)
    low = torch.where(valid, utility, torch.inf).amin(-1, keepdim=True)
    high = torch.where(valid, utility, -torch.inf).amax(-1, keepdim=True)
    spread_of_group = high - low
    tie = ~(spread_of_group > 1e-9)
    scaled = torch.where(valid & ~tie, (utility - low) / torch.where(tie, 1.0, spread_of_group), 0.0)
    weight = torch.where(valid, (2 * scaled).exp(), 0.0)
    mean = weight.sum(-1, keepdim=True) / valid.sum(-1, keepdim=True).clamp(min=1)
    factor = (weight / torch.where(mean > 0, mean, 1.0)).gather(-1, column).squeeze(-1)
    return torch.where(counts, factor, 1.0).float()


def place_step_values(
    length: int, spans: Sequence[Sequence[tuple[int, int]]], values: Sequence[float] | Tensor
) -> Tensor:
    """``[length]`` float32 with ``values[s]`` on the half-open index ranges ``spans[s]``, 0 elsewhere.

    ``spans[s]`` are the level digit and the thought of step s in response coordinates. Raises ``ValueError`` for a
    range outside the response or one that another step already fills.
    """
    placed = torch.zeros(length)
    taken = torch.zeros(length, dtype=torch.bool)
    for ranges, value in zip(spans, values, strict=True):
        for start, end in ranges:
            if not 0 <= start <= end <= length:
                raise ValueError(f"span [{start}, {end}) lies outside a response of {length} tokens")
            if taken[start:end].any():
                raise ValueError(f"span [{start}, {end}) overlaps another one")
            placed[start:end] = float(value)
            taken[start:end] = True
    return placed


def combine_advantages(
    trajectory: Tensor,
    thinking: Tensor,
    step_advantage_w: float,
    combine: str = "additive",
    success: Tensor | None = None,
    reweight: Tensor | None = None,
) -> Tensor:
    """Join ``trajectory [B, R]`` (A_traj on sampled tokens) with ``thinking [B, R]`` (A_think where placed).

    * ``additive``: ``A_traj + w A_think``; * ``gated``: ``A_traj + w sign(A_traj) A_think``;
    * ``success``: additive in rows where ``success [B]`` holds, else A_traj;
    * ``reweight``: ``A_traj g`` where ``reweight [B, R]`` holds a factor g; its zeros mean "no factor here". w and
      ``thinking`` are not used.

    Raises ``ValueError`` for an unknown ``combine`` or a missing tensor.
    """
    choose(combine, COMBINES, "combine (algorithm.rlvcr.combine)")
    if combine == "reweight":
        if reweight is None:
            raise ValueError("combine=reweight needs the tensor thinking_reweight [B, R] in the batch")
        return trajectory * torch.where(reweight > 0, reweight, 1.0)
    added = step_advantage_w * thinking
    if combine == "gated":
        added = added * trajectory.sign()
    elif combine == "success":
        if success is None:
            raise ValueError("combine=success needs to know which trajectories succeeded (won [B])")
        added = added * success.to(added).unsqueeze(-1)
    return trajectory + added


def credit_metrics(
    advantages: Tensor,
    returns: Tensor,
    response_mask: Tensor,
    thinking_level_entropies: Tensor | None = None,
    thinking_token_costs: Tensor | None = None,
    thinking_reweight: Tensor | None = None,
    **_: Any,
) -> dict[str, float]:
    """How large thinking credit is beside trajectory credit, over the tokens that got any.

    ``thinking_share`` is what thinking added over the sum of both absolute parts (1: A_traj is swallowed);
    ``sign_flip_share`` is the share of tokens with a non-zero A_traj whose sign thinking turned.
    """
    sampled = response_mask.bool()
    added = advantages - returns
    credited = sampled & (added != 0)
    for placed in (thinking_level_entropies, thinking_reweight):
        credited = credited | (sampled & (placed != 0)) if placed is not None else credited
    trajectory, change = masked_mean(returns.abs(), credited).item(), masked_mean(added.abs(), credited).item()
    flipped = credited & (advantages * returns < 0)
    metrics = {
        "rlvcr/trajectory_advantage_abs_mean": trajectory,
        "rlvcr/thinking_share": change / (change + trajectory) if change > 0 else 0.0,
        "rlvcr/sign_flip_share": masked_mean(flipped.float(), credited & (returns != 0)).item(),
        "rlvcr/credited_token_share": masked_mean(credited.float(), sampled).item(),
    }
    if thinking_level_entropies is not None:
        metrics["rlvcr/advantage_abs_mean"] = masked_mean(thinking_level_entropies.abs(), credited).item()
    if thinking_token_costs is not None:
        metrics["rlvcr/cost_share_mean"] = masked_mean(thinking_token_costs, credited).item()
    return metrics


_RLVCR_INPUTS = {
    "token_level_rewards": "token_level_rewards",
    "response_mask": "response_mask",
    "index": "uid",
    "traj_index": "traj_uid",
}


@register_adv_est(
    AdvantageEstimator.RLVCR,
    inputs=_RLVCR_INPUTS
    | {
        "thinking_level_entropies": "thinking_level_entropies",
        "thinking_token_costs": "thinking_token_costs",
        "thinking_reweight": "thinking_reweight?",
        "success": "won?",
    },
    params={
        "step_advantage_w": "algorithm.rlvcr.step_advantage_w",
        "thinking_diversity_w": "algorithm.rlvcr.thinking_diversity_w",
        "mode": "algorithm.rlvcr.mode",
        "combine": "algorithm.rlvcr.combine",
    },
    metrics=credit_metrics,
)
def compute_rlvcr_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index,
    traj_index,
    thinking_level_entropies: Tensor,
    thinking_token_costs: Tensor,
    step_advantage_w: float = 1.0,
    thinking_diversity_w: float = 0.5,
    mode: str = "mean_norm",
    combine: str = "additive",
    thinking_reweight: Tensor | None = None,
    success=None,
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """Trajectory advantage combined with thinking advantage; ``(advantages, returns)``, both ``[B, R]`` float32.

    ``thinking_level_entropies [B, R]`` holds A_think, already normalised within its four contexts and net of cost, on
    level digits and thoughts and 0 elsewhere; ``thinking_token_costs [B, R]`` is the part of it due to cost, for
    reports. ``thinking_reweight [B, R]`` holds the factors of ``combine="reweight"``, 0 elsewhere. ``success [B]``
    says which rows belong to a won trajectory (default: return above 0). ``mode`` normalises returns in their group as
    GRPO does (``mean_norm`` without division). ``thinking_diversity_w`` weighs ``level_diversity_loss`` in the actor
    loss and does not change advantages. ``returns`` is A_traj alone. Raises ``ValueError`` for unknown options.
    """
    by_std = choose(mode, MODES, "mode (algorithm.rlvcr.mode)") == "mean_std_norm"
    scores = token_level_rewards.double().sum(-1)
    trajectory = spread(group_normalised_scores(scores, index, traj_index, by_std, epsilon), response_mask)
    won = scores > 0 if success is None else torch.as_tensor(np.asarray(success).astype(bool), device=scores.device)
    thinking = thinking_level_entropies.float() * response_mask.float()
    return combine_advantages(trajectory, thinking, step_advantage_w, combine, won, thinking_reweight), trajectory


@register_adv_est(
    AdvantageEstimator.COPO,
    inputs=_RLVCR_INPUTS | {"thinking_reweight": "thinking_reweight"},
    params={"mode": "algorithm.rlvcr.mode"},
    metrics=credit_metrics,
)
def compute_copo_outcome_advantage(
    token_level_rewards: Tensor,
    response_mask: Tensor,
    index,
    traj_index,
    thinking_reweight: Tensor,
    mode: str = "mean_norm",
    epsilon: float = 1e-6,
) -> tuple[Tensor, Tensor]:
    """CoPO: positive trajectory advantages are multiplied by the within-step confidence factor, others stay.

    Arguments and results as in ``compute_rlvcr_outcome_advantage``.
    """
    by_std = choose(mode, MODES, "mode (algorithm.rlvcr.mode)") == "mean_std_norm"
    scores = token_level_rewards.double().sum(-1)
    trajectory = spread(group_normalised_scores(scores, index, traj_index, by_std, epsilon), response_mask)
    factor = torch.where((trajectory > 0) & (thinking_reweight > 0), thinking_reweight.float(), 1.0)
    return trajectory * factor, trajectory


def level_diversity_loss(
    logits: Tensor, level_mask: Tensor, digit_ids: Tensor, denominator: Tensor | float | None = None
) -> Tensor:
    """Negative mean entropy over the four level digits where a level digit was sampled; weigh it by
    ``thinking_diversity_w`` and add it to the loss.

    ``logits [B, R, V]`` predict the token at each response position, ``level_mask [B, R]`` marks the digits and
    ``digit_ids [4]`` are their token ids (or ``[N, V]`` with ``[N]``). ``denominator``: digits in the mini-batch.
    """
    return compute_choice_entropy_loss(logits, level_mask, digit_ids, denominator)


def level_count_bonus(levels: Tensor, group_index) -> Tensor:
    """``[S]`` count bonus: ``-log f_l``, f_l the frequency of the step's level in its group, minus the group's mean.

    ``levels [S]`` 0..3 (-1: unparsed, not counted, bonus 0), ``group_index [S]`` e.g. the uid of each step. The mean is
    taken off so that a group's bonuses sum to 0 and only rare levels gain.
    """
    groups = factorize(group_index).to(levels.device)
    known = levels >= 0
    bonus = torch.zeros(len(levels), dtype=torch.float64, device=levels.device)
    if not known.any():
        return bonus.float()
    groups, cells = groups[known], groups[known] * NUM_LEVELS + levels[known]
    size = torch.zeros(int(groups.max()) + 1, dtype=torch.float64, device=levels.device)
    members = size.index_add(0, groups, torch.ones_like(groups, dtype=torch.float64))[groups]
    counts = torch.bincount(cells)[cells].double()
    surprise = -(counts / members).log()
    bonus[known] = surprise - group_mean_std(surprise, groups).mean
    return bonus.float()


def mixture_log_prob(log_prob: Tensor, epsilon_levels: float) -> Tensor:
    """Log-prob of a level digit whose behaviour was ``(1 - eps) pi + eps / 4``, from the policy's own ``log_prob``."""
    return ((1 - epsilon_levels) * log_prob.exp() + epsilon_levels / NUM_LEVELS).log()
