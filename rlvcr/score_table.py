"""Requests to score the actions of turns, and the table of the scores with one line per turn.

A score is the negative entropy, log-prob or probability of the action's tokens after the thought of
one thinking level. S is the number of turns of all rows; level k is column k - 1. A request with
label k asks for the score of the action after a thought of level k. A request with label
``DIGIT_LABEL_OFFSET + k`` asks for the log-prob of level digit k. Only ``credit=posterior`` makes
such requests: it needs the probability of each level given the action.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import LEVELS, ParsedTurn
from rlvcr.thinking import compute_action_score
from verl.protocol import object_array
from verl.records import BranchRequest, ScoreResult, SpanRequest

DIGIT_LABEL_OFFSET = 10  # label of a request that scores level digit k: DIGIT_LABEL_OFFSET + k


@dataclass(frozen=True, slots=True)
class RowTurn:
    """Turn of a row: its tokens, their parts and its alternative thoughts.

    ``turn_index`` counts from 0 in the episode. ``token_ids`` begin at unpadded index
    ``start_in_row`` of the row. ``parsed`` locates level, thought and action in ``token_ids``.
    ``alternatives`` is None if no alternative thoughts were requested. If the thinking level was
    forced, the first ``num_forced_tokens`` tokens were not sampled.
    """

    turn_index: int
    start_in_row: int
    token_ids: Sequence[int]
    parsed: ParsedTurn
    alternatives: TurnAlternativeThoughts | None = None
    num_forced_tokens: int = 0

    @property
    def has_sampled_level(self) -> bool:
        """True if the policy chose the thinking level, and the turn could be parsed."""
        return not self.num_forced_tokens and self.parsed.level_span is not None

    @property
    def has_level_alternatives(self) -> bool:
        """True if the policy chose the level, and thoughts at other levels were requested."""
        return self.has_sampled_level and self.alternatives is not None

    def digit_spans(self, offset: int) -> list[tuple[int, int]]:
        """Return the token range of the sampled level digit, plus ``offset``, in a list.

        The list is empty if the level was forced or the turn could not be parsed.
        """
        # The level digit is the first range of a turn whose level was not forced.
        return self.credit_spans(offset)[:1] if self.has_sampled_level else []

    @property
    def digit_position(self) -> int:
        """Index in ``token_ids`` of the level digit. Raises ``ValueError`` if there is no digit."""
        if self.parsed.level_span is None:
            raise ValueError(f"turn {self.turn_index} has no level digit")
        return self.parsed.level_span[0]

    def credit_spans(
        self, offset: int, includes_thought_end: bool = False
    ) -> list[tuple[int, int]]:
        """Return the ranges of ``ParsedTurn.credit_spans`` without forced tokens."""
        spans = self.parsed.credit_spans(offset, includes_thought_end)
        return [(start, end) for start, end in spans if start >= offset + self.num_forced_tokens]

    def thoughts_by_level(self) -> dict[int, tuple[str, int]]:
        """Return text and token count of the turn's thoughts, by thinking level."""
        thoughts: dict[int, tuple[str, int]] = {}
        if self.parsed.level is not None:
            thoughts[self.parsed.level] = (self.parsed.thought, self.parsed.thought_tokens)
        if self.alternatives is not None:
            for thought in self.alternatives.thoughts:
                thoughts[thought.level] = (thought.thought, thought.thought_tokens)
        return thoughts


@dataclass(slots=True)
class ScoredTurns:
    """Scores of the actions of all S turns of a batch, with one column per thinking level.

    ``scores`` [S, 4] are negative entropies, log-probs or probabilities of the action after the
    thought of each level. ``row_indices[s]`` is the row of turn s, ``level_scores_by_turn[s]`` has
    its log-probs and entropies by level. ``is_valid`` [S, 4] is true if the level has a scored
    thought. ``thought_tokens`` [S, 4] are numbers of tokens. ``chosen_columns`` [S] are the columns
    of the chosen levels, -1 for an unparsed turn. ``action_log_probs`` [S, 4] are sums over the
    action's tokens. ``level_log_probs`` [S, 4] are log-probs of the level digits, 0 if they were
    not requested.
    """

    row_indices: list[int]
    turns: list[RowTurn]
    level_scores_by_turn: list[dict[int, ScoreResult]]
    scores: torch.Tensor
    is_valid: torch.Tensor
    thought_tokens: torch.Tensor
    chosen_columns: torch.Tensor
    action_log_probs: torch.Tensor
    level_log_probs: torch.Tensor


