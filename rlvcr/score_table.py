"""Score requests for the turns of rows, and the table of their results with one line per turn.

S is the number of turns of all rows; level k is column k - 1.
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
    """Turn of a row. Its ``token_ids`` begin at unpadded index ``start`` of the row.

    The first ``num_forced`` of them, a forced level, were not sampled. ``executed_credit``: credit
    from the executed alternative, None where none was executed.
    """

    step: int
    start: int
    token_ids: Sequence[int]
    parsed: ParsedStep
    alternatives: StepAlternatives | None = None
    forced: int = 0
    executed: float | None = None

    def credit_spans(self, offset: int, with_end: bool = False) -> list[tuple[int, int]]:
        """Return the token ranges of the thinking advantage, with indices from ``offset`` on.

        ``with_end`` includes the token that ended the thought. Forced tokens are never included.
        """
        return self._sampled(self.parsed.credit_spans(offset, with_end), offset)

    def choice_spans(self, offset: int, with_end: bool = False) -> list[tuple[int, int]]:
        """Return the token ranges of credit from returns, also for a turn that was cut or cannot be
        read.
        """
        return self._sampled(self.parsed.choice_spans(offset, with_end), offset)

    def _sampled(self, spans: list[tuple[int, int]], offset: int) -> list[tuple[int, int]]:
        return [(start, end) for start, end in spans if start >= offset + self.forced]

    def thoughts(self) -> dict[int, tuple[str, int]]:
        """Return text and token count of the thought at each level that has a context."""
        found: dict[int, tuple[str, int]] = {}
        if self.parsed.level is not None:
            found[self.parsed.level] = (self.parsed.thought, self.parsed.thought_tokens)
        if self.alternatives is not None:
            for other in self.alternatives.thoughts:
                found[other.level] = (other.thought, other.thought_tokens)
        return found


@dataclass(slots=True)
class ScoredSteps:
    """Table of all S turns of a batch in the order of rows.

    ``row_indices[s]``: row of turn s. ``entries[s]``: its scores by level. ``scores``, ``is_valid``
    (context exists) and ``costs`` (thought tokens) are [S, 4]. ``chosen`` [S]: column of the chosen
    level, -1 for an unparsed turn.
    """

    row: list[int]
    steps: list[RowStep]
    entries: list[dict[int, SegmentScore]]
    scores: torch.Tensor
    valid: torch.Tensor
    costs: torch.Tensor
    chosen: torch.Tensor


def build_queries(rows: Sequence[Sequence[RowStep]]) -> tuple[np.ndarray, np.ndarray]:
    """Return ``branches`` and ``spans`` [B]: sequences for ``compute_log_prob`` to score.

    An unparsed turn has neither; a turn without alternative thoughts has only a span.
    """
    branches: list[list[Branch]] = []
    spans: list[list[Span]] = []
    for steps in rows:
        scored = [step for step in steps if step.parsed.failure is None]
        spans.append([_span(step) for step in scored])
        branches.append([branch for step in scored for branch in _branches(step)])
    return object_array(branches), object_array(spans)


def _span(step: RowStep) -> Span:
    """Return the span of the turn's action in the row."""
    level, (first, last) = step.parsed.scored
    return Span(step.start + first, step.start + last, step=step.step, label=level)


def _branches(step: RowStep) -> list[Branch]:
    """Return the branches of the same action tokens after each alternative thought."""
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
    """Build the table of turns and levels from the scores of branches and spans."""
    entries: list[dict[int, SegmentScore]] = []
    for row, own, others in zip(rows, span_scores, branch_scores, strict=True):
        by_step: dict[int, dict[int, SegmentScore]] = {}
        for answer in (*own, *others):
            by_step.setdefault(answer.step, {})[answer.label] = answer
        # No score was requested for an unparsed turn: it has no valid context.
        entries.extend(by_step.get(step.step, {}) for step in row)
    steps = [step for row in rows for step in row]
    shape = (len(steps), len(LEVELS))
    table = ScoredSteps(
        row=[number for number, row in enumerate(rows) for _ in row],
        steps=steps,
        entries=entries,
        # Float64, because advantages are differences of nearly equal scores.
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
    """Return ``rlvcr/*`` of one batch: scores of sampled thoughts, valid contexts, dropped
    thoughts.

    ``advantage`` [S]. An expanded turn is one with requested alternatives, even if all were
    dropped.
    """
    expanded = [s for s, step in enumerate(table.steps) if step.alternatives is not None]
    asked_for = [step.alternatives for step in table.steps if step.alternatives is not None]
    dropped: Counter[str] = Counter()
    for alternatives in asked_for:
        dropped.update(alternatives.dropped)
    # Shares of all sampled thoughts, dropped ones included. Level 1 is not sampled.
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
    """Return the scores of the action after the thought that was sampled with it, of every parsed
    turn.
    """
    found = []
    for step, entries in zip(table.steps, table.entries, strict=True):
        if entries:
            level, _ = step.parsed.scored
            found.append(entries[level])
    return found
