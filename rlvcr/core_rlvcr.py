"""The maths of RLVCR: how good a chosen thinking level was among the four, and how that joins the
trajectory's credit.

A step's action a is held fixed and scored under the contexts of all four levels; ``U_k`` is the
score of context k minus the price of its thought. The thinking advantage compares the chosen
level's U with the group's and goes to the level digit and the thought tokens of that step; action
tokens carry the trajectory advantage alone::

    scores [S, 4], costs [S, 4] --thinking_advantage--> A_think [S], cost share [S]
                                --thinking_reweight---> g [S]
    --place_step_values, row by row--> thinking_level_entropies, thinking_token_costs and, where
                                       asked for, thinking_reweight, each [B, R], 0 elsewhere
    token_level_rewards [B, R] --group normalisation--> A_traj
    A_traj, the above --combine_advantages--> advantages [B, R]

What was sampled under the chosen context fits it: with log-prob scores E[A_think] is a sum of KL
divergences and never negative, so ``additive`` rewards whatever level was taken, and more the
larger w is. ``returns`` holds A_traj, so ``advantages - returns`` is what thinking added, and
``credit_metrics`` reports how often it turned a sign.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rlvcr.level_metrics import CollapseWatch, level_metrics
from rlvcr.names import COMBINES, PRICE_RULES
from rlvcr.shapes import Ids, PerToken, RowMask, TokenMask
from rlvcr.thinking import (
    MODES,
    SCORES,
    level_count_bonus,
    place_step_values,
    score_of,
    thinking_advantage,
    thinking_price,
    thinking_reweight,
)
from verl.algos import (
    choose,
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
    "level_metrics",
    "place_step_values",
    "score_of",
    "thinking_advantage",
    "thinking_price",
    "thinking_reweight",
]


def combine_advantages(
    trajectory: PerToken,
    thinking: PerToken,
    step_advantage_w: float,
    combine: str = "additive",
    success: RowMask | None = None,
    reweight: PerToken | None = None,
    price: PerToken | None = None,
    price_in: str = "all",
) -> PerToken:
    """Join ``trajectory [B, R]`` (A_traj on sampled tokens) with ``thinking [B, R]`` (A_think where
    placed).

    * ``additive``: ``A_traj + w A_think``;
    * ``gated``: ``A_traj + w sign(A_traj) A_think``;
    * ``success``: ``A_traj + w A_think`` in rows where ``success [B]`` holds, else A_traj;
    * ``reweight``: ``A_traj g`` where ``reweight [B, R]`` holds a factor g; its zeros mean "no
      factor here". w and ``thinking`` are not used.

    ``price [B, R]`` is the part of ``thinking`` that is due to the price of thoughts. Behind a gate
    that part would be turned round in lost plays and pay for long thoughts: it stays outside of it,
    unless ``price_in`` is ``gate``. (``won`` leaves it out of lost plays altogether; that is done
    where prices are charged, by ``rlvcr.scoring``.)

    Raises ``ValueError`` for an unknown ``combine`` or a missing tensor.
    """
    choose(combine, COMBINES, "combine (algorithm.rlvcr.combine)")
    if combine == "reweight":
        if reweight is None:
            raise ValueError(
                "combine=reweight needs the tensor thinking_reweight [B, R] in the batch"
            )
        # A factor is a ratio of exponentials and never 0, so 0 can only mean that none was placed.
        return trajectory * torch.where(reweight > 0, reweight, 1.0)
    choose(price_in, PRICE_RULES, "price_in (algorithm.rlvcr.price_in)")
    gate = torch.ones_like(thinking)
    if combine == "gated":
        # In a lost trajectory the thought that fitted best made a bad action likelier.
        gate = trajectory.sign()
    elif combine == "success":
        if success is None:
            raise ValueError("combine=success needs to know which trajectories succeeded (won [B])")
        gate = gate * success.to(thinking).unsqueeze(-1)
    added = gate * thinking
    if price is not None and price_in != "gate":
        added = added + (1 - gate) * price
    return trajectory + step_advantage_w * added


def credit_metrics(
    advantages: PerToken,
    returns: PerToken,
    response_mask: TokenMask,
    thinking_level_entropies: PerToken | None = None,
    thinking_token_costs: PerToken | None = None,
    thinking_reweight: PerToken | None = None,
    **_: object,
) -> dict[str, float]:
    """How large thinking credit is beside trajectory credit, over the tokens that got any.

    ``thinking_share`` is what thinking added over the sum of both absolute parts (1: A_traj is
    swallowed); ``sign_flip_share`` is the share of tokens with a non-zero A_traj whose sign
    thinking turned. Other inputs of the estimators are accepted and not read.
    """
    sampled = response_mask.bool()
    added = advantages - returns
    credited = sampled & (added != 0)
    # Credit that happens to be 0, or that a gate closed, was still asked for.
    for placed in (thinking_level_entropies, thinking_reweight):
        if placed is not None:
            credited = credited | (sampled & (placed != 0))
    trajectory = masked_mean(returns.abs(), credited).item()
    change = masked_mean(added.abs(), credited).item()
    flipped = credited & (advantages * returns < 0)
    metrics = {
        "rlvcr/trajectory_advantage_abs_mean": trajectory,
        "rlvcr/thinking_share": change / (change + trajectory) if change > 0 else 0.0,
        "rlvcr/sign_flip_share": masked_mean(flipped.float(), credited & (returns != 0)).item(),
        "rlvcr/credited_token_share": masked_mean(credited.float(), sampled).item(),
    }
    if thinking_level_entropies is not None:
        metrics["rlvcr/thinking_advantage_abs_mean"] = masked_mean(
            thinking_level_entropies.abs(), credited
        ).item()
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
    "rlvcr",
    inputs=_RLVCR_INPUTS
    | {
        "thinking_level_entropies": "thinking_level_entropies",
        "thinking_token_costs": "thinking_token_costs",
        "thinking_reweight": "thinking_reweight?",
        "thinking_level_bonus": "thinking_level_bonus?",
        "thinking_executed": "thinking_executed?",
        "success": "won?",
    },
    params={
        "step_advantage_w": "algorithm.rlvcr.step_advantage_w",
        "thinking_diversity_w": "algorithm.rlvcr.thinking_diversity_w",
        "mode": "algorithm.rlvcr.mode",
        "combine": "algorithm.rlvcr.combine",
        "price_in": "algorithm.rlvcr.price_in",
    },
    metrics=credit_metrics,
)
def compute_rlvcr_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    thinking_level_entropies: PerToken,
    thinking_token_costs: PerToken,
    step_advantage_w: float = 1.0,
    # Part of the published signature and of no formula here.
    thinking_diversity_w: float = 0.5,  # noqa: ARG001  the actor's loss reads it
    mode: str = "mean_norm",
    combine: str = "additive",
    thinking_reweight: PerToken | None = None,
    thinking_level_bonus: PerToken | None = None,
    thinking_executed: PerToken | None = None,
    success: Sequence[bool] | np.ndarray | Tensor | None = None,
    price_in: str = "all",
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Trajectory advantage combined with thinking advantage; ``(advantages, returns)``, both
    ``[B, R]`` float32.

    ``thinking_level_entropies [B, R]`` holds A_think, already normalised within its four contexts
    and net of cost, on level digits and thoughts and 0 elsewhere; ``thinking_token_costs [B, R]``
    is the part of it due to cost; ``price_in`` says whether it stands behind the gate of
    ``combine``. ``thinking_reweight [B, R]`` holds the factors of
    ``combine="reweight"``, 0 elsewhere. ``thinking_level_bonus [B, R]`` is added as it is, whatever
    the outcome, and ``thinking_executed [B, R]``, what other levels led to, with weight
    ``step_advantage_w``. ``success [B]`` says which rows belong to a won trajectory (default:
    return above 0). ``mode`` normalises returns in their group as GRPO does (``mean_norm`` without
    division). ``thinking_diversity_w`` weighs the entropy of the level digit in the actor loss and
    does not change advantages. ``returns`` is A_traj alone. Raises ``ValueError`` for unknown
    options.
    """
    scores = token_level_rewards.double().sum(-1)
    trajectory = _trajectory_advantage(scores, response_mask, index, traj_index, mode, epsilon)
    won = scores > 0
    if success is not None:
        won = torch.as_tensor(np.asarray(success).astype(bool), device=scores.device)
    sampled = response_mask.float()
    advantages = combine_advantages(
        trajectory,
        thinking_level_entropies.float() * sampled,
        step_advantage_w,
        combine,
        won,
        thinking_reweight,
        price=thinking_token_costs.float() * sampled,
        price_in=price_in,
    )
    if thinking_executed is not None:
        # Differences of returns know the outcome: no gate has to ask for it.
        advantages = advantages + step_advantage_w * thinking_executed.float() * sampled
    # After combining, whose gates would close it: trying rare levels is worth as much in lost
    # trajectories.
    if thinking_level_bonus is not None:
        advantages = advantages + thinking_level_bonus * response_mask.float()
    return advantages, trajectory


