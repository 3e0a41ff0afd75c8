"""Scores of the step's own action under the four thoughts, and what follows from them for the rows.

    row:     [ chat prompt | <level>3</level><think>z</think><action> go to desk 1 </action> | bridge ... ]
    span:                                                             └── S, H at level 3 ─┘
    branch:  [ chat prompt ] + <level>1</level><think></think><action> go to desk 1 </         S, H at level 1
    branch:  [ chat prompt ] + <level>4</level><think>z'</think><action> go to desk 1 </       S, H at level 4

Targets are the sampled tokens of the action and the first token of ``</action>``, the same ids
under every thought. The policy that sampled them scores them, in the pass that also gives the old
log-probs.
"""

import logging
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from rlvcr.alternatives import StepAlternatives
from rlvcr.core_rlvcr import (
    level_count_bonus,
    place_step_values,
    score_of,
    thinking_advantage,
    thinking_price,
    thinking_reweight,
)
from rlvcr.levels import LEVELS, LevelCodec, ParsedStep
from rlvcr.records import ThinkingStep, ThoughtContext
from verl.protocol import DataProto, object_array
from verl.records import Branch, ChoiceBonus, SegmentScore, Span

logger = logging.getLogger(__name__)
SCORED_COLUMNS = ("input_ids", "attention_mask", "position_ids", "responses", "response_mask")


@dataclass(frozen=True, slots=True)
class RowStep:
    """One step of a row: its ``token_ids`` begin at unpadded index ``start`` of the row.

    The first ``forced`` of them, a level that was not the policy's choice, were not sampled.
    """

    step: int
    start: int
    token_ids: Sequence[int]
    parsed: ParsedStep
    alternatives: StepAlternatives | None = None
    forced: int = 0

    def credit_spans(self, offset: int) -> list[tuple[int, int]]:
        """Ranges of tokens, counted from ``offset`` on, that carry thinking credit; what was forced
        never does.
        """
        spans = self.parsed.credit_spans(offset)
        return [(start, end) for start, end in spans if start >= offset + self.forced]


@dataclass(slots=True)
class ScoredSteps:
    """All S steps of a batch in the order of rows: scores and costs [S, 4], which exist, and the
    chosen column [S].

    ``row[s]`` is the row of step s; an unparsed step has chosen -1.
    """

    row: list[int]
    steps: list[RowStep]
    entries: list[dict[int, SegmentScore]]
    scores: torch.Tensor
    valid: torch.Tensor
    costs: torch.Tensor
    chosen: torch.Tensor


def build_queries(rows: Sequence[Sequence[RowStep]]) -> tuple[np.ndarray, np.ndarray]:
    """``branches`` and ``spans`` [B]: what ``compute_log_prob`` is asked to score besides the rows
    themselves.

    A step that could not be parsed has neither; a step without alternatives has a span only.
    """
    branches, spans = [], []
    for steps in rows:
        scored = [step for step in steps if step.parsed.failure is None]
        spans.append([_span(step) for step in scored])
        branches.append([branch for step in scored for branch in _branches(step)])
    return object_array(branches), object_array(spans)


def _span(step: RowStep) -> Span:
    first, last = step.parsed.score_span
    return Span(step.start + first, step.start + last, step=step.step, label=step.parsed.level)


def _branches(step: RowStep) -> list[Branch]:
    if step.alternatives is None:
        return []
    first, last = step.parsed.score_span
    action = [int(token) for token in step.token_ids[first:last]]
    return [
        Branch(
            step.start,
            [*thought.token_ids, *action],
            target_start=len(thought.token_ids),
            step=step.step,
            label=thought.level,
        )
        for thought in step.alternatives.thoughts
    ]


