"""Credit of three rows with the turns A to E, computed by hand from given scores.

row  success  turn  first token  own level  scored levels
0    yes      A     3            3          1, 2, 3
1    no       B     4            unparsed   none
              C     7            3, forced  1, 3
2    yes      D     4            4          4
              E     13           3          3
"""

import math
from collections import Counter
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlvcr import scoring
from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import AlternativeThought, ParsedTurn, ParseFailure
from rlvcr.records import ThinkingTurnRecord
from rlvcr.score_table import RowTurn
from rlvcr.scoring import add_level_entropy_bonus, add_score_requests
from rlvcr.settings import get_rlvcr_settings
from tests.helpers.number_line_world import make_config
from tests.helpers.thinking_trajectories import score_rows
from verl.protocol import DataProto, object_array
from verl.records import RestrictedTokenLoss, ScoreResult
from verl.utils.seeds import derive_seed

PROMPT = 4
RESPONSE = 18
REAL_LENGTHS = ((3, 9), (4, 12), (4, 18))
CODEC: Any = SimpleNamespace(digit_ids=[21, 22, 23, 24])
UNPARSED = ParsedTurn(None, None, None, None, None, "", "", "tags", next(iter(ParseFailure)))
ONE = AlternativeThought(1, [80, 81], (1, 1), "")
TWO = AlternativeThought(2, [70, 71, 72, 73, 74], (1, 4), "see")


def parsed(level: int) -> ParsedTurn:
    """Return a turn of nine tokens: the digit is 1, the thought 3 and 4, the action 6 and 7."""
    return ParsedTurn(level, (1, 2), (3, 5), (6, 8), (6, 9), "own", "look", "tags", None)


def row_turns() -> list[list[RowTurn]]:
    tokens = list(range(30, 39))
    cut = TurnAlternativeThoughts([ONE], Counter(length=1), num_requested=1)
    return [
        [RowTurn(0, 3, tokens, parsed(3), TurnAlternativeThoughts([ONE, TWO], num_requested=1))],
        [
            RowTurn(0, 4, tokens[:3], UNPARSED),
            RowTurn(1, 7, tokens, parsed(3), cut, num_forced_tokens=3),
        ],
        [RowTurn(0, 4, tokens, parsed(4)), RowTurn(1, 13, tokens, parsed(3))],
    ]


def record(step: int) -> ThinkingTurnRecord:
    return ThinkingTurnRecord(step, "seen", "said", "look", True, 0.0, False, 9, "stop", (0, 9))


def rows() -> DataProto:
    attention = torch.zeros(3, PROMPT + RESPONSE, dtype=torch.long)
    for row, (prompt, response) in enumerate(REAL_LENGTHS):
        attention[row, PROMPT - prompt : PROMPT + response] = 1
    tensors = {
        "prompts": torch.zeros(3, PROMPT, dtype=torch.long),
        "responses": torch.zeros(3, RESPONSE, dtype=torch.long),
        "input_ids": torch.zeros(3, PROMPT + RESPONSE, dtype=torch.long),
        "attention_mask": attention,
        "position_ids": torch.zeros(3, PROMPT + RESPONSE, dtype=torch.long),
        "response_mask": attention[:, PROMPT:],
    }
    columns = {
        "uid": ["g", "g", "g"],
        "traj_uid": ["a", "b", "c"],
        "won": object_array([True, False, True]),
        "steps": object_array([[record(0)], [record(0), record(1)], [record(0), record(1)]]),
    }
    return DataProto.from_dict(tensors, columns, {"metrics": {"before": 1.0}})


def score(step: int, level: int, logprob: float) -> ScoreResult:
    return ScoreResult(step, level, logprob, 0.0, 0.5, math.exp(logprob), 3)


class Actor:
    """Stand-in for the actor that returns constant scores."""

    def __call__(self, _: DataProto) -> DataProto:
        span_scores = [
            [score(0, 3, -1.0)],
            [score(1, 3, -1.0)],
            [score(0, 4, -1.0), score(1, 3, -1.0)],
        ]
        branch_scores = [[score(0, 1, -2.0), score(0, 2, -3.0)], [score(1, 1, -3.0)], []]
        tensors = {
            "old_log_probs": torch.full((3, RESPONSE), -0.5),
            "entropys": torch.full((3, RESPONSE), 0.25),
        }
        columns = {
            "span_scores": object_array(span_scores),
            "branch_scores": object_array(branch_scores),
        }
        return DataProto.from_dict(tensors, columns)


