"""Advantages of RLVCR: thinking advantage of the chosen level plus trajectory advantage.

The policy chooses one of four thinking levels per turn. The action of the turn is scored after the
sampled thought and after alternative thoughts of the other levels. ``U_k`` is this score for level
k minus the token cost of its thought. The thinking advantage A_think is ``U`` of the chosen level
minus the mean ``U`` of all levels. It is placed on the level digit and the thought tokens of the
turn. Action tokens get the trajectory advantage A_traj only. The factor g, an alternative to
A_think, multiplies A_traj::

    scores [S, 4], thought_tokens [S, 4] --thinking advantage--> A_think [S], price share [S]
                                         --reweight factors----> g [S]
    --broadcast_turn_values--> columns THINKING_ADVANTAGES, PRICE_SHARES and, if used,
                           thinking_reweight, each [B, R], 0 elsewhere
    token_level_rewards [B, R] --group normalisation--> A_traj
    A_traj and the thinking columns --combine_advantages--> advantages [B, R]

The action was sampled after the thought of the chosen level. With log-prob scores E[A_think] is
therefore a sum of KL divergences, which is never negative. So ``combine=additive`` rewards every
chosen level on average, in proportion to ``step_advantage_w``. The estimators return A_traj as
``returns``, so ``advantages - returns`` is the part due to thinking advantages. The metrics report
how often this part reverses the sign of the advantage.
"""

from collections.abc import Sequence

import numpy as np
import torch
from jaxtyping import Bool
from torch import Tensor

from rlvcr.records import PRICE_SHARES, THINKING_ADVANTAGES
from rlvcr.settings import COMBINE_RULES, PRICE_RULES
from rlvcr.thinking import compute_reweight_factors as compute_reweight_factors
from rlvcr.thinking import compute_thinking_advantage as compute_thinking_advantage
from verl.algos import (
    OUTCOME_INPUTS,
    choose,
    group_normalised_scores,
    register_adv_est,
    spread,
)
from verl.algos.shapes import Ids, PerToken, TokenMask
from verl.names import NORM_MODES
from verl.utils.torch_functional import masked_mean

RowMask = Bool[Tensor, " B"]  # true for the rows that a computation uses


def combine_advantages(
    trajectory: PerToken,
    thinking: PerToken,
    step_advantage_w: float,
    combine: str = "additive",
    success: RowMask | None = None,
    reweight_factors: PerToken | None = None,
    price_share: PerToken | None = None,
    price_in: str = "all",
) -> PerToken:
    """Combine the trajectory advantage A_traj and the thinking advantage A_think.

    A_think is the credit for the thinking level that the policy chose in a turn.
    ``trajectory [B, R]`` holds A_traj on sampled tokens. ``thinking [B, R]`` holds A_think on level
    digits and thoughts, 0 elsewhere. w is ``step_advantage_w``. ``combine`` names the formula:

    * ``additive``: ``A_traj + w A_think``;
    * ``gated``: ``A_traj + w sign(A_traj) A_think``;
    * ``success``: ``A_traj + w A_think`` in rows where ``success [B]`` is true, else A_traj;
    * ``reweight``: ``A_traj g`` where ``reweight_factors [B, R]`` holds g; 0 means "no factor".
      w and ``thinking`` are not used.

    ``price_share [B, R]`` is the part of ``thinking`` due to token cost. ``gated`` would reverse
    the sign of this part where A_traj is negative, and so reward long thoughts. ``gated`` and
    ``success`` therefore add the part unchanged, unless ``price_in`` is ``gate``.

    Raises ``ValueError`` for an unknown formula or a missing tensor.

    >>> trajectory, thinking = torch.tensor([[-0.5]]), torch.tensor([[0.2]])  # one token
    >>> combine_advantages(trajectory, thinking, 1.0, "additive")
    tensor([[-0.3000]])
    >>> combine_advantages(trajectory, thinking, 1.0, "gated")
    tensor([[-0.7000]])
    >>> # 0.05 of the 0.2 are due to token cost: -0.5 - 0.15 + 0.05
    >>> combine_advantages(trajectory, thinking, 1.0, "gated", price_share=torch.tensor([[0.05]]))
    tensor([[-0.6000]])
    """
    choose(combine, COMBINE_RULES, "combine (algorithm.rlvcr.combine)")
    if combine == "reweight":
        if reweight_factors is None:
            raise ValueError(
                "combine=reweight needs the column thinking_reweight [B, R] in the batch"
            )
        # Factors are ratios of exponentials and never 0, so 0 marks a token without a factor.
        return trajectory * torch.where(reweight_factors > 0, reweight_factors, 1.0)
    choose(price_in, PRICE_RULES, "price_in (algorithm.rlvcr.price_in)")
    gate = torch.ones_like(thinking)
    if combine == "gated":
        # Reverse the sign where A_traj is negative: the action was bad, and a thought with a high
        # score made it more likely.
        gate = trajectory.sign()
    elif combine == "success":
        if success is None:
            raise ValueError("combine=success needs success [B], one bool per row; got None")
        gate = gate * success.to(thinking).unsqueeze(-1)
    weighted_thinking = gate * thinking
    if price_share is not None and price_in != "gate":
        weighted_thinking = weighted_thinking + (1 - gate) * price_share
    return trajectory + step_advantage_w * weighted_thinking


