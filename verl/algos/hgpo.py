"""HGPO (hierarchy of groups): GiGPO that also compares steps with the same preceding states.

``A_k`` compares the steps of a task whose last k + 1 states are the same. The step advantage is the
weighted mean of ``A_0`` to ``A_K`` with weights ``(k + 1)^alpha``. Steps with a longer common
history compare better but are fewer, so longer contexts get larger weights.
"""

from collections.abc import Hashable

import torch

from verl.algos.algorithm_registry import choose, register_adv_est
from verl.algos.gigpo import (
    STEP_INPUTS,
    StepLists,
    Steps,
    add_step_advantages,
    compute_discounted_step_returns,
    compute_step_advantages,
    flatten_steps,
)
from verl.algos.groups import group_normalised_scores
from verl.algos.shapes import Ids, PerStep, PerToken, TokenIndex, TokenMask
from verl.names import NORM_MODES


def build_contexts(steps: Steps, length: int) -> list[Hashable]:
    """Return each step's state and the ``length`` states before it in its trajectory.

    States before the first step are None.
    """
    keys = list(zip(steps.trajectory, steps.number, strict=True))
    state_at = dict(zip(keys, steps.state, strict=True))
    return [
        tuple(state_at.get((trajectory, step_number - back)) for back in range(length + 1))
        for trajectory, step_number in keys
    ]


def compute_hierarchical_advantages(
    returns: PerStep, steps: Steps, context: int, alpha: float, by_std: bool, epsilon: float
) -> PerStep:
    """Return the weighted mean of the step advantages over context lengths, float64 ``[S]``.

    The contexts have 0 to ``context`` previous states. A context that occurs once has advantage 0,
    which counts in the mean.
    """
    total = torch.zeros_like(returns)
    weights = [(k + 1.0) ** alpha for k in range(context + 1)]
    for k, weight in enumerate(weights):
        compared = compute_step_advantages(returns, build_contexts(steps, k), by_std, epsilon)
        total += weight / sum(weights) * compared
    return total


@register_adv_est(
    "hgpo",
    inputs=STEP_INPUTS,
    params={
        "step_advantage_w": "algorithm.hgpo.step_advantage_w",
        "mode": "algorithm.hgpo.mode",
        "context": "algorithm.hgpo.context",
        "alpha": "algorithm.hgpo.alpha",
        "gamma": "algorithm.gamma",
    },
)
def compute_hgpo_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    step_ids: TokenIndex,
    step_rewards: StepLists,
    step_index: StepLists,
    anchor_obs: StepLists,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    context: int = 2,
    alpha: float = 1.0,
    gamma: float = 0.95,
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Compute HGPO advantages: GRPO's plus ``step_advantage_w`` times the step advantage.

    Columns and ``mode`` are those of GiGPO; ``context=0`` equals GiGPO. ``returns`` is the same
    tensor as the advantages.
    """
    by_std = choose(mode, NORM_MODES, "mode (algorithm.hgpo.mode)") == "mean_std_norm"
    scores = token_level_rewards.double().sum(-1)
    per_row = group_normalised_scores(scores, index, traj_index, by_std, epsilon)
    steps = flatten_steps(index, traj_index, step_rewards, step_index, anchor_obs)
    returns = compute_discounted_step_returns(steps, gamma)
    per_step = compute_hierarchical_advantages(returns, steps, context, alpha, by_std, epsilon)
    combined = add_step_advantages(
        per_row, per_step, step_advantage_w, steps, step_ids, response_mask
    )
    return combined, combined
