"""Requests to score actions after thoughts of several levels, and batch columns from the scores.

A score measures how well a thought predicts the turn's action. It is computed from log-probs and
entropies of the action's tokens after this thought. A span requests them for tokens of the row
itself, a branch for the same tokens after another thought.

    row:    [ prompt | <level>3</level><think>z</think><action> go to desk 1 </action> | ... ]
    span:                                                       └─ S, H at level 3 ─┘
    branch: [ prompt ] + <level>1</level><think></think><action> go to desk 1 </    S, H at level 1
    branch: [ prompt ] + <level>4</level><think>z'</think><action> go to desk 1 </  S, H at level 4

The policy chose level 3 in this turn; the thoughts of the other levels are alternatives. S is the
mean log-prob and H the mean entropy over the target tokens. Targets are the sampled tokens of the
action and the first token of ``</action>``, the same ids after every thought. The policy that
sampled them scores them, in the forward pass that also computes the old log-probs:

    add_score_requests ──branches, spans──▶ training workers ──branch_scores, span_scores──▶
        add_thinking_advantages
"""

import logging
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlvcr.levels import LevelCodec
from rlvcr.records import (
    PRICE_SHARES,
    THINKING_ADVANTAGES,
    CreditedTurns,
    ScoredThought,
    TurnCredit,
)
from rlvcr.score_table import (
    RowTurn,
    ScoredTurns,
    build_score_requests,
    build_score_table,
    compute_scoring_metrics,
    flatten_turns,
)
from rlvcr.settings import RLVCRSettings, get_rlvcr_settings
from rlvcr.thinking import (
    ThoughtLengthStatistics,
    broadcast_turn_values,
    compute_level_count_bonus,
    compute_level_posterior,
    compute_reweight_factors,
    compute_thinking_advantage,
    compute_thought_length_statistics,
    compute_token_cost,
    subtract_expected_token_cost,
)
from verl.config.schema import PPOConfig
from verl.protocol import DataProto, object_array
from verl.records import (
    BRANCHES,
    CHOICE_CREDIT,
    CHOICE_MASK,
    CHOICE_OLD_LOG_PROBS,
    CHOICE_POSTERIOR,
    PRICE_MULTIPLIER,
    SPANS,
    RestrictedTokenLoss,
    ScoreResult,
)
from verl.utils.seeds import derive_seed

logger = logging.getLogger(__name__)
TURNS_COLUMN = "thinking_steps"  # column [B]: turns of the row; removed when scores arrive
DROPPED_LENGTH_METRIC = "rlvcr/dropped_length"  # share of sampled thoughts cut by the length limit
MAX_DROPPED_SHARE = 0.05  # a larger share causes a warning
GROUP_PRICE_COLUMN = "thinking_group_price"  # column [B, R]: credit for short thoughts


def add_score_requests(
    data: DataProto, rows: Sequence[Sequence[RowTurn]], digit_ids: Sequence[int] = ()
) -> None:
    """Add the columns of ``build_score_requests``, and ``rows`` as column ``thinking_steps``.

    ``add_thinking_advantages`` reads and removes these columns.
    """
    branches, spans = build_score_requests(rows, digit_ids)
    data.non_tensor_batch |= {BRANCHES: branches, SPANS: spans, TURNS_COLUMN: object_array(rows)}


