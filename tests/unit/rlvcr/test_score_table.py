"""Scoring requests for turns and the table of their scores, by hand: no model, no tokenizer."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import AlternativeThought, ParsedTurn, ParseFailure
from rlvcr.score_table import (
    RowTurn,
    build_score_requests,
    build_score_table,
    compute_scoring_metrics,
)
from verl.records import BranchRequest, ScoreResult, SpanRequest


def parsed(level: int = 3, thought: tuple[int, int] = (3, 5)) -> ParsedTurn:
    """Return a turn with tokens 0 tag, 1 digit, 2 tag, 3-4 thought, 5 tag, 6-7 action, 8 start of
    the closing tag.
    """
    return ParsedTurn(level, (1, 2), thought, (6, 8), (6, 9), "own", "look", "tags", None)


UNPARSED = ParsedTurn(None, None, None, None, None, "", "", "tags", next(iter(ParseFailure)))
TWO = AlternativeThought(2, [70, 71, 72, 73, 74], (1, 4), "see")
ONE = AlternativeThought(1, [80, 81], (1, 1), "")
TOKENS = list(range(30, 40))


def score(step: int, level: int, logprob: float, entropy: float = 0.0) -> ScoreResult:
    return ScoreResult(step, level, logprob, entropy, 0.5, math.exp(logprob), 3)


@pytest.mark.parametrize(
    ("forced", "spans"),
    [(0, [(11, 12), (13, 15)]), (1, [(11, 12), (13, 15)]), (3, [(13, 15)]), (4, [])],
)
def test_forced_tokens_have_no_credit(forced, spans):
    turn = RowTurn(0, 0, TOKENS, parsed(), num_forced_tokens=forced)
    assert turn.credit_spans(10) == spans


@pytest.mark.parametrize(("forced", "spans"), [(0, [(11, 12), (13, 16)]), (3, [(13, 16)])])
def test_credit_includes_the_end_of_the_thought_on_request(forced, spans):
    turn = RowTurn(
        0, 0, TOKENS, replace(parsed(), thought_end_span=(5, 6)), num_forced_tokens=forced
    )
    assert turn.credit_spans(10, includes_thought_end=True) == spans


def test_thoughts_by_level_hold_the_original_and_alternatives():
    alternatives = TurnAlternativeThoughts([ONE, TWO])
    turn = RowTurn(0, 0, TOKENS, parsed(), alternatives)
    assert turn.thoughts_by_level() == {3: ("own", 2), 1: ("", 0), 2: ("see", 3)}
    assert RowTurn(0, 0, TOKENS, parsed()).thoughts_by_level() == {3: ("own", 2)}
    assert RowTurn(0, 0, TOKENS, UNPARSED).thoughts_by_level() == {}


def test_turn_is_scored_in_its_row_and_after_each_alternative():
    turn = RowTurn(4, 20, TOKENS, parsed(), TurnAlternativeThoughts([ONE, TWO]))
    branches, spans = build_score_requests([[], [RowTurn(3, 5, TOKENS, UNPARSED), turn]])
    assert list(spans) == [[], [SpanRequest(26, 29, step=4, label=3)]]
    assert list(branches) == [
        [],
        [
            BranchRequest(20, [80, 81, 36, 37, 38], target_start=2, step=4, label=1),
            BranchRequest(20, [70, 71, 72, 73, 74, 36, 37, 38], target_start=5, step=4, label=2),
        ],
    ]


def test_table_has_a_line_per_turn_and_a_column_per_level():
    """Row 0 has a turn with two alternatives and an unparsed one, row 1 no turn, row 2 a turn
    alone.
    """
    expanded = RowTurn(0, 5, TOKENS, parsed(), TurnAlternativeThoughts([ONE, TWO]))
    rows = [
        [expanded, RowTurn(1, 15, TOKENS, UNPARSED)],
        [],
        [RowTurn(0, 5, TOKENS, parsed(4, (3, 3)))],
    ]
    span_scores = [[score(0, 3, -0.25)], [], [score(0, 4, -3.0)]]
    branch_scores = [[score(0, 1, -1.0), score(0, 2, -2.0)], [], []]
    table = build_score_table(rows, branch_scores, span_scores, "logprob")
    assert table.row_indices == [0, 0, 2] and table.chosen_columns.tolist() == [2, -1, 3]
    assert [turn.turn_index for turn in table.turns] == [0, 1, 0]
    assert table.scores.tolist() == [[-1.0, -2.0, -0.25, 0], [0] * 4, [0, 0, 0, -3.0]]
    assert table.is_valid.tolist() == [[True, True, True, False], [False] * 4, [False] * 3 + [True]]
    assert table.thought_tokens.tolist() == [[0, 3, 2, 0], [0] * 4, [0] * 4]
    assert [sorted(levels) for levels in table.level_scores_by_turn] == [[1, 2, 3], [], [4]]
    assert table.scores.dtype == table.thought_tokens.dtype == torch.float64, (
        "differences may be tiny"
    )
    assert table.is_valid.dtype == torch.bool and table.chosen_columns.dtype == torch.long
    entropies = build_score_table([[rows[2][0]]], [[]], [[score(0, 4, -3.0, 0.75)]], "entropy")
    # A higher score is better, so entropy is negated.
    assert entropies.scores.abs().tolist() == [[0, 0, 0, 0.75]]


def test_metrics_of_scores_and_dropped_thoughts():
    """One turn has two thoughts and one cut, another has one thought and two failed requests."""
    first = TurnAlternativeThoughts(
        [ONE, TWO], Counter(length=1), sampled_tokens=7, num_requested=2
    )
    second = TurnAlternativeThoughts([ONE], Counter(engine=2), sampled_tokens=4, num_requested=2)
    rows = [
        [
            RowTurn(0, 5, TOKENS, parsed(), first),
            RowTurn(1, 15, TOKENS, UNPARSED),
            RowTurn(2, 25, TOKENS, parsed(), second),
            RowTurn(3, 35, TOKENS, parsed()),
        ]
    ]
    span_scores = [score(0, 3, -1.0, 0.5), score(2, 3, -2.0, 1.0), score(3, 3, -6.0, 1.5)]
    branch_scores = [score(0, 1, -1.0), score(0, 2, -1.0), score(2, 1, -1.0)]
    table = build_score_table(rows, [branch_scores], [span_scores], "logprob")
    advantage = torch.tensor([0.5, 8.0, -1.0, 8.0])
    assert compute_scoring_metrics(table, advantage) == {
        "rlvcr/expanded_steps": 2.0,
        "rlvcr/alternative_tokens": 11.0,
        # One thought was sampled and three were dropped; the two of level 1 need no sampling.
        "rlvcr/dropped_length": pytest.approx(1 / 4),
        "rlvcr/dropped_engine": pytest.approx(2 / 4),
        "rlvcr/score_logprob": -3.0,
        "rlvcr/score_entropy": 1.0,
        "rlvcr/valid_contexts_mean": 2.5,
        "rlvcr/advantage_abs_mean": 0.75,
    }


def test_metrics_of_a_batch_without_parsed_turns():
    table = build_score_table([[RowTurn(0, 5, TOKENS, UNPARSED)]], [[]], [[]], "logprob")
    assert compute_scoring_metrics(table, torch.zeros(1)) == {
        "rlvcr/expanded_steps": 0.0,
        "rlvcr/alternative_tokens": 0.0,
    }


def test_credit_ends_with_the_thought_by_default():
    turn = RowTurn(0, 0, TOKENS, replace(parsed(), thought_end_span=(5, 6)))
    assert turn.credit_spans(10) == [(11, 12), (13, 15)]
