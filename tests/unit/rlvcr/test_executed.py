"""Executed alternatives: which steps are tried again, what plays are worth, what is credited."""

import math
from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from rlvcr.executed import SHARE_OF_OTHERS, join_credit, level_to_try, worth
from rlvcr.levels import ParsedStep, ParseFailure
from verl.utils.seeds import derive_seed

NAN = math.nan


def parsed(level: int | None = 2, failure: ParseFailure | None = None) -> ParsedStep:
    return ParsedStep(level, (1, 2), (3, 5), (6, 8), (6, 9), "own", "look", "strict", failure)


def priced(price_in: str = "won") -> Any:
    return SimpleNamespace(price_in=price_in, cost_coef=0.4, cost_max=8)


def test_another_level_is_drawn_uniformly_at_a_share_of_the_steps():
    drawn = [
        level_to_try(parsed(), 0.25, 3, f"t{n}", step) for n in range(200) for step in range(10)
    ]
    counts = Counter(drawn)
    assert 0.22 < 1 - counts[None] / len(drawn) < 0.28
    assert set(counts) == {None, 1, 3, 4}
    assert all(120 < counts[level] < 215 for level in (1, 3, 4))
    again = [
        level_to_try(parsed(), 0.25, 3, f"t{n}", step) for n in range(200) for step in range(10)
    ]
    assert again == drawn
    other = [
        level_to_try(parsed(), 0.25, 4, f"t{n}", step) for n in range(200) for step in range(10)
    ]
    assert other != drawn


@pytest.mark.parametrize(("seed", "uid", "step"), [(0, "t", 0), (3, "g/1", 4), (11, "u", 2)])
def test_what_is_drawn_hangs_on_seed_trajectory_and_step(seed, uid, step):
    draw = derive_seed(seed, "executed", uid, step) / 2.0**63
    assert level_to_try(parsed(), draw, seed, uid, step) is None
    level = level_to_try(parsed(), draw + 1e-9, seed, uid, step)
    assert level == (1, 3, 4)[derive_seed(seed, "executed level", uid, step) % 3]


def test_one_of_three_others_stands_for_all():
    assert SHARE_OF_OTHERS == 3 / 4


def test_the_size_of_a_single_difference_is_its_own():
    joined = join_credit(torch.tensor([0.1, 0.2]), torch.tensor([NAN, -0.4]), "executed", 1.0)
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == pytest.approx(0.4)


def test_a_step_that_cannot_be_read_is_not_tried():
    assert level_to_try(None, 1.0, 0, "t", 0) is None
    assert level_to_try(parsed(None), 1.0, 0, "t", 0) is None
    assert level_to_try(parsed(2, ParseFailure.MERGED_LEVEL), 1.0, 0, "t", 0) is None
    assert level_to_try(parsed(2), 1.0, 0, "t", 0) in (1, 3, 4)
    assert level_to_try(parsed(2), 0.0, 0, "t", 0) is None


@pytest.mark.parametrize(
    ("price_in", "won", "expected"),
    [("won", True, 0.8), ("won", False, 1.0), ("all", False, 0.8), ("gate", False, 0.8)],
)
def test_a_play_is_worth_its_return_less_the_thought(price_in, won, expected):
    assert worth(1.0, won, 4, priced(price_in)) == pytest.approx(expected)


def test_executed_credit_is_the_difference_and_nothing_elsewhere():
    joined = join_credit(
        torch.tensor([0.3, -0.2, 0.5]), torch.tensor([0.75, NAN, -0.3]), "executed", 0.5
    )
    assert joined.weight.tolist() == [0.0, 0.0, 0.0]
    assert joined.executed.tolist() == pytest.approx([1.5, 0.0, -0.6])
    assert joined.metrics["rlvcr/executed_steps"] == 2.0
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == pytest.approx(1.05)
    assert "rlvcr/executed_slope" not in joined.metrics


def test_confidence_counts_elsewhere_as_far_as_it_agreed():
    scored = torch.tensor([1.0, -2.0, 0.5, 0.0])
    joined = join_credit(scored, torch.tensor([0.5, -1.0, NAN, 0.7]), "corrected", 1.0)
    assert joined.metrics["rlvcr/executed_slope"] == pytest.approx(0.5)
    assert joined.weight.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0])
    assert joined.executed.tolist() == pytest.approx([0.5, -1.0, 0.0, 0.7])
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(1.0)


def test_confidence_that_is_turned_round_counts_against():
    joined = join_credit(
        torch.tensor([1.0, -1.0, 0.5]), torch.tensor([-1.0, 1.0, NAN]), "corrected", 1.0
    )
    assert joined.weight.tolist() == pytest.approx([0.0, 0.0, -1.0])
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(-1.0)


def test_where_nothing_was_executed_nothing_is_credited():
    joined = join_credit(torch.tensor([1.0, 2.0]), torch.tensor([NAN, NAN]), "corrected", 1.0)
    assert joined.weight.tolist() == joined.executed.tolist() == [0.0, 0.0]
    assert joined.metrics["rlvcr/executed_steps"] == 0.0
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == 0.0
    assert "rlvcr/executed_correlation" not in joined.metrics
