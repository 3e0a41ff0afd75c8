"""Credit that each registered advantage estimator gives to the audited turns of ``main_audit``.

Each estimator runs on the stored batch, once for each variant of its config values. Its credit for
a turn is the mean advantage of the tokens that chose the level or action:

    batch, config of a variant ──▶ estimator ──▶ advantages [B, R] ──▶ one number per audited turn
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch

from rlvcr.records import PRICE_SHARES, THINKING_ADVANTAGES
from rlvcr.research.audit import AuditedTurn
from rlvcr.scoring import GROUP_PRICE_COLUMN, TURNS_COLUMN, add_thinking_advantages
from rlvcr.settings import COMBINE_RULES
from verl.algos import ADV_ESTIMATORS, find_missing_inputs
from verl.config.schema import PPOConfig
from verl.protocol import DataProto
from verl.records import CHOICE_MASK, CHOICE_OLD_LOG_PROBS, CHOICE_POSTERIOR, PRICE_MULTIPLIER
from verl.trainer.ppo.credit import compute_advantage

POSTERIOR_VARIANT = "rlvcr_posterior"
# Estimator -> variants to compare: name of the variant -> its config values. An estimator that is
# not listed has one variant and reads no columns of RLVCR.
ESTIMATOR_VARIANTS: Mapping[str, Mapping[str, Mapping[str, str]]] = {
    "rlvcr": {
        **{
            f"rlvcr_{combination}": {"algorithm.rlvcr.combine": combination}
            for combination in COMBINE_RULES
        },
        POSTERIOR_VARIANT: {
            "algorithm.rlvcr.credit": "posterior",
            "algorithm.rlvcr.combine": "additive",
        },
    },
    "copo": {"copo": {}},
    "level_groups": {"level_groups": {}},
}


def add_credits(
    audited_turns: Sequence[AuditedTurn], scored_rows: DataProto, cfg: PPOConfig
) -> tuple[list[AuditedTurn], dict[str, str]]:
    """Return ``audited_turns`` with the credit of every estimator, and why some were skipped.

    A variant is an estimator with certain config values. It is skipped if the rows lack a column
    that it needs, or if it refuses the settings. The returned dict maps its name to the reason.
    """
    rlvcr_rows = _add_rlvcr_columns(scored_rows, cfg)
    decision_tokens = _DecisionTokens(audited_turns, rlvcr_rows)
    step_scores = _compute_scores_without_estimator(decision_tokens, rlvcr_rows)
    level_scores: dict[str, list[list[float]]] = {}
    skip_reasons: dict[str, str] = {}
    for estimator in sorted(ADV_ESTIMATORS):
        for variant_name, settings in ESTIMATOR_VARIANTS.get(estimator, {estimator: {}}).items():
            variant_cfg = cfg.with_values({"algorithm.adv_estimator": estimator, **settings})
            rows = rlvcr_rows
            if estimator in ESTIMATOR_VARIANTS:
                rows = _add_rlvcr_columns(scored_rows, variant_cfg)
            missing_inputs = find_missing_inputs(ADV_ESTIMATORS[estimator], rows.keys())
            if missing_inputs:
                skip_reasons[variant_name] = f"the rows lack {', '.join(missing_inputs)}"
                continue
            try:
                compute_advantage(rows, variant_cfg)
            except ValueError as error:  # refused settings, or an error of user code
                skip_reasons[variant_name] = str(error)
                continue
            credit = decision_tokens.average_tokens(rows.batch["advantages"])
            if variant_name != POSTERIOR_VARIANT:
                step_scores[variant_name] = credit.tolist()
            else:
                level_scores[variant_name] = _compute_posterior_credit(
                    decision_tokens, rows, credit
                ).tolist()
    audited_turns = [
        replace(
            audited_turn,
            scores=dict(audited_turn.scores)
            | {
                variant_name: tuple(level_values[i])
                for variant_name, level_values in level_scores.items()
            },
            step_scores={variant_name: values[i] for variant_name, values in step_scores.items()},
        )
        for i, audited_turn in enumerate(audited_turns)
    ]
    return audited_turns, skip_reasons


class _DecisionTokens:
    """Tokens with which the policy made its choice in each of N audited turns.

    If the policy chose a thinking level, this is the token of the level's digit. Otherwise these
    are all sampled tokens of the turn. The credit of a turn is the mean advantage of its tokens.
    """

    def __init__(self, audited_turns: Sequence[AuditedTurn], data: DataProto) -> None:
        columns = data.non_tensor_batch
        row_by_turn = {
            (uid, step): row
            for row, (uid, steps) in enumerate(
                zip(columns["traj_uid"], columns["step_index"], strict=True)
            )
            for step in steps
        }
        self._rows = torch.tensor([row_by_turn[turn.traj_uid, turn.step] for turn in audited_turns])
        steps = torch.tensor([turn.step for turn in audited_turns]).unsqueeze(-1)
        is_token_of_turn = data.batch["step_ids"][self._rows] == steps
        decision_mask = (is_token_of_turn & data.batch["response_mask"][self._rows].bool()).double()
        if CHOICE_MASK in data.batch:
            digit_mask = decision_mask * data.batch[CHOICE_MASK][self._rows]
            decision_mask = torch.where(digit_mask.any(-1, keepdim=True), digit_mask, decision_mask)
        self._weights = decision_mask / decision_mask.sum(-1, keepdim=True).clamp(min=1)

    def average_tokens(self, values: torch.Tensor) -> torch.Tensor:
        """Return the mean of ``values`` over the tokens of each turn, in float64.

        Values [B, R] give means [N]. Values [B, R, K], with K numbers per token, give [N, K].
        """
        weights = self._weights.view(*self._weights.shape, *[1] * (values.dim() - 2))
        # Values of tokens with weight 0 may be NaN.
        turn_values = torch.where(weights > 0, values[self._rows].double(), 0.0)
        return (turn_values * weights).sum(1)


def _compute_scores_without_estimator(
    decision_tokens: _DecisionTokens, rows: DataProto
) -> dict[str, list[float]]:
    """Return simple scores of the turns for comparison with estimators: N numbers by name."""
    if PRICE_SHARES not in rows.batch:
        log_prob = decision_tokens.average_tokens(rows.batch["old_log_probs"])
        entropy = decision_tokens.average_tokens(rows.batch["entropys"])
        scores = {"logprob": log_prob, "prob": log_prob.exp(), "entropy": -entropy}
    else:
        price_share = rows.batch[PRICE_SHARES]
        unpriced_advantage = rows.batch[THINKING_ADVANTAGES] - price_share
        if GROUP_PRICE_COLUMN in rows.batch:
            price_share = price_share + rows.batch[GROUP_PRICE_COLUMN]
        scores = {
            "rlvcr_score": decision_tokens.average_tokens(unpriced_advantage),
            "rlvcr_price": decision_tokens.average_tokens(price_share),
        }
    return {name: values.tolist() for name, values in scores.items()}


def _compute_posterior_credit(
    decision_tokens: _DecisionTokens, rows: DataProto, trajectory_advantage: torch.Tensor
) -> torch.Tensor:
    """Return the posterior credit [N, 4] of the four thinking levels in each audited turn.

    The credit of level k is ``(w_k - pi_k) A``. ``w_k`` is the probability of level k given the
    action of the turn (column ``choice_posterior``). ``pi_k`` is its probability under the policy,
    and A the advantage of the trajectory. The credit is the derivative of ``A sum_k w_k log pi_k``
    by the logit of the token that chooses level k.
    """
    level_posterior = decision_tokens.average_tokens(rows.batch[CHOICE_POSTERIOR])
    level_probs = decision_tokens.average_tokens(rows.batch[CHOICE_OLD_LOG_PROBS]).softmax(-1)
    return (level_posterior - level_probs) * trajectory_advantage.unsqueeze(-1)


def _add_rlvcr_columns(scored_rows: DataProto, cfg: PPOConfig) -> DataProto:
    """Return a copy of ``scored_rows``, with the columns that RLVCR's estimators read.

    They are added only if the rows have records of the level and thought of each turn.
    """
    rows = scored_rows.select(meta_info_keys=scored_rows.meta_info.keys() & {PRICE_MULTIPLIER})
    if TURNS_COLUMN not in rows.non_tensor_batch:
        return rows
    return add_thinking_advantages(rows, cfg)