@register_adv_est(
    "copo",
    inputs=_RLVCR_INPUTS | {"thinking_reweight": "thinking_reweight"},
    params={"mode": "algorithm.rlvcr.mode"},
    metrics=credit_metrics,
)
def compute_copo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    thinking_reweight: PerToken,
    mode: str = "mean_norm",
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """CoPO: positive trajectory advantages are multiplied by the within-step confidence factor,
    others stay.

    Arguments and results as in ``compute_rlvcr_outcome_advantage``.
    """
    scores = token_level_rewards.double().sum(-1)
    trajectory = _trajectory_advantage(scores, response_mask, index, traj_index, mode, epsilon)
    # Below 0 a factor would punish the confident choice of a failure harder than the unsure one.
    has_factor = (trajectory > 0) & (thinking_reweight > 0)
    factor = torch.where(has_factor, thinking_reweight.float(), 1.0)
    return trajectory * factor, trajectory


def _trajectory_advantage(
    scores: Tensor,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    mode: str,
    epsilon: float,
) -> PerToken:
    """A_traj [B, R] of the returns ``scores`` [B], normalised in their group as GRPO does."""
    by_std = choose(mode, MODES, "mode (algorithm.rlvcr.mode)") == "mean_std_norm"
    per_row = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
    return spread(per_row, response_mask)
