"""Credit of all registered estimators at the decision points of an audit.

scored rows ──columns of the method, for each form──▶ estimator ──▶ advantages [B, R]
    ──tokens of the decision──▶ credit of the chosen option, one number per point
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rlvcr.research.audit import AuditPoint
from rlvcr.scoring import GROUP_PRICE_COLUMN, TURNS_COLUMN, add_group_prices, add_thinking_columns
from rlvcr.settings import COMBINE_RULES, get_method_settings
from verl.algos import ADV_ESTIMATORS, find_missing_inputs
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.records import CHOICE_MASK, CHOICE_OLD_LOG_PROBS, CHOICE_POSTERIOR, PRICE_MULTIPLIER
from verl.trainer.ppo.credit import compute_advantage

POSTERIOR = "rlvcr_posterior"
# Config values of each form of the estimators that read columns of the method.
FORMS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "rlvcr": {
        **{f"rlvcr_{combine}": {"algorithm.rlvcr.combine": combine} for combine in COMBINE_RULES},
        POSTERIOR: {"algorithm.rlvcr.credit": "posterior", "algorithm.rlvcr.combine": "additive"},
    },
    "copo": {"copo": {}},
    "level_groups": {"level_groups": {}},
}


def add_credits(
    points: Sequence[AuditPoint], scored: DataProto, cfg: PPOConfig
) -> tuple[list[AuditPoint], dict[str, str]]:
    """Return ``points`` with the credit of every estimator, and why others are skipped, by name.

    ``scored`` has the rewards of the rows and the answers to the score requests. The credit is the
    advantage on the token of the level digit, or the mean over the turn's sampled tokens where it
    has no digit. An estimator is skipped if the rows lack a column that it needs, or if it refuses
    the settings.
    """
    plain = _add_method_columns(scored, cfg)
    decisions = _DecisionTokens(points, plain)
    step_scores = _compute_scores_without_estimator(decisions, plain)
    level_scores: dict[str, list[list[float]]] = {}
    skipped: dict[str, str] = {}
    for estimator in sorted(ADV_ESTIMATORS):
        for name, settings in FORMS.get(estimator, {estimator: {}}).items():
            form_cfg = cfg.with_values({"algorithm.adv_estimator": estimator, **settings})
            rows = _add_method_columns(scored, form_cfg) if estimator in FORMS else plain
            missing = find_missing_inputs(ADV_ESTIMATORS[estimator], rows.keys())
            if missing:
                skipped[name] = f"the rows lack {', '.join(missing)}"
                continue
            try:
                compute_advantage(rows, form_cfg)
            except ValueError as error:  # settings that this estimator refuses, or user code
                skipped[name] = str(error)
                continue
            credit = decisions.average_tokens(rows.batch["advantages"])
            if name != POSTERIOR:
                step_scores[name] = credit.tolist()
            else:
                level_scores[name] = _compute_posterior_credit(decisions, rows, credit).tolist()
    return [
        replace(
            point,
            scores={**point.scores, **{name: tuple(v[i]) for name, v in level_scores.items()}},
            step_scores={name: values[i] for name, values in step_scores.items()},
        )
        for i, point in enumerate(points)
    ], skipped


class _DecisionTokens:
    """Tokens of N decisions in a batch of rows: the level digit, else all sampled tokens."""

    def __init__(self, points: Sequence[AuditPoint], data: DataProto) -> None:
        columns = data.non_tensor_batch
        row_of = {
            (uid, step): row
            for row, (uid, steps) in enumerate(
                zip(columns["traj_uid"], columns["step_index"], strict=True)
            )
            for step in steps
        }
        self._rows = torch.tensor([row_of[point.traj_uid, point.step] for point in points])
        steps = torch.tensor([point.step for point in points]).unsqueeze(-1)
        is_turn = data.batch["step_ids"][self._rows] == steps
        tokens = (is_turn & data.batch["response_mask"][self._rows].bool()).double()
        if CHOICE_MASK in data.batch:
            digits = tokens * data.batch[CHOICE_MASK][self._rows]
            tokens = torch.where(digits.any(-1, keepdim=True), digits, tokens)
        self._weights = tokens / tokens.sum(-1, keepdim=True).clamp(min=1)

    def average_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return the means [N] or [N, K] of ``values`` [B, R] or [B, R, K], in float64."""
        weights = self._weights.view(*self._weights.shape, *[1] * (values.dim() - 2))
        # Values of other tokens may be NaN.
        placed = torch.where(weights > 0, values[self._rows].double(), 0.0)
        return (placed * weights).sum(1)


def _compute_scores_without_estimator(
    decisions: _DecisionTokens, rows: DataProto
) -> dict[str, list[float]]:
    """Return the two parts of the thinking advantage; without levels, scores of the turn's tokens.

    The parts are those due to the score and to token prices. Scores are as in ``AuditPoint``.
    """
    if "thinking_token_costs" not in rows.batch:
        log_prob = decisions.average_tokens(rows.batch["old_log_probs"])
        entropy = decisions.average_tokens(rows.batch["entropys"])
        scores = {"logprob": log_prob, "prob": log_prob.exp(), "entropy": -entropy}
    else:
        price = rows.batch["thinking_token_costs"]
        score = rows.batch["thinking_level_entropies"] - price
        if GROUP_PRICE_COLUMN in rows.batch:
            price = price + rows.batch[GROUP_PRICE_COLUMN]
        scores = {
            "rlvcr_score": decisions.average_tokens(score),
            "rlvcr_price": decisions.average_tokens(price),
        }
    return {name: values.tolist() for name, values in scores.items()}


def _compute_posterior_credit(
    decisions: _DecisionTokens, rows: DataProto, trajectory_advantage: torch.Tensor
) -> torch.Tensor:
    """Return [N, 4]: derivatives of posterior credit with respect to the logits of the digits.

    With posterior w, policy pi and trajectory advantage A: ``(w_k - pi_k) A``.
    """
    posterior = decisions.average_tokens(rows.batch[CHOICE_POSTERIOR])
    policy = decisions.average_tokens(rows.batch[CHOICE_OLD_LOG_PROBS]).softmax(-1)
    return (posterior - policy) * trajectory_advantage.unsqueeze(-1)


def _add_method_columns(scored: DataProto, cfg: PPOConfig) -> DataProto:
    """Return the rows of ``scored`` with the columns that the method adds under ``cfg``."""
    rows = scored.select(meta_info_keys=scored.meta_info.keys() & {PRICE_MULTIPLIER})
    if TURNS_COLUMN not in rows.non_tensor_batch:
        return rows
    turns = rows.non_tensor_batch[TURNS_COLUMN]
    rows = add_thinking_columns(rows, cfg)
    if cfg.algorithm.adv_estimator == "level_groups":
        add_group_prices(rows, list(turns), get_method_settings(cfg.algorithm))
    return rows
