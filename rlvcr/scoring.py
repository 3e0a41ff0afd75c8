"""Scores of the step's own action under the four thoughts, and what follows for the rows.

    row:    [ prompt | <level>3</level><think>z</think><action> go to desk 1 </action> | ... ]
    span:                                                       └─ S, H at level 3 ─┘
    branch: [ prompt ] + <level>1</level><think></think><action> go to desk 1 </    S, H at level 1
    branch: [ prompt ] + <level>4</level><think>z'</think><action> go to desk 1 </  S, H at level 4

Targets are the sampled tokens of the action and the first token of ``</action>``, the same ids
under every thought. The policy that sampled them scores them, in the pass that also gives the old
log-probs.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import torch

from rlvcr.config import MethodConfig, ThinkingConfig
from rlvcr.core_rlvcr import (
    level_count_bonus,
    place_step_values,
    thinking_advantage,
    thinking_price,
    thinking_reweight,
)
from rlvcr.levels import LevelCodec
from rlvcr.records import ThinkingStep, ThoughtContext
from rlvcr.score_table import RowStep, ScoredSteps, build_queries, scoring_metrics, tabulate
from verl.protocol import DataProto, object_array
from verl.records import ChoiceBonus, SegmentScore

__all__ = ["RowStep", "ScoredSteps", "build_queries", "score_rows", "scoring_metrics", "tabulate"]

SCORED_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


def score_rows(
    data: DataProto,
    rows: Sequence[Sequence[RowStep]],
    compute_log_prob: Callable[[DataProto], DataProto],
    config: MethodConfig,
    codec: LevelCodec,
) -> DataProto:
    """Score ``rows`` (the steps of each row of ``data``) and add credit for thinking to ``data``,
    which is returned.

    Adds ``old_log_probs``, ``entropys``, ``thinking_level_entropies``, ``thinking_token_costs``,
    ``choice_mask`` and, where they are used, ``thinking_level_bonus`` and ``thinking_reweight``,
    all [B, R]; raw numbers go into the step records, ``rlvcr/*`` into ``meta_info["metrics"]``, the
    bonus on the levels' entropy into ``meta_info`` for the actor.
    """
    rlvcr = config.algorithm.rlvcr
    asked = data.select(list(SCORED_COLUMNS), [])
    branches, spans = build_queries(rows)
    asked.non_tensor_batch["branches"] = branches
    asked.non_tensor_batch["spans"] = spans
    # For the old log-probs of the rows; branches and spans are always scored at temperature 1.
    asked.meta_info = {"temperature": config.actor_rollout_ref.rollout.temperature}
    answer = compute_log_prob(asked)
    for key in ("old_log_probs", "entropys"):
        data.batch[key] = answer.batch[key]
    scores = answer.non_tensor_batch
    branch_scores = list(scores["branch_scores"])
    table = tabulate(rows, branch_scores, list(scores["span_scores"]), rlvcr.score)
    credit = _credit(table, rlvcr)
    columns = {
        "thinking_level_entropies": credit.advantage,
        "thinking_token_costs": credit.cost_share,
    }
    if rlvcr.level_bonus_w:
        bonus = _level_bonus(table, data.non_tensor_batch["uid"])
        columns["thinking_level_bonus"] = rlvcr.level_bonus_w * bonus
    # COPO needs the factors whatever ``combine`` says.
    if rlvcr.combine == "reweight" or config.algorithm.adv_estimator == "copo":
        columns["thinking_reweight"] = credit.factor
    _place(data, table, columns)
    prices = thinking_price(table.costs, rlvcr.cost_coef, rlvcr.cost_max)
    _record(data, table, prices, credit)
    data.meta_info["choice_bonus"] = ChoiceBonus(
        tuple(codec.digit_ids), rlvcr.thinking_diversity_w, name="level"
    )
    branch_tokens = sum(len(branch.token_ids) for row in branches for branch in row)
    row_tokens = int(data.batch["attention_mask"].sum())
    metrics = data.meta_info.setdefault("metrics", {})
    metrics.update(scoring_metrics(table, credit.advantage))
    metrics["rlvcr/branch_tokens_ratio"] = branch_tokens / max(row_tokens, 1)
    return data


class _Credit(NamedTuple):
    """What thinking earned at every step, each [S]; ``cost_share`` is part of ``advantage``."""

    advantage: torch.Tensor
    cost_share: torch.Tensor
    factor: torch.Tensor


def _credit(table: ScoredSteps, rlvcr: ThinkingConfig) -> _Credit:
    advantage, cost_share = thinking_advantage(
        table.scores,
        table.valid,
        table.chosen,
        table.costs,
        mode=rlvcr.mode,
        cost_coef=rlvcr.cost_coef,
        cost_max=rlvcr.cost_max,
        std_floor=rlvcr.std_floor,
        alternatives=rlvcr.alternatives,
    )
    factor = thinking_reweight(
        table.scores,
        table.valid,
        table.chosen,
        table.costs,
        cost_coef=rlvcr.cost_coef,
        cost_max=rlvcr.cost_max,
    )
    return _Credit(advantage, cost_share, factor)


def _level_bonus(table: ScoredSteps, uid: np.ndarray) -> torch.Tensor:
    """Of every step [S], among the sampled levels of its group.

    A level that was forced gets none.
    """
    forced = torch.tensor([step.forced > 0 for step in table.steps], dtype=torch.bool)
    # -1 stands for no level: what the policy did not choose counts for no level either.
    chosen = torch.where(forced, -1, table.chosen)
    return level_count_bonus(chosen, [uid[row] for row in table.row])


def _place(data: DataProto, table: ScoredSteps, columns: Mapping[str, torch.Tensor]) -> None:
    """Put one value per step on the level digit and thought of that step, for each of ``columns``,
    and 1 on the digits into ``choice_mask``.
    """
    width = data.batch["responses"].shape[1]
    # Without padding, as the starts of steps are counted.
    prompt_lengths = data.batch["attention_mask"][:, :-width].sum(-1).tolist()
    of_row: list[list[int]] = [[] for _ in range(len(data))]
    for s, row in enumerate(table.row):
        of_row[row].append(s)
    placed: dict[str, list[torch.Tensor]] = {key: [] for key in columns}
    masks: list[torch.Tensor] = []
    for row, numbers in enumerate(of_row):
        spans: list[list[tuple[int, int]]] = []
        digits: list[list[tuple[int, int]]] = []
        for s in numbers:
            step = table.steps[s]
            # A response begins where the row's unpadded prompt ends.
            own = step.credit_spans(step.start - prompt_lengths[row])
            spans.append(own)
            # A sampled level digit is the first span of a step that has any.
            digits.append([] if step.forced else own[:1])
        for key, values in columns.items():
            placed[key].append(place_step_values(width, spans, values[numbers]))
        masks.append(place_step_values(width, digits, [1.0] * len(digits)))
    for key, rows in placed.items():
        data.batch[key] = torch.stack(rows)
    data.batch["choice_mask"] = torch.stack(masks).long()


def _record(data: DataProto, table: ScoredSteps, prices: torch.Tensor, credit: _Credit) -> None:
    """Put records that know contexts (with ``prices`` [S, 4]) and credit of their steps in place of
    those of ``data``.
    """
    number_of: dict[tuple[int, int], int] = {}
    for s, (row, step) in enumerate(zip(table.row, table.steps, strict=True)):
        number_of[row, step.step] = s
    credited: list[list[ThinkingStep]] = []
    for row, records in enumerate(data.non_tensor_batch["steps"]):
        credited.append([])
        for record in records:
            s = number_of[row, record.step]
            contexts = _contexts(table.steps[s], table.entries[s], prices[s])
            advantage = float(credit.advantage[s])
            cost_share = float(credit.cost_share[s])
            credited[row].append(record.credited(contexts, advantage, cost_share))
    data.non_tensor_batch["steps"] = object_array(credited)


def _contexts(
    step: RowStep, entries: Mapping[int, SegmentScore], prices: torch.Tensor
) -> tuple[ThoughtContext, ...]:
    """The contexts of a step in order of level; ``prices`` [4]."""
    thoughts = step.thoughts()
    contexts = []
    for level, scores in sorted(entries.items()):
        text, tokens = thoughts[level]
        contexts.append(
            ThoughtContext(
                level=level,
                thought=text,
                tokens=tokens,
                cost=float(prices[level - 1]),
                original=level == step.parsed.level,
                scores=scores,
            )
        )
    return tuple(contexts)