def settings(**rlvcr: object) -> Any:
    config = make_config()
    config.algorithm.adv_estimator = "rlvcr"
    config.actor_rollout_ref.rollout.temperature = 0.75
    config.actor_rollout_ref.rollout.seed = 6
    defaults = {
        "score": "logprob",
        "mode": "mean_std_norm",
        "std_floor": 2.0,
        "spread_floor": 5.0,
        "cost_coef": 1.0,
        "cost_max": 4,
        "price_in": "won",
        "level_bonus_w": 2.0,
        "combine": "reweight",
        "thinking_diversity_w": 0.5,
    }
    for key, value in (defaults | rlvcr).items():
        setattr(get_rlvcr_settings(config.algorithm), key, value)
    return config


def place(*places: tuple[int, list[int], float]) -> torch.Tensor:
    """Return [3, R] with a value at positions of a row, for each of ``places``."""
    expected = torch.zeros(3, RESPONSE)
    for row, positions, value in places:
        expected[row, positions] = value
    return expected


# A thought token of A, a turn of a success, costs 1/4. The thoughts of levels 3, 1, 2 have 2, 0, 3
# tokens, so the utilities of A are -1.5, -2, -3.75. C has no price: utilities -1 and -3.
ADVANTAGE_A = (-1.5 - (-1.5 - 2 - 3.75) / 3) / 2.0
ADVANTAGE_C = (-1 - (-1 - 3) / 2) / 2.0
COST_A = ((0.5 + 0 + 0.75) / 3 - 0.5) / 2.0
A = [1, 3, 4]
C = [6, 7]  # the digit at 4 was forced
D = [1, 3, 4]
E = [10, 12, 13]


def test_credit_columns_by_hand(caplog):
    actor = Actor()
    data = rows()
    assert score_rows(data, row_turns(), actor, settings(), CODEC) is data
    batch = data.batch
    advantage = place((0, A, ADVANTAGE_A), (1, C, ADVANTAGE_C))
    torch.testing.assert_close(batch["thinking_level_entropies"], advantage)
    torch.testing.assert_close(batch["thinking_token_costs"], place((0, A, COST_A)))
    # Distances from the worst over 5: 2.25, 1.75, 0 for A, 2 and 0 for C.
    factor_a = math.exp(0.9) / ((math.exp(0.9) + math.exp(0.7) + 1) / 3)
    factor_c = math.exp(0.8) / ((math.exp(0.8) + 1) / 2)
    factors = place((0, A, factor_a), (1, C, factor_c), (2, D, 1.0), (2, E, 1.0))
    torch.testing.assert_close(batch["thinking_reweight"], factors)
    # The chosen levels are 3, 4 and 3: two thirds and one third.
    common = -math.log(2 / 3)
    rare = -math.log(1 / 3)
    mean = (2 * common + rare) / 3
    bonus = place(
        (0, A, 2 * (common - mean)), (2, D, 2 * (rare - mean)), (2, E, 2 * (common - mean))
    )
    torch.testing.assert_close(batch["thinking_level_bonus"], bonus)
    choices = place((0, [1], 1), (2, [1, 10], 1)).long()
    assert torch.equal(batch["choice_mask"], choices) and batch["choice_mask"].dtype == torch.long
    assert (batch["old_log_probs"] == -0.5).all() and (batch["entropys"] == 0.25).all()
    assert data.meta_info["choice"] == RestrictedTokenLoss((21, 22, 23, 24), 0.5, name="level")
    metrics = data.meta_info["metrics"]
    # Branches have 5 + 8 + 5 tokens, rows 12 + 16 + 22.
    assert metrics["before"] == 1.0 and metrics["rlvcr/branch_tokens_ratio"] == 18 / 50
    assert metrics["rlvcr/advantage_abs_mean"] == pytest.approx((ADVANTAGE_A + ADVANTAGE_C) / 2)
    assert metrics["rlvcr/dropped_length"] == 1 / 2  # one of the two sampled thoughts
    assert "rlvcr/dropped_length=0.50" in caplog.text


def test_score_requests_of_the_rows():
    data = rows()
    add_score_requests(data, row_turns())
    assert [len(branches) for branches in data.non_tensor_batch["branches"]] == [2, 1, 0]
    assert [len(spans) for spans in data.non_tensor_batch["spans"]] == [1, 1, 2]


def test_requests_and_scores_are_removed_after_scoring():
    before = set(rows().non_tensor_batch)
    data = score_rows(rows(), row_turns(), Actor(), settings(), CODEC)
    assert set(data.non_tensor_batch) == before