def add_thinking_advantages(data: DataProto, config: PPOConfig) -> DataProto:
    """Replace the scores of actions in ``data`` by credit for the chosen thinking levels.

    ``data`` has the columns of ``add_score_requests``. The training workers added ``branch_scores``
    (of the action after each alternative thought) and ``span_scores`` (of the action after the
    sampled thought). All these columns are removed. New columns, all [B, R]:

    * ``thinking_level_entropies``: the credit (thinking advantage);
    * ``thinking_token_costs``: the part of it due to token cost;
    * where they are used, ``thinking_level_bonus`` (for rare levels), ``thinking_reweight`` (factor
      of the trajectory advantage) and ``thinking_group_price`` (credit for short thoughts).

    With ``credit=posterior`` the columns of ``verl.records.RestrictedTokenLoss`` are added too.
    Scores are added to the turn records, metrics ``rlvcr/*`` to ``meta_info["metrics"]``. Returns
    ``data``.
    """
    price_multiplier = data.meta_info.get(PRICE_MULTIPLIER, 1.0)
    rlvcr = get_rlvcr_settings(config.algorithm)
    # With price_in=group thoughts have no price per token. Their price is the length minus the mean
    # length over other successful trajectories.
    cost_coef = 0.0 if rlvcr.price_in == "group" else price_multiplier * rlvcr.cost_coef
    rlvcr = rlvcr.model_copy(update={"cost_coef": cost_coef})
    request_columns = (BRANCHES, SPANS, TURNS_COLUMN, "branch_scores", "span_scores")
    branches, _, rows, branch_scores, span_scores = map(data.non_tensor_batch.pop, request_columns)
    table = build_score_table(list(rows), list(branch_scores), list(span_scores), rlvcr.score)
    is_success = torch.as_tensor(data.non_tensor_batch["won"][table.row_indices].astype(bool))
    # With price_in=won only thoughts of successful trajectories have a token cost.
    is_charged = is_success.unsqueeze(-1) if rlvcr.price_in == "won" else 1
    charged_tokens = table.thought_tokens * is_charged
    token_costs = compute_token_cost(charged_tokens, rlvcr.cost_coef, rlvcr.cost_max)
    metrics = data.meta_info.setdefault("metrics", {})
    if rlvcr.price_in == "group":
        token_costs = price_multiplier * add_group_price_credit(
            data, list(rows), rlvcr
        ).compute_group_prices(table.thought_tokens)
    elif config.algorithm.adv_estimator == "level_groups":
        add_group_price_credit(data, list(rows), rlvcr)
    if rlvcr.credit == "posterior":
        credit = _add_posterior_credit(data, table, token_costs, rlvcr)
    else:
        credit = _compute_credit(table, charged_tokens, rlvcr)
    if rlvcr.permute:
        first_traj_uid = str(data.non_tensor_batch["traj_uid"][0])
        seed = derive_seed("permute", config.actor_rollout_ref.rollout.seed, first_traj_uid)
        credit = _permute_credit(credit, table, is_success, seed)
    _add_credit_columns(data, table, credit, config)
    _add_credit_to_records(data, table, token_costs, credit)
    branch_tokens = sum(len(branch.token_ids) for row in branches for branch in row)
    row_tokens = int(data.batch["attention_mask"].sum())
    metrics.update(compute_scoring_metrics(table, credit.advantage))
    metrics["rlvcr/branch_tokens_ratio"] = branch_tokens / max(row_tokens, 1)
    _warn_about_dropped_thoughts(metrics)
    return data


def _add_credit_columns(
    data: DataProto, table: ScoredTurns, credit: "_BatchCredit", config: PPOConfig
) -> None:
    """Add ``credit`` for the thinking levels, and the bonus for rare levels, to ``data``.

    Each becomes a column [B, R] with the value of a turn on its level digit and thought.
    """
    rlvcr = get_rlvcr_settings(config.algorithm)
    columns = {
        THINKING_ADVANTAGES: credit.advantage,
        PRICE_SHARES: credit.price_share,
    }
    if rlvcr.level_bonus_w:
        level_bonus = _compute_level_bonus(table, data.non_tensor_batch["uid"])
        columns["thinking_level_bonus"] = rlvcr.level_bonus_w * level_bonus
    # The estimator copo uses the reweight factors whatever ``combine`` is.
    if rlvcr.combine == "reweight" or config.algorithm.adv_estimator == "copo":
        columns["thinking_reweight"] = credit.factor
    offsets = _compute_turn_offsets(data, table.row_indices, table.turns)
    turns_and_offsets = list(zip(table.turns, offsets, strict=True))
    spans = [turn.credit_spans(offset, rlvcr.credit_end) for turn, offset in turns_and_offsets]
    if credit.has_posterior is not None:
        # Omit level digits with a posterior: the column choice_credit holds their credit.
        spans = [
            turn_spans[1:] if has_posterior else turn_spans
            for turn_spans, has_posterior in zip(spans, credit.has_posterior, strict=True)
        ]
    shape = data.batch["responses"].shape
    for key, values in columns.items():
        data.batch[key] = broadcast_turn_values(shape, table.row_indices, spans, values)


