"""From scores, prices and returns to advantages, against a second implementation in plain numbers.
Every key of the credit is changed once, and both must give the same advantages.

There are seven rows of six trajectories in two groups. The first trajectory has two rows, so that
statistics over rows differ from those over trajectories. One turn was cut in its thought.
"""

import math
from statistics import mean, pstdev, stdev
from typing import Any

import numpy as np
import pytest
import torch

from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import AlternativeThought, ParsedTurn, ParseFailure
from rlvcr.records import ThinkingTurnRecord
from rlvcr.score_table import RowTurn
from tests.helpers.number_line_world import make_config
from tests.helpers.thinking_trajectories import score_rows
from verl.protocol import DataProto, object_array
from verl.records import ScoreResult
from verl.trainer.ppo.credit import compute_advantage

PROMPT, RESPONSE = 2, 14
TRAJECTORIES = ["a0", "a0", "a1", "a2", "b0", "b1", "b2"]
GROUPS = ["a", "a", "a", "a", "b", "b", "b"]
RETURNS = {"a0": 1.0, "a1": 0.3, "a2": 0.0, "b0": 1.0, "b1": 1.0, "b2": 0.4}
WON = {"a0": True, "a1": False, "a2": False, "b0": True, "b1": True, "b2": False}
CHOSEN = [3, 2, 4, 1, 2, 2, 1]
THOUGHT = [3, 2, 5, 0, 1, 4, 2]  # tokens of the row's own thought
OTHERS = {1: 0, 2: 2, 3: 6, 4: 9}  # tokens of the thought at other levels
CUT = 2  # the row whose turn was cut in its thought
DRAW = np.random.default_rng(2)
LOGPROB = DRAW.uniform(-1.5, -0.1, (7, 4))
ENTROPY = DRAW.uniform(0.1, 1.5, (7, 4))
PROB = DRAW.uniform(0.1, 0.9, (7, 4))
BASE = {
    "score": "logprob",
    "mode": "mean_std_norm",
    "combine": "success",
    "step_advantage_w": 0.7,
    "cost_coef": 0.4,
    "cost_max": 5,
    "price_in": "all",
    "std_floor": 0.3,
    "spread_floor": 0.02,
    "credit_end": False,
    "level_bonus_w": 0.2,
    "alternatives": "all",
    "thinking_diversity_w": 0.01,
}
CHANGES: list[tuple[str, dict[str, Any]]] = [
    ("score", {"score": "entropy"}),
    ("score", {"score": "prob"}),
    ("mode", {"mode": "mean_norm"}),
    ("combine", {"combine": "additive"}),
    ("combine", {"combine": "gated"}),
    ("combine", {"combine": "reweight"}),
    ("step_advantage_w", {"step_advantage_w": 2.0}),
    ("cost_coef", {"cost_coef": 1.1}),
    ("cost_max", {"cost_max": 3}),
    ("price_in", {"price_in": "won"}),
    ("price_in", {"price_in": "gate", "combine": "gated"}),
    ("std_floor", {"std_floor": 2.0}),
    ("spread_floor", {"spread_floor": 3.0, "combine": "reweight"}),
    ("credit_end", {"credit_end": True}),
    ("level_bonus_w", {"level_bonus_w": 0.9}),
    ("alternatives", {"alternatives": "one", "mode": "mean_norm"}),
]


def scored_levels(row: int, s: dict[str, Any]) -> list[int]:
    """Return the levels at which a row's turn was scored."""
    if row == CUT:
        return []
    if s["alternatives"] == "one":
        return sorted({CHOSEN[row], 1 + CHOSEN[row] % 4})
    return [1, 2, 3, 4]


# ------------------------------------------------------------------ the second implementation


def priced(row: int, level: int, s: dict[str, Any]) -> float:
    tokens = THOUGHT[row] if level == CHOSEN[row] else OTHERS[level]
    if s["price_in"] == "won" and not WON[TRAJECTORIES[row]]:
        return 0.0
    return s["cost_coef"] * min(tokens, s["cost_max"]) / s["cost_max"]