def flatten_turns(rows: Sequence[Sequence[RowTurn]]) -> tuple[list[int], list[RowTurn]]:
    """Return the row index of each of the S turns, and the turns, row by row."""
    turns = [(row_index, turn) for row_index, row in enumerate(rows) for turn in row]
    return [row_index for row_index, _ in turns], [turn for _, turn in turns]


def build_score_requests(
    rows: Sequence[Sequence[RowTurn]], digit_ids: Sequence[int] = ()
) -> tuple[np.ndarray, np.ndarray]:
    """Return requests to score the actions of all rows: the columns ``branches`` and ``spans`` [B].

    A span is the action of a turn in its row. A branch is the same action after an alternative
    thought. An unparsed turn has neither. ``digit_ids`` are the tokens of the four level digits.
    With them, a turn with alternative thoughts also gets a span for its digit and three branches
    for the other digits.
    """
    branches: list[list[BranchRequest]] = []
    spans: list[list[SpanRequest]] = []
    for row_turns in rows:
        parsed_turns = [turn for turn in row_turns if turn.parsed.failure is None]
        spans.append([_build_action_span(turn) for turn in parsed_turns])
        branches.append(
            [branch for turn in parsed_turns for branch in _build_thought_branches(turn)]
        )
        for turn in parsed_turns if digit_ids else []:
            if turn.has_level_alternatives:
                spans[-1].append(_build_digit_span(turn))
                branches[-1] += _build_digit_branches(turn, digit_ids)
    return object_array(branches), object_array(spans)


def _build_action_span(turn: RowTurn) -> SpanRequest:
    level, (action_start, action_end) = turn.parsed.level_and_scored_span
    start, end = turn.start_in_row + action_start, turn.start_in_row + action_end
    return SpanRequest(start, end, step=turn.turn_index, label=level)


def _build_thought_branches(turn: RowTurn) -> list[BranchRequest]:
    """Return one branch (request to score an action) per alternative thought of ``turn``.

    It contains the thought, followed by the action of the turn, whose tokens are scored.
    """
    if turn.alternatives is None:
        return []
    _, (action_start, action_end) = turn.parsed.level_and_scored_span
    action_ids = [int(token) for token in turn.token_ids[action_start:action_end]]
    return [
        BranchRequest(
            turn.start_in_row,
            [*thought.token_ids, *action_ids],
            target_start=len(thought.token_ids),
            step=turn.turn_index,
            label=thought.level,
        )
        for thought in turn.alternatives.thoughts
    ]


def _build_digit_span(turn: RowTurn) -> SpanRequest:
    level, _ = turn.parsed.level_and_scored_span
    start = turn.start_in_row + turn.digit_position
    return SpanRequest(start, start + 1, step=turn.turn_index, label=DIGIT_LABEL_OFFSET + level)


def _build_digit_branches(turn: RowTurn, digit_ids: Sequence[int]) -> list[BranchRequest]:
    """Return requests (branches) for the log-prob of each level digit that was not sampled."""
    start = turn.start_in_row + turn.digit_position
    return [
        BranchRequest(start, [digit_ids[level - 1]], 0, turn.turn_index, DIGIT_LABEL_OFFSET + level)
        for level in LEVELS
        if level != turn.parsed.level
    ]