def _add_posterior_credit(
    data: DataProto, table: ScoredTurns, token_costs: torch.Tensor, rlvcr: RLVCRSettings
) -> "_BatchCredit":
    """Add the columns of ``credit=posterior`` for level digits; return the credit of thoughts.

    The posterior is the probability of each thinking level given the action. With the added columns
    the loss averages over the four level digits, not only over the sampled one
    (``verl.records.RestrictedTokenLoss``). A digit without alternative thoughts has no posterior;
    it gets the trajectory advantage.

    ``token_costs`` [S, 4] of the thoughts are in units of the advantage. The returned credit is for
    the tokens of the chosen thought: the expected token cost over the levels minus the token cost
    of this thought. It is 0 with ``price_in=group``, where ``thinking_group_price`` has the cost.
    """
    has_posterior = torch.tensor([turn.has_level_alternatives for turn in table.turns])
    has_posterior = has_posterior & (table.chosen_columns >= 0)
    posterior = compute_level_posterior(
        table.level_log_probs, table.action_log_probs, table.is_valid
    ) * has_posterior.unsqueeze(-1)
    if rlvcr.price_in != "group":
        token_costs = subtract_expected_token_cost(
            token_costs, table.level_log_probs, table.is_valid
        )
    offsets = _compute_turn_offsets(data, table.row_indices, table.turns)
    digit_spans = [
        turn.digit_spans(offset) if gets_posterior else []
        for turn, offset, gets_posterior in zip(
            table.turns, offsets, has_posterior.tolist(), strict=True
        )
    ]
    columns = {
        CHOICE_POSTERIOR: posterior,
        CHOICE_CREDIT: -rlvcr.step_advantage_w * posterior * token_costs,
        CHOICE_OLD_LOG_PROBS: table.level_log_probs,
    }
    shape = data.batch["responses"].shape
    for key, values in columns.items():
        level_columns = [
            broadcast_turn_values(shape, table.row_indices, digit_spans, level_values)
            for level_values in values.float().unbind(-1)
        ]
        data.batch[key] = torch.stack(level_columns, dim=-1)
    data.meta_info["metrics"] |= _compute_posterior_metrics(table, posterior, has_posterior)
    chosen_column = table.chosen_columns.clamp(min=0).unsqueeze(-1)
    chosen_token_cost = token_costs.gather(-1, chosen_column).squeeze(-1) * has_posterior
    if rlvcr.price_in == "group":
        # The column thinking_group_price holds the token costs.
        chosen_token_cost = torch.zeros_like(chosen_token_cost)
    price_share = -chosen_token_cost.float()
    return _BatchCredit(
        price_share, price_share, torch.ones_like(price_share), has_posterior=has_posterior
    )


def _compute_posterior_metrics(
    table: ScoredTurns, posterior: torch.Tensor, has_posterior: torch.Tensor
) -> dict[str, float]:
    """Return metrics of the posterior: the probability of each thinking level given the action."""
    if not has_posterior.any():
        return {}
    chosen_posterior = posterior[has_posterior].gather(
        -1, table.chosen_columns[has_posterior].unsqueeze(-1)
    )
    level_probs = table.level_log_probs[has_posterior].softmax(-1)
    total_variation = (posterior[has_posterior] - level_probs).abs().sum(-1) / 2
    return {
        "rlvcr/posterior_of_chosen": chosen_posterior.mean().item(),
        "rlvcr/posterior_shift": total_variation.mean().item(),
    }