def score_rows(
    data: DataProto,
    rows: Sequence[Sequence[RowStep]],
    compute_log_prob: Callable[[DataProto], DataProto],
    config: Any,
    codec: LevelCodec,
) -> DataProto:
    """Score ``rows`` (the steps of each row of ``data``) and add credit for thinking to ``data``,
    which is returned.

    Adds ``old_log_probs``, ``entropys``, ``thinking_level_entropies``, ``thinking_token_costs``,
    ``choice_mask`` and, where they are used, ``thinking_level_bonus`` and ``thinking_reweight``, all
    [B, R]; raw numbers go into the step records, ``rlvcr/*`` into ``meta_info["metrics"]``, the
    bonus on the levels' entropy into ``meta_info`` for the actor. ``config`` is the whole
    typed configuration.
    """
    rlvcr, temperature = config.algorithm.rlvcr, config.actor_rollout_ref.rollout.temperature
    asked = data.select(list(SCORED_COLUMNS), [])
    asked.non_tensor_batch["branches"], asked.non_tensor_batch["spans"] = build_queries(rows)
    asked.meta_info = {"temperature": temperature}
    answer = compute_log_prob(asked)
    for key in ("old_log_probs", "entropys"):
        data.batch[key] = answer.batch[key]
    scores = answer.non_tensor_batch
    table = tabulate(rows, list(scores["branch_scores"]), list(scores["span_scores"]), rlvcr.score)
    advantage, cost_share, factor = _credit(table, rlvcr)
    credit = {"thinking_level_entropies": advantage, "thinking_token_costs": cost_share}
    if rlvcr.level_bonus_w:
        credit["thinking_level_bonus"] = rlvcr.level_bonus_w * _level_bonus(
            table, data.non_tensor_batch["uid"]
        )
    if rlvcr.combine == "reweight" or config.algorithm.adv_estimator == "copo":
        credit["thinking_reweight"] = factor
    _place(data, table, credit)
    prices = thinking_price(table.costs, rlvcr.cost_coef, rlvcr.cost_max)
    _record(data, table, prices, advantage, cost_share)
    data.meta_info["choice_bonus"] = ChoiceBonus(
        tuple(codec.digit_ids), rlvcr.thinking_diversity_w, name="level"
    )
    branch_tokens = sum(
        len(branch.token_ids) for row in asked.non_tensor_batch["branches"] for branch in row
    )
    row_tokens = int(data.batch["attention_mask"].sum())
    data.meta_info.setdefault("metrics", {}).update(scoring_metrics(table, advantage))
    data.meta_info["metrics"]["rlvcr/branch_tokens_ratio"] = branch_tokens / max(row_tokens, 1)
    return data


def tabulate(
    rows: Sequence[Sequence[RowStep]],
    branch_scores: Sequence[Sequence[SegmentScore]],
    span_scores: Sequence[Sequence[SegmentScore]],
    score: str,
) -> ScoredSteps:
    """Bring the answers of ``compute_log_prob`` into one line per step and one column per level."""
    of_row = [row for row, steps in enumerate(rows) for _ in steps]
    steps = [step for row in rows for step in row]
    entries: list[dict[int, SegmentScore]] = []
    for index, row in enumerate(rows):
        answers = [*span_scores[index], *branch_scores[index]]
        by_step: dict[int, dict[int, SegmentScore]] = {}
        for answer in answers:
            by_step.setdefault(answer.step, {})[answer.label] = answer
        entries.extend(by_step.get(step.step, {}) for step in row)
    shape = (len(steps), len(LEVELS))
    scores, costs = torch.zeros(shape, dtype=torch.float64), torch.zeros(shape, dtype=torch.float64)
    valid = torch.zeros(shape, dtype=torch.bool)
    chosen = torch.full((len(steps),), -1, dtype=torch.long)
    for s, (step, found) in enumerate(zip(steps, entries, strict=True)):
        tokens = thought_tokens(step)
        for level, entry in found.items():
            scores[s, level - 1], valid[s, level - 1] = score_of(entry, score), True
            costs[s, level - 1] = tokens[level]
        if step.parsed.failure is None:
            chosen[s] = step.parsed.level - 1
    return ScoredSteps(of_row, steps, entries, scores, valid, costs, chosen)


def thought_tokens(step: RowStep) -> dict[int, int]:
    """Tokens of the thought at each level the step has a context for."""
    found = {step.parsed.level: step.parsed.thought_tokens}
    for thought in step.alternatives.thoughts if step.alternatives is not None else ():
        found[thought.level] = thought.thought_tokens
    return found