def build_score_table(
    rows: Sequence[Sequence[RowTurn]],
    branch_scores: Sequence[Sequence[ScoreResult]],
    span_scores: Sequence[Sequence[ScoreResult]],
    score: str,
) -> ScoredTurns:
    """Build the table of the scores of actions, with one line per turn and one column per level.

    ``span_scores`` are of actions after the sampled thoughts. ``branch_scores`` are of the same
    actions after alternative thoughts (sampled at other thinking levels). ``score`` is the value of
    ``algorithm.rlvcr.score``.
    """
    label_scores_by_turn: list[dict[int, ScoreResult]] = []
    for row, row_span_scores, row_branch_scores in zip(
        rows, span_scores, branch_scores, strict=True
    ):
        scores_by_turn: dict[int, dict[int, ScoreResult]] = {}
        for segment_score in (*row_span_scores, *row_branch_scores):
            scores_by_turn.setdefault(segment_score.step, {})[segment_score.label] = segment_score
        # No score was requested for an unparsed turn, so its dict is empty.
        label_scores_by_turn.extend(scores_by_turn.get(turn.turn_index, {}) for turn in row)
    row_indices, turns = flatten_turns(rows)
    shape = (len(turns), len(LEVELS))
    # Single elements are set in arrays, because setting them in tensors is many times slower.
    scores, thought_tokens, action_log_probs, level_log_probs = np.zeros((4, *shape))
    is_valid = np.zeros(shape, dtype=bool)
    chosen_columns = np.full(len(turns), -1)
    for turn_index, (turn, turn_scores) in enumerate(zip(turns, label_scores_by_turn, strict=True)):
        thoughts = turn.thoughts_by_level()
        for digit_label in [label for label in turn_scores if label > DIGIT_LABEL_OFFSET]:
            digit_score = turn_scores.pop(digit_label)
            level_log_probs[turn_index, digit_label - DIGIT_LABEL_OFFSET - 1] = digit_score.logprob
        for level, segment_score in turn_scores.items():
            table_index = turn_index, level - 1
            action_log_probs[table_index] = segment_score.logprob * segment_score.num_tokens
            scores[table_index] = compute_action_score(segment_score, score)
            is_valid[table_index] = True
            _, thought_tokens[table_index] = thoughts[level]
        if turn.parsed.failure is None:
            level, _ = turn.parsed.level_and_scored_span
            chosen_columns[turn_index] = level - 1
    return ScoredTurns(
        row_indices=row_indices,
        turns=turns,
        level_scores_by_turn=label_scores_by_turn,
        # Float64, because advantages are differences of nearly equal scores.
        scores=torch.from_numpy(scores),
        is_valid=torch.from_numpy(is_valid),
        thought_tokens=torch.from_numpy(thought_tokens),
        chosen_columns=torch.from_numpy(chosen_columns),
        action_log_probs=torch.from_numpy(action_log_probs),
        level_log_probs=torch.from_numpy(level_log_probs),
    )


def compute_scoring_metrics(table: ScoredTurns, advantage: torch.Tensor) -> dict[str, float]:
    """Return metrics ``rlvcr/*`` of the scores of actions and of alternative thoughts of a batch.

    ``rlvcr/expanded_steps`` counts the turns for which alternative thoughts were requested, even if
    all were dropped. ``advantage`` [S] is the thinking advantage of each turn.
    """
    indices_with_alternatives = [
        s for s, turn in enumerate(table.turns) if turn.alternatives is not None
    ]
    requested_alternatives = [
        turn.alternatives for turn in table.turns if turn.alternatives is not None
    ]
    drop_counts: Counter[str] = Counter()
    for alternatives in requested_alternatives:
        drop_counts.update(alternatives.dropped)
    num_requested = sum(alternatives.num_requested for alternatives in requested_alternatives)
    metrics = {
        "rlvcr/expanded_steps": float(len(indices_with_alternatives)),
        "rlvcr/alternative_tokens": float(
            sum(alternatives.sampled_tokens for alternatives in requested_alternatives)
        ),
    }
    for reason, count in sorted(drop_counts.items()):
        metrics[f"rlvcr/dropped_{reason}"] = count / num_requested
    sampled_scores = [
        level_scores[turn.parsed.level_and_scored_span[0]]
        for turn, level_scores in zip(table.turns, table.level_scores_by_turn, strict=True)
        if level_scores
    ]
    if sampled_scores:
        metrics["rlvcr/score_logprob"] = float(
            np.mean([turn_score.logprob for turn_score in sampled_scores])
        )
        metrics["rlvcr/score_entropy"] = float(
            np.mean([turn_score.entropy for turn_score in sampled_scores])
        )
    if indices_with_alternatives:
        metrics["rlvcr/valid_contexts_mean"] = (
            table.is_valid[indices_with_alternatives].sum(-1).float().mean().item()
        )
        metrics["rlvcr/advantage_abs_mean"] = (
            advantage[indices_with_alternatives].abs().mean().item()
        )
    return metrics