def thought_credit(row: int, s: dict[str, Any]) -> tuple[float, float, float]:
    """Return the advantage of the row's thought, its part by price, and its factor."""
    levels = scored_levels(row, s)
    if not levels:
        return 0.0, 0.0, 1.0
    scores = {"logprob": LOGPROB, "entropy": -ENTROPY, "prob": PROB}[s["score"]][row]
    price = {level: priced(row, level, s) for level in levels}
    utilities = {level: scores[level - 1] - price[level] for level in levels}
    chosen = CHOSEN[row]
    if s["alternatives"] == "one":
        (other,) = set(levels) - {chosen}
        return (
            0.75 * (utilities[chosen] - utilities[other]),
            0.75 * (price[other] - price[chosen]),
            1.0,
        )
    divisor = (
        max(pstdev(utilities.values()), s["std_floor"]) if s["mode"] == "mean_std_norm" else 1.0
    )
    low, high = min(utilities.values()), max(utilities.values())
    scaled = {k: (v - low) / max(high - low, s["spread_floor"]) for k, v in utilities.items()}
    factor = math.exp(2 * scaled[chosen]) / mean(math.exp(2 * x) for x in scaled.values())
    advantage = (utilities[chosen] - mean(utilities.values())) / divisor
    return advantage, (mean(price.values()) - price[chosen]) / divisor, factor


def trajectory_advantage(row: int, s: dict[str, Any]) -> float:
    """Compare the return with those of the group, counting each trajectory once."""
    group = [value for name, value in RETURNS.items() if name[0] == GROUPS[row]]
    centred = RETURNS[TRAJECTORIES[row]] - mean(group)
    return centred / (stdev(group) + 1e-6) if s["mode"] == "mean_std_norm" else centred


def bonus(row: int, s: dict[str, Any]) -> float:
    rows = [r for r in range(7) if GROUPS[r] == GROUPS[row] and r != CUT]
    if row == CUT:
        return 0.0
    surprise = {r: -math.log(sum(CHOSEN[o] == CHOSEN[r] for o in rows) / len(rows)) for r in rows}
    return s["level_bonus_w"] * (surprise[row] - mean(surprise.values()))


def expected(s: dict[str, Any]) -> torch.Tensor:
    """Return the expected advantages, [7, R]."""
    result = torch.zeros(7, RESPONSE)
    for row in range(7):
        a = trajectory_advantage(row, s)
        length = response_tokens(row)
        result[row, :length] = a
        advantage, price, factor = thought_credit(row, s)
        gate = 1.0
        if s["combine"] == "gated":
            gate = float(np.sign(a))
        elif s["combine"] == "success":
            gate = float(WON[TRAJECTORIES[row]])
        added = gate * advantage
        if s["price_in"] != "gate":
            added += (1 - gate) * price
        value = a * factor if s["combine"] == "reweight" else a + s["step_advantage_w"] * added
        value += bonus(row, s)
        for position in credited_positions(row, s):
            result[row, position] = value
    return result


def credited_positions(row: int, s: dict[str, Any]) -> list[int]:
    """Return the positions of digit, thought and, on request, the token that ended the thought."""
    end = 3 + THOUGHT[row] + s["credit_end"]
    return [1, *range(3, end)] if row != CUT else []


def response_tokens(row: int) -> int:
    """Count ``<level> digit tag thought``, then ``</think> a action </action>`` unless cut."""
    return 3 + THOUGHT[row] + (0 if row == CUT else 4)


# ------------------------------------------------------------------ the product code


def row_turn(row: int, s: dict[str, Any]) -> RowTurn:
    end = 3 + THOUGHT[row]
    parsed = ParsedTurn(
        CHOSEN[row], (1, 2), (3, end), (end + 1, end + 3), (end + 1, end + 4),
        "own", "go", "strict", None, thought_end_span=(end, end + 1),
    )  # fmt: skip
    if row == CUT:
        parsed = ParsedTurn(
            CHOSEN[row], (1, 2), None, None, None, "", "", "level_only",
            ParseFailure.MISSING_ACTION,
        )  # fmt: skip
    alternative_thoughts = [
        AlternativeThought(level, [9] * (OTHERS[level] + 3), (2, 2 + OTHERS[level]), "other")
        for level in scored_levels(row, s)
        if level != CHOSEN[row]
    ]
    alternatives = TurnAlternativeThoughts(alternative_thoughts) if alternative_thoughts else None
    return RowTurn(0, PROMPT, [9] * response_tokens(row), parsed, alternatives)


def score(row: int, level: int) -> ScoreResult:
    at = row, level - 1
    return ScoreResult(0, level, LOGPROB[at], ENTROPY[at], 0.5, PROB[at], 3)


