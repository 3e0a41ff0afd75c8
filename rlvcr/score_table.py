"""From the steps of rows to questions, and from the answers to one line per step.

S counts the steps of all rows; level k is column k - 1.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvcr.alternatives import StepAlternatives
from rlvcr.levels import LEVELS, ParsedStep
from rlvcr.thinking import score_of
from verl.protocol import object_array
from verl.records import Branch, SegmentScore, Span


@dataclass(frozen=True, slots=True)
class RowStep:
    """One step of a row: its ``token_ids`` begin at unpadded index ``start`` of the row.

    The first ``forced`` of them, a level that was not the policy's choice, were not sampled.
    ``executed`` is how much more the play was worth than one in which another level was forced
    here, None where none was.
    """

    step: int
    start: int
    token_ids: Sequence[int]
    parsed: ParsedStep
    alternatives: StepAlternatives | None = None
    forced: int = 0
    executed: float | None = None

    def credit_spans(self, offset: int, with_end: bool = False) -> list[tuple[int, int]]:
        """Ranges of tokens, counted from ``offset`` on, that carry thinking credit, on request with
        the token that ended the thought; what was forced never does.
        """
        return self._sampled(self.parsed.credit_spans(offset, with_end), offset)

    def choice_spans(self, offset: int, with_end: bool = False) -> list[tuple[int, int]]:
        """Ranges of tokens that carry credit from returns, as ``credit_spans``: also of a step
        that was cut or cannot be read.
        """
        return self._sampled(self.parsed.choice_spans(offset, with_end), offset)

    def _sampled(self, spans: list[tuple[int, int]], offset: int) -> list[tuple[int, int]]:
        return [(start, end) for start, end in spans if start >= offset + self.forced]

    def thoughts(self) -> dict[int, tuple[str, int]]:
        """Text and tokens of the thought at each level the step has a context for."""
        found: dict[int, tuple[str, int]] = {}
        if self.parsed.level is not None:
            found[self.parsed.level] = (self.parsed.thought, self.parsed.thought_tokens)
        if self.alternatives is not None:
            for other in self.alternatives.thoughts:
                found[other.level] = (other.thought, other.thought_tokens)
        return found


@dataclass(slots=True)
class ScoredSteps:
    """All S steps of a batch in the order of rows: scores and costs [S, 4], which exist, and the
    chosen column [S].

    ``row[s]`` is the row of step s, ``entries[s]`` its scores by level; an unparsed step has chosen
    -1.
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
    branches: list[list[Branch]] = []
    spans: list[list[Span]] = []
    for steps in rows:
        scored = [step for step in steps if step.parsed.failure is None]
        spans.append([_span(step) for step in scored])
        branches.append([branch for step in scored for branch in _branches(step)])
    return object_array(branches), object_array(spans)


def _span(step: RowStep) -> Span:
    """The step's own action, in the row."""
    level, (first, last) = step.parsed.scored
    return Span(step.start + first, step.start + last, step=step.step, label=level)


def _branches(step: RowStep) -> list[Branch]:
    """The same tokens of the action after each of the other thoughts."""
    if step.alternatives is None:
        return []
    _, (first, last) = step.parsed.scored
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


def tabulate(
    rows: Sequence[Sequence[RowStep]],
    branch_scores: Sequence[Sequence[SegmentScore]],
    span_scores: Sequence[Sequence[SegmentScore]],
    score: str,
) -> ScoredSteps:
    """Bring the answers of ``compute_log_prob`` into one line per step and one column per level."""
    entries: list[dict[int, SegmentScore]] = []
    for row, own, others in zip(rows, span_scores, branch_scores, strict=True):
        by_step: dict[int, dict[int, SegmentScore]] = {}
        for answer in (*own, *others):
            by_step.setdefault(answer.step, {})[answer.label] = answer
        # Nothing was asked about a step that could not be read: it has no valid context.
        entries.extend(by_step.get(step.step, {}) for step in row)
    steps = [step for row in rows for step in row]
    shape = (len(steps), len(LEVELS))
    table = ScoredSteps(
        row=[number for number, row in enumerate(rows) for _ in row],
        steps=steps,
        entries=entries,
        # Float64: advantages are differences of scores that may be nearly equal.
        scores=torch.zeros(shape, dtype=torch.float64),
        valid=torch.zeros(shape, dtype=torch.bool),
        costs=torch.zeros(shape, dtype=torch.float64),
        chosen=torch.full((len(steps),), -1, dtype=torch.long),
    )
    for s, (step, found) in enumerate(zip(steps, entries, strict=True)):
        thoughts = step.thoughts()
        for level, entry in found.items():
            _, tokens = thoughts[level]
            table.scores[s, level - 1] = score_of(entry, score)
            table.valid[s, level - 1] = True
            table.costs[s, level - 1] = tokens
        if step.parsed.failure is None:
            level, _ = step.parsed.scored
            table.chosen[s] = level - 1
    return table


def scoring_metrics(table: ScoredSteps, advantage: torch.Tensor) -> dict[str, float]:
    """``rlvcr/*`` of one batch: scores of the originals, valid contexts per expanded step, what was
    dropped.

    ``advantage`` [S]; a step is expanded where alternatives were asked for, whether any came or
    not.
    """
    expanded = [s for s, step in enumerate(table.steps) if step.alternatives is not None]
    asked_for = [step.alternatives for step in table.steps if step.alternatives is not None]
    dropped: Counter[str] = Counter()
    for alternatives in asked_for:
        dropped.update(alternatives.dropped)
    # Shares of all that were sampled, dropped ones too; level 1 is not, and cannot be dropped.
    came = [thought for alternatives in asked_for for thought in alternatives.thoughts]
    asked = sum(thought.level != LEVELS[0] for thought in came) + dropped.total()
    metrics = {
        "rlvcr/expanded_steps": float(len(expanded)),
        "rlvcr/alternative_tokens": float(
            sum(alternatives.sampled_tokens for alternatives in asked_for)
        ),
    }
    for reason, count in sorted(dropped.items()):
        metrics[f"rlvcr/dropped_{reason}"] = count / asked
    originals = _originals(table)
    if originals:
        metrics["rlvcr/score_logprob"] = float(np.mean([entry.logprob for entry in originals]))
        metrics["rlvcr/score_entropy"] = float(np.mean([entry.entropy for entry in originals]))
    if expanded:
        metrics["rlvcr/valid_contexts_mean"] = table.valid[expanded].sum(-1).float().mean().item()
        metrics["rlvcr/advantage_abs_mean"] = advantage[expanded].abs().mean().item()
    return metrics


def _originals(table: ScoredSteps) -> list[SegmentScore]:
    """What the action scored after the thought it was sampled with, of every step that was read."""
    found = []
    for step, entries in zip(table.steps, table.entries, strict=True):
        if entries:
            level, _ = step.parsed.scored
            found.append(entries[level])
    return found