def compute_credit_metrics(
    advantages: PerToken,
    returns: PerToken,
    response_mask: TokenMask,
    thinking_level_entropies: PerToken | None = None,
    thinking_token_costs: PerToken | None = None,
    thinking_reweight: PerToken | None = None,
    **_: object,
) -> dict[str, float]:
    """Return metrics that compare the thinking advantage with the trajectory advantage ``returns``.

    Means are over the tokens with a thinking advantage. With C = mean ``|advantages - returns|``
    and T = mean ``|returns|``, ``thinking_share`` is ``C / (C + T)``. ``sign_flip_share`` is the
    share of tokens with non-zero trajectory advantage whose sign the thinking advantage reverses.
    Other inputs of the estimator are ignored.

    >>> advantages, returns = torch.tensor([[0.7, -0.1, 0.5]]), torch.tensor([[0.5, 0.5, 0.5]])
    >>> metrics = compute_credit_metrics(advantages, returns, torch.ones(1, 3))  # C 0.4, T 0.5
    >>> round(metrics["rlvcr/thinking_share"], 2), metrics["rlvcr/sign_flip_share"]
    (0.44, 0.5)
    """
    is_sampled = response_mask.bool()
    thinking_part = advantages - returns
    is_credited = is_sampled & (thinking_part != 0)
    # Also count tokens whose thinking advantage has no effect because of ``combine``.
    for credit_column in (thinking_level_entropies, thinking_reweight):
        if credit_column is not None:
            is_credited = is_credited | (is_sampled & (credit_column != 0))
    trajectory_abs_mean = masked_mean(returns.abs(), is_credited).item()
    thinking_abs_mean = masked_mean(thinking_part.abs(), is_credited).item()
    is_sign_flipped = is_credited & (advantages * returns < 0)
    metrics = {
        "rlvcr/trajectory_advantage_abs_mean": trajectory_abs_mean,
        "rlvcr/thinking_share": thinking_abs_mean / (thinking_abs_mean + trajectory_abs_mean)
        if thinking_abs_mean > 0
        else 0.0,
        "rlvcr/sign_flip_share": masked_mean(
            is_sign_flipped.float(), is_credited & (returns != 0)
        ).item(),
        "rlvcr/credited_token_share": masked_mean(is_credited.float(), is_sampled).item(),
    }
    if thinking_level_entropies is not None:
        metrics["rlvcr/thinking_advantage_abs_mean"] = masked_mean(
            thinking_level_entropies.abs(), is_credited
        ).item()
    if thinking_token_costs is not None:
        metrics["rlvcr/cost_share_mean"] = masked_mean(thinking_token_costs, is_credited).item()
    return metrics