def add_group_price_credit(
    data: DataProto, rows: Sequence[Sequence[RowTurn]], rlvcr: RLVCRSettings
) -> ThoughtLengthStatistics:
    """Add the column ``thinking_group_price`` [B, R]: credit for short thoughts.

    The credit is ``(mean - tokens) / scale`` of ``ThoughtLengthStatistics``, times the price factor
    of the batch. It is placed on level digit, thought and, with ``credit_end``, the end of the
    thought. With ``credit=posterior`` it is 0 on level digits: ``choice_credit`` contains their
    prices.

    ``rows`` are the turns of each row. Returns the statistics of all turns.
    """
    row_indices, turns = flatten_turns(rows)
    columns = data.non_tensor_batch
    # ``anchor_obs`` has one state per turn of a row, in the same order as ``turns``.
    turn_states = [state for row in columns["anchor_obs"] for state in row]
    group_ids = [columns["uid"][row] for row in row_indices]
    thought_tokens = torch.tensor(
        [turn.parsed.thought_tokens for turn in turns], dtype=torch.float64
    )
    is_compared = torch.tensor(
        [
            bool(columns["won"][row]) and turn.parsed.failure is None
            for row, turn in zip(row_indices, turns, strict=True)
        ],
        dtype=torch.bool,
    )
    length_statistics = compute_thought_length_statistics(
        thought_tokens,
        is_compared,
        list(zip(group_ids, turn_states, strict=True)),
        [columns["traj_uid"][row] for row in row_indices],
    )
    prices = data.meta_info.get(PRICE_MULTIPLIER, 1.0) * length_statistics.compute_group_prices(
        thought_tokens
    )
    offsets = _compute_turn_offsets(data, row_indices, turns)
    spans = []
    for turn, offset in zip(turns, offsets, strict=True):
        has_posterior = rlvcr.credit == "posterior" and turn.has_level_alternatives
        spans.append(turn.credit_spans(offset, rlvcr.credit_end)[1 if has_posterior else 0 :])
    shape = data.batch["responses"].shape
    data.batch[GROUP_PRICE_COLUMN] = broadcast_turn_values(shape, row_indices, spans, -prices)
    data.meta_info.setdefault("metrics", {}).update(
        {
            "rlvcr/group_price_share": length_statistics.has_other_success.double().mean().item(),
            "rlvcr/group_price_abs_mean": prices.abs().mean().item(),
        }
    )
    return length_statistics


def add_level_entropy_bonus(
    data: DataProto, rows: Sequence[Sequence[RowTurn]], rlvcr: RLVCRSettings, codec: LevelCodec
) -> None:
    """Add a loss term that keeps the choice of the thinking level diverse.

    The actor's loss rewards entropy over the digits of the four levels. The column ``choice_mask``
    [B, R] is 1 on each sampled level digit. ``choice`` in ``meta_info`` has the tokens of the
    digits and the weight of the bonus.
    """
    row_indices, turns = flatten_turns(rows)
    offsets = _compute_turn_offsets(data, row_indices, turns)
    digit_spans = [turn.digit_spans(offset) for turn, offset in zip(turns, offsets, strict=True)]
    shape = data.batch["responses"].shape
    digit_mask = broadcast_turn_values(shape, row_indices, digit_spans, torch.ones(len(turns)))
    data.batch[CHOICE_MASK] = digit_mask.long()
    bonus_weight = rlvcr.thinking_diversity_w
    data.meta_info["choice"] = RestrictedTokenLoss(
        tuple(codec.digit_ids), bonus_weight, name="level"
    )


def _warn_about_dropped_thoughts(metrics: Mapping[str, float]) -> None:
    dropped_share = metrics.get(DROPPED_LENGTH_METRIC, 0.0)
    if dropped_share > MAX_DROPPED_SHARE:
        logger.warning(
            "%s=%.2f: share of alternative thoughts that were cut and dropped; the longest ones "
            "are dropped first, which biases the comparison of high levels; raise "
            "algorithm.rlvcr.max_alternative_tokens (null: the limit of a turn)",
            DROPPED_LENGTH_METRIC,
            dropped_share,
        )


class _BatchCredit(NamedTuple):
    """Credit of the S turns of a batch for their thinking levels, each field [S].

    ``advantage``: thinking advantage. ``price_share``: the part of ``advantage`` due to token cost.
    ``factor``: factor of the trajectory advantage, for ``combine=reweight``. ``has_posterior``:
    true for a turn whose level digit gets its credit from the column ``choice_credit``. It is None
    without ``algorithm.rlvcr.credit=posterior``.
    """

    advantage: torch.Tensor
    price_share: torch.Tensor
    factor: torch.Tensor
    has_posterior: torch.Tensor | None = None


def _compute_credit(
    table: ScoredTurns, charged_tokens: torch.Tensor, rlvcr: RLVCRSettings
) -> _BatchCredit:
    """Return the credit of all turns for their thinking levels, from the scores in ``table``.

    ``charged_tokens`` [S, 4] are the numbers of thought tokens that have a token cost.
    """
    utility_inputs = (table.scores, table.is_valid, table.chosen_columns, charged_tokens)
    advantage, price_share = compute_thinking_advantage(
        *utility_inputs,
        mode=rlvcr.mode,
        cost_coef=rlvcr.cost_coef,
        cost_max=rlvcr.cost_max,
        std_floor=rlvcr.std_floor,
        alternatives=rlvcr.alternatives,
    )
    factor = compute_reweight_factors(
        *utility_inputs,
        cost_coef=rlvcr.cost_coef,
        cost_max=rlvcr.cost_max,
        spread_floor=rlvcr.spread_floor,
    )
    return _BatchCredit(advantage, price_share, factor)