def _credit(table: ScoredSteps, rlvcr: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = (table.scores, table.valid, table.chosen, table.costs)
    price = {"cost_coef": rlvcr.cost_coef, "cost_max": rlvcr.cost_max}
    advantage, cost_share = thinking_advantage(
        *arguments,
        mode=rlvcr.mode,
        std_floor=rlvcr.std_floor,
        alternatives=rlvcr.alternatives,
        **price,
    )
    return advantage, cost_share, thinking_reweight(*arguments, **price)


def _level_bonus(table: ScoredSteps, uid: np.ndarray) -> torch.Tensor:
    """Of every step [S], among the sampled levels of its group; a level that was forced gets none."""
    forced = torch.tensor([step.forced > 0 for step in table.steps], dtype=torch.bool)
    return level_count_bonus(torch.where(forced, -1, table.chosen), [uid[row] for row in table.row])


def _place(data: DataProto, table: ScoredSteps, columns: dict[str, torch.Tensor]) -> None:
    """Put one value per step on the level digit and thought of that step, for each of ``columns``."""
    width = data.batch["responses"].shape[1]
    prompt_lengths = data.batch["attention_mask"][:, :-width].sum(-1).tolist()
    of_row: list[list[int]] = [[] for _ in range(len(data))]
    for s, row in enumerate(table.row):
        of_row[row].append(s)
    placed: dict[str, list[torch.Tensor]] = {key: [] for key in (*columns, "choice_mask")}
    for row, numbers in enumerate(of_row):
        offsets = [table.steps[s].start - prompt_lengths[row] for s in numbers]
        spans = [
            table.steps[s].credit_spans(offset) for s, offset in zip(numbers, offsets, strict=True)
        ]
        # a sampled level digit is the first span of a step that has any
        digits = [
            [] if table.steps[s].forced else own[:1] for s, own in zip(numbers, spans, strict=True)
        ]
        for key, values in columns.items():
            placed[key].append(place_step_values(width, spans, values[numbers]))
        placed["choice_mask"].append(place_step_values(width, digits, [1.0] * len(digits)))
    for key, values in placed.items():
        stacked = torch.stack(values)
        data.batch[key] = stacked.long() if key == "choice_mask" else stacked


def _record(
    data: DataProto,
    table: ScoredSteps,
    prices: torch.Tensor,
    advantage: torch.Tensor,
    cost_share: torch.Tensor,
) -> None:
    """Put records that know contexts (with ``prices`` [S, 4]), advantage and cost [S] of their
    steps in place of those of ``data``.
    """
    number_of = {
        (row, step.step): s
        for s, (row, step) in enumerate(zip(table.row, table.steps, strict=True))
    }
    credited: list[list[ThinkingStep]] = []
    for row, records in enumerate(data.non_tensor_batch["steps"]):
        credited.append([])
        for record in records:
            s = number_of[row, record.step]
            contexts = _contexts(table.steps[s], table.entries[s], prices[s])
            credited[row].append(
                record.credited(contexts, float(advantage[s]), float(cost_share[s]))
            )
    data.non_tensor_batch["steps"] = object_array(credited)


def _contexts(
    step: RowStep, entries: dict[int, SegmentScore], prices: torch.Tensor
) -> tuple[ThoughtContext, ...]:
    """The contexts of a step in order of level; ``prices`` [4]."""
    texts = {step.parsed.level: step.parsed.thought}
    for thought in step.alternatives.thoughts if step.alternatives is not None else ():
        texts[thought.level] = thought.thought
    tokens = thought_tokens(step)
    contexts = []
    for level, scores in sorted(entries.items()):
        contexts.append(
            ThoughtContext(
                level=level,
                thought=texts[level],
                tokens=tokens[level],
                cost=float(prices[level - 1]),
                original=level == step.parsed.level,
                scores=scores,
            )
        )
    return tuple(contexts)


def scoring_metrics(table: ScoredSteps, advantage: torch.Tensor) -> dict[str, float]:
    """``rlvcr/*`` of one batch: scores of the originals, valid contexts per expanded step, what was
    dropped.
    """
    scored = zip(table.steps, table.entries, strict=True)
    originals = [entries[step.parsed.level] for step, entries in scored if entries]
    expanded = [s for s, step in enumerate(table.steps) if step.alternatives is not None]
    dropped: Counter[str] = Counter()
    for s in expanded:
        dropped.update(table.steps[s].alternatives.dropped)
    thoughts = sum(len(table.steps[s].alternatives.thoughts) for s in expanded)
    asked = thoughts + dropped.total()
    metrics = {
        "rlvcr/expanded_steps": float(len(expanded)),
        "rlvcr/alternative_tokens": float(
            sum(table.steps[s].alternatives.sampled_tokens for s in expanded)
        ),
    }
    metrics |= {
        f"rlvcr/dropped_{reason}": count / asked for reason, count in sorted(dropped.items())
    }
    if originals:
        metrics["rlvcr/score_logprob"] = float(np.mean([entry.logprob for entry in originals]))
        metrics["rlvcr/score_entropy"] = float(np.mean([entry.entropy for entry in originals]))
    if expanded:
        metrics["rlvcr/valid_contexts_mean"] = table.valid[expanded].sum(-1).float().mean().item()
        metrics["rlvcr/advantage_abs_mean"] = advantage[expanded].abs().mean().item()
    return metrics