_RLVCR_INPUT_COLUMNS = OUTCOME_INPUTS | {"traj_index": "traj_uid"}


@register_adv_est(
    "rlvcr",
    inputs=_RLVCR_INPUT_COLUMNS
    | {
        "thinking_level_entropies": THINKING_ADVANTAGES,
        "thinking_token_costs": PRICE_SHARES,
        "thinking_reweight": "thinking_reweight?",
        "thinking_level_bonus": "thinking_level_bonus?",
        "thinking_group_price": "thinking_group_price?",
        "success": "won?",
    },
    params={
        "step_advantage_w": "algorithm.rlvcr.step_advantage_w",
        "thinking_diversity_w": "algorithm.rlvcr.thinking_diversity_w",
        "mode": "algorithm.rlvcr.mode",
        "combine": "algorithm.rlvcr.combine",
        "price_in": "algorithm.rlvcr.price_in",
    },
    metrics=compute_credit_metrics,
)
def compute_rlvcr_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    thinking_level_entropies: PerToken,
    thinking_token_costs: PerToken,
    step_advantage_w: float = 1.0,
    # Not used here, since the actor's loss applies this weight. The published code passes it.
    thinking_diversity_w: float = 0.5,  # noqa: ARG001
    mode: str = "mean_norm",
    combine: str = "additive",
    thinking_reweight: PerToken | None = None,
    thinking_level_bonus: PerToken | None = None,
    thinking_group_price: PerToken | None = None,
    success: Sequence[bool] | np.ndarray | Tensor | None = None,
    price_in: str = "all",
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Return ``(advantages, returns)``, both ``[B, R]`` float32: A_traj with A_think, and A_traj.

    A_traj is the trajectory advantage. A_think is the thinking advantage, the credit for the
    thinking level that the policy chose in a turn. ``thinking_level_entropies [B, R]`` holds it on
    level digits and thoughts, 0 elsewhere. ``thinking_token_costs [B, R]`` is the part of A_think
    due to token cost.

    ``thinking_reweight [B, R]`` holds the factors of ``combine="reweight"``, 0 elsewhere.
    ``thinking_level_bonus`` (for rare levels) is added in all rows, as is ``step_advantage_w``
    times ``thinking_group_price`` (for thoughts shorter than those of the group).

    ``success [B]`` marks successful rows (default: return above 0). ``mode`` normalises returns in
    their group as GRPO does; ``mean_norm`` does not divide by the std. ``combine_advantages``
    explains ``combine`` and ``price_in``. Raises ``ValueError`` for invalid options.

        A_traj = 0.5 on the row, A_think = 0.2 on its level digit and thought, w = 1
        additive: advantages 0.7 on level digit and thought, 0.5 on the action
    """
    trajectory = _compute_trajectory_advantage(
        token_level_rewards, response_mask, index, traj_index, mode, epsilon
    )
    sampled_mask = response_mask.float()
    row_returns = token_level_rewards.double().sum(-1)
    is_success = row_returns > 0 if success is None else np.asarray(success).astype(bool)
    advantages = combine_advantages(
        trajectory,
        thinking_level_entropies.float() * sampled_mask,
        step_advantage_w,
        combine,
        torch.as_tensor(is_success, device=row_returns.device),
        thinking_reweight,
        price_share=thinking_token_costs.float() * sampled_mask,
        price_in=price_in,
    )
    # thinking_group_price comes from successful trajectories, so ``combine`` does not apply to it.
    if thinking_group_price is not None:
        advantages = advantages + step_advantage_w * thinking_group_price.float() * sampled_mask
    # Added after ``combine``: rare levels get the bonus in all trajectories.
    if thinking_level_bonus is not None:
        advantages = advantages + thinking_level_bonus * sampled_mask
    return advantages, trajectory


@register_adv_est(
    "level_groups",
    inputs=_RLVCR_INPUT_COLUMNS | {"thinking_group_price": "thinking_group_price"},
    params={
        "step_advantage_w": "algorithm.rlvcr.step_advantage_w",
        "mode": "algorithm.rlvcr.mode",
    },
    metrics=compute_credit_metrics,
)
def compute_level_groups_outcome_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    thinking_group_price: PerToken,
    step_advantage_w: float = 1.0,
    mode: str = "mean_norm",
    epsilon: float = 1e-6,
) -> tuple[PerToken, PerToken]:
    """Add ``step_advantage_w`` times ``thinking_group_price [B, R]`` to the trajectory advantage.

    The added tensor is positive on thoughts that are shorter than the mean over the group's other
    successful trajectories in the same state. Returns the sum and the trajectory advantage, both
    [B, R]. The other arguments are those of ``compute_rlvcr_outcome_advantage``.

    >>> rewards, price = torch.tensor([[1.0], [0.0]]), torch.tensor([[0.3], [0.0]])
    >>> ids = {"index": [7, 7], "traj_index": ["a", "b"]}  # trajectory advantages 0.5 and -0.5
    >>> compute_level_groups_outcome_advantage(
    ...     rewards, torch.ones(2, 1), **ids, thinking_group_price=price)[0].flatten()
    tensor([ 0.8000, -0.5000])
    """
    trajectory = _compute_trajectory_advantage(
        token_level_rewards, response_mask, index, traj_index, mode, epsilon
    )
    prices = thinking_group_price.float() * response_mask.float()
    return trajectory + step_advantage_w * prices, trajectory


@register_adv_est(
    "copo",
    inputs=_RLVCR_INPUT_COLUMNS | {"thinking_reweight": "thinking_reweight"},
    params={"mode": "algorithm.rlvcr.mode"},
    metrics=compute_credit_metrics,
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
    """Multiply positive trajectory advantages by ``thinking_reweight [B, R]`` (the CoPO method).

    The factor is above 1 if the action scores better after the thought of the chosen level than
    after the thoughts of the other levels. A factor of 0 means "no factor". Returns the product and
    the trajectory advantage, both [B, R]. The other arguments are those of
    ``compute_rlvcr_outcome_advantage``.

    >>> rewards, factors = torch.tensor([[1.0], [0.0]]), torch.tensor([[1.5], [1.5]])
    >>> ids = {"index": [7, 7], "traj_index": ["a", "b"]}  # trajectory advantages 0.5 and -0.5
    >>> compute_copo_outcome_advantage(
    ...     rewards, torch.ones(2, 1), **ids, thinking_reweight=factors)[0].flatten()
    tensor([ 0.7500, -0.5000])
    """
    trajectory = _compute_trajectory_advantage(
        token_level_rewards, response_mask, index, traj_index, mode, epsilon
    )
    # Scale only positive advantages. On a negative one, a factor above 1 would punish an action
    # more if the chosen thought predicts it better than those of other levels.
    has_factor = (trajectory > 0) & (thinking_reweight > 0)
    factor = torch.where(has_factor, thinking_reweight.float(), 1.0)
    return trajectory * factor, trajectory


def _compute_trajectory_advantage(
    token_level_rewards: PerToken,
    response_mask: TokenMask,
    index: Ids,
    traj_index: Ids,
    mode: str,
    epsilon: float,
) -> PerToken:
    """Return the trajectory advantage [B, R] of the returns, normalised as in GRPO."""
    row_returns = token_level_rewards.double().sum(-1)
    divides_by_std = choose(mode, NORM_MODES, "mode (algorithm.rlvcr.mode)") == "mean_std_norm"
    row_advantages = group_normalised_scores(
        row_returns, index, traj_index, divides_by_std, epsilon
    )
    return spread(row_advantages, response_mask)