def _permute_credit(
    credit: _BatchCredit, table: ScoredTurns, is_success: torch.Tensor, seed: int
) -> _BatchCredit:
    """Return ``credit`` shuffled among the scored turns, as a control experiment.

    The result has the same thinking advantages, assigned to random turns. Turns of successful
    trajectories and other turns are shuffled separately.
    """
    generator = torch.Generator().manual_seed(seed)
    is_shuffled = (table.chosen_columns >= 0) & (table.is_valid.sum(-1) >= 2)
    source_indices = torch.arange(len(table.chosen_columns))
    # Successful and other trajectories are shuffled separately: token costs and the formulas of
    # ``combine`` may depend on success.
    for outcome in (True, False):
        shuffled_indices = (is_shuffled & (is_success == outcome)).nonzero().squeeze(-1)
        source_indices[shuffled_indices] = shuffled_indices[
            torch.randperm(len(shuffled_indices), generator=generator)
        ]
    permuted_fields = (
        values[source_indices] for values in (credit.advantage, credit.price_share, credit.factor)
    )
    return _BatchCredit(*permuted_fields)


def _compute_level_bonus(table: ScoredTurns, group_ids: np.ndarray) -> torch.Tensor:
    """Return the bonus [S] of each turn for a rare thinking level, 0 where the level was forced."""
    is_forced = torch.tensor([turn.num_forced_tokens > 0 for turn in table.turns], dtype=torch.bool)
    # -1 stands for no level, so that forced levels are not counted.
    counted_columns = torch.where(is_forced, -1, table.chosen_columns)
    return compute_level_count_bonus(counted_columns, [group_ids[row] for row in table.row_indices])


def _compute_turn_offsets(
    data: DataProto, row_indices: Sequence[int], turns: Sequence[RowTurn]
) -> list[int]:
    """Return the index in ``responses`` at which each turn begins."""
    response_width = data.batch["responses"].shape[1]
    prompt_lengths = data.batch["attention_mask"][:, :-response_width].sum(-1).tolist()
    return [
        turn.start_in_row - prompt_lengths[row]
        for row, turn in zip(row_indices, turns, strict=True)
    ]


def _add_credit_to_records(
    data: DataProto, table: ScoredTurns, token_costs: torch.Tensor, credit: _BatchCredit
) -> None:
    """Add scored thoughts and the credit for thinking levels to the turn records of ``data``."""
    credit_by_row: list[list[TurnCredit]] = [[] for _ in range(len(data))]
    # The turns of a row are in the order of its records.
    turn_credit = zip(
        table.row_indices,
        table.turns,
        table.level_scores_by_turn,
        token_costs,
        credit.advantage.tolist(),
        credit.price_share.tolist(),
        strict=True,
    )
    for row, turn, level_scores, turn_token_costs, advantage, price_share in turn_credit:
        scored_thoughts = _build_scored_thoughts(turn, level_scores, turn_token_costs)
        credit_by_row[row].append((scored_thoughts, advantage, price_share))
    records_by_row = data.non_tensor_batch["steps"]
    data.non_tensor_batch["steps"] = object_array(
        [CreditedTurns(*row) for row in zip(records_by_row, credit_by_row, strict=True)]
    )


def _build_scored_thoughts(
    turn: RowTurn, level_scores: Mapping[int, ScoreResult], token_costs: torch.Tensor
) -> tuple[ScoredThought, ...]:
    """Return the thoughts of a turn with the scores of its action, in order of thinking level."""
    thoughts = turn.thoughts_by_level()
    scored_thoughts = []
    for level, scores in sorted(level_scores.items()):
        text, num_tokens = thoughts[level]
        scored_thoughts.append(
            ScoredThought(
                level=level,
                thought=text,
                tokens=num_tokens,
                cost=float(token_costs[level - 1]),
                original=level == turn.parsed.level,
                scores=scores,
            )
        )
    return tuple(scored_thoughts)