def test_records_hold_their_contexts_and_credit():
    data = rows()
    score_rows(data, row_turns(), Actor(), settings(), CODEC)
    (a,), (b, c), (d, e) = data.non_tensor_batch["steps"]
    contexts = [(k.level, k.thought, k.tokens, k.cost, k.original) for k in a.contexts]
    assert contexts == [
        (1, "", 0, 0.0, False),
        (2, "see", 3, 0.75, False),
        (3, "own", 2, 0.5, True),
    ]
    assert [context.scores.logprob for context in a.contexts] == [-2.0, -3.0, -1.0]
    assert (a.think_advantage, a.think_cost) == pytest.approx((ADVANTAGE_A, COST_A))
    assert (b.contexts, b.think_advantage, b.think_cost) == ((), 0.0, 0.0)
    assert [(k.level, k.cost) for k in c.contexts] == [(1, 0.0), (3, 0.0)]
    assert (c.think_advantage, c.think_cost) == pytest.approx((ADVANTAGE_C, 0.0))
    assert [k.level for k in (*d.contexts, *e.contexts)] == [4, 3]
    assert (d.step, e.step, e.think_advantage) == (0, 1, 0.0)


def test_price_of_a_failure_with_one_alternative():
    """C has a price of 0.5 for its thought, and gets three quarters of the difference."""
    data = rows()
    config = settings(price_in="all", alternatives="one", mode="mean_norm")
    score_rows(data, row_turns(), Actor(), config, CODEC)
    assert data.batch["thinking_level_entropies"][1, 6].item() == pytest.approx(0.75 * (-1.5 + 3))
    assert data.batch["thinking_token_costs"][1, 6].item() == pytest.approx(0.75 * -0.5)
    assert data.non_tensor_batch["steps"][1][1].contexts[1].cost == 0.5


@pytest.mark.parametrize(
    ("estimator", "combine", "columns"),
    [
        ("rlvcr", "additive", set()),
        ("copo", "additive", {"thinking_reweight"}),
        ("rlvcr", "reweight", {"thinking_reweight"}),
    ],
)
def test_only_columns_that_are_read_are_written(estimator, combine, columns):
    config = settings(combine=combine, level_bonus_w=0.0)
    config.algorithm.adv_estimator = estimator
    data = score_rows(rows(), row_turns(), Actor(), config, CODEC)
    always = {"thinking_level_entropies", "thinking_token_costs"}
    assert {key for key in data.tensor_keys() if key.startswith("thinking")} == always | columns


def test_permuted_credit_uses_a_seed_of_run_and_batch(monkeypatch):
    calls = []

    def reverse(credit: Any, _table: object, won: torch.Tensor, seed: int) -> Any:
        calls.append((won.tolist(), seed))
        return scoring._BatchCredit(*(values.flip(0) for values in credit[:3]))

    monkeypatch.setattr(scoring, "_permute_credit", reverse)
    data = score_rows(rows(), row_turns(), Actor(), settings(permute=True), CODEC)
    assert calls == [([True, False, False, True, True], derive_seed("permute", 6, "a"))]
    credit_of_rows = [
        [record.think_advantage for record in row] for row in data.non_tensor_batch["steps"]
    ]
    assert credit_of_rows == [
        [0.0],
        [0.0, pytest.approx(ADVANTAGE_C)],
        [0.0, pytest.approx(ADVANTAGE_A)],
    ]


@pytest.mark.parametrize(("credit_end", "credited"), [(False, [1, 3, 4]), (True, [1, 3, 4, 5])])
def test_credit_end_credits_the_token_that_ends_the_thought(credit_end, credited):
    turns = row_turns()
    turn = turns[0][0]
    turns[0][0] = replace(turn, parsed=replace(turn.parsed, thought_end_span=(5, 6)))
    data = score_rows(rows(), turns, Actor(), settings(credit_end=credit_end), CODEC)
    first = data.batch["thinking_level_entropies"][0]
    # Row 0 has a prompt of 3 tokens, so its turn begins with the response.
    assert first.nonzero().squeeze(-1).tolist() == credited
    assert first[credited].tolist() == pytest.approx([ADVANTAGE_A] * len(credited))


def test_metrics_are_created_if_missing():
    data = rows()
    del data.meta_info["metrics"]
    score_rows(data, row_turns(), Actor(), settings(), CODEC)
    assert data.meta_info["metrics"]["rlvcr/expanded_steps"] == 2.0


def test_level_entropy_bonus_needs_no_credit():
    data = rows()
    before = set(data.tensor_keys())
    add_level_entropy_bonus(data, row_turns(), get_rlvcr_settings(settings().algorithm), CODEC)
    assert set(data.tensor_keys()) - before == {"choice_mask"}
    assert torch.equal(data.batch["choice_mask"], place((0, [1], 1), (2, [1, 10], 1)).long())
    assert data.meta_info["choice"] == RestrictedTokenLoss((21, 22, 23, 24), 0.5, name="level")


@pytest.mark.parametrize(("share", "warned"), [(0.05, False), (0.0501, True), (None, False)])
def test_dropped_share_above_5_percent_is_warned_of(caplog, share, warned):
    scoring._warn_about_dropped_thoughts(
        {} if share is None else {scoring.DROPPED_LENGTH_METRIC: share}
    )
    assert bool(caplog.records) is warned