def advantages(s: dict[str, Any], **changes: Any) -> torch.Tensor:
    config: Any = make_config()
    config.algorithm.adv_estimator = changes.get("adv_estimator", "rlvcr")
    for key, value in (s | changes).items():
        if key != "adv_estimator":
            setattr(config.algorithm.rlvcr, key, value)
    attention = torch.zeros(7, PROMPT + RESPONSE, dtype=torch.long)
    rewards = torch.zeros(7, RESPONSE)
    for row in range(7):
        attention[row, : PROMPT + response_tokens(row)] = 1
        rewards[row, response_tokens(row) - 1] = RETURNS[TRAJECTORIES[row]]
    ids = torch.zeros(7, PROMPT + RESPONSE, dtype=torch.long)
    tensors = {
        "input_ids": ids,
        "attention_mask": attention,
        "position_ids": ids,
        "responses": ids[:, PROMPT:],
        "response_mask": attention[:, PROMPT:],
        "token_level_rewards": rewards,
    }
    record = ThinkingTurnRecord(0, "seen", "said", "go", True, 0.0, False, 9, "stop", (0, 9))
    columns = {
        "uid": GROUPS,
        "traj_uid": TRAJECTORIES,
        "won": object_array([WON[name] for name in TRAJECTORIES]),
        "episode_rewards": np.array([RETURNS[name] for name in TRAJECTORIES]),
        "steps": object_array([[record] for _ in range(7)]),
    }
    data = DataProto.from_dict(tensors, columns)

    def answer(_: DataProto) -> DataProto:
        span_scores = [[score(r, CHOSEN[r])] if scored_levels(r, s) else [] for r in range(7)]
        branch_scores = [
            [score(r, k) for k in scored_levels(r, s) if k != CHOSEN[r]] for r in range(7)
        ]
        scores = {
            "span_scores": object_array(span_scores),
            "branch_scores": object_array(branch_scores),
        }
        zeros = torch.zeros(7, RESPONSE)
        return DataProto.from_dict({"old_log_probs": zeros, "entropys": zeros.clone()}, scores)

    codec: Any = type("Codec", (), {"digit_ids": (1, 2, 3, 4)})
    data = score_rows(data, [[row_turn(row, s)] for row in range(7)], answer, config, codec)
    assert data.meta_info["choice"].weight == s["thinking_diversity_w"]
    return compute_advantage(data, config).batch["advantages"]


# ------------------------------------------------------------------ comparisons


@pytest.mark.parametrize(("key", "change"), [("", {}), *CHANGES])
def test_every_key_changes_the_advantages_as_expected(key, change):
    settings = BASE | change
    with_change = expected(settings)
    torch.testing.assert_close(advantages(settings), with_change, atol=2e-6, rtol=1e-5)
    if key:
        without_change = expected(settings | {key: BASE[key]})
        assert (without_change - with_change).abs().max() > 1e-3


def test_copo_multiplies_only_positive_advantages():
    actual = advantages(BASE, adv_estimator="copo", level_bonus_w=0.0)
    for row in range(7):
        a, factor = (
            trajectory_advantage(row, BASE),
            thought_credit(row, BASE)[2] if row != CUT else 1.0,
        )
        expected_row = torch.zeros(RESPONSE)
        expected_row[: response_tokens(row)] = a
        for position in credited_positions(row, BASE):
            expected_row[position] = a * factor if a > 0 else a
        torch.testing.assert_close(actual[row], expected_row, atol=2e-6, rtol=1e-5)


def test_permuted_credit_comes_from_other_rows():
    """Credit is permuted among the compared rows, separately for success and failure."""
    mixed = BASE | {"combine": "additive", "level_bonus_w": 0.0}
    unpermuted, actual = expected(mixed), advantages(mixed, permute=True)
    assert (actual - unpermuted).abs().max() > 1e-3
    for won in (True, False):
        rows = [r for r in range(7) if WON[TRAJECTORIES[r]] == won and r != CUT]
        permuted_credit = [float(actual[r, 1] - trajectory_advantage(r, mixed)) for r in rows]
        unpermuted_credit = [float(unpermuted[r, 1] - trajectory_advantage(r, mixed)) for r in rows]
        assert sorted(permuted_credit) == pytest.approx(sorted(unpermuted_credit), abs=1e-5)
