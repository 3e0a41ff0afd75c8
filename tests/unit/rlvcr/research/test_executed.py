"""Executed alternatives: which steps are tried again, what plays are worth, what is credited."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rlvcr.levels import LevelChoice, ParsedTurn, ParseFailure
from rlvcr.research.executed import (
    DIFFERENCE_FACTOR,
    choose_executed_level,
    join_credit,
    priced_return,
    shrinkage_slope,
)
from rlvcr.settings import PriceRule, RLVCRSettings
from verl.utils.seeds import derive_seed

NAN = math.nan


def parsed(level: int | None = 2, failure: ParseFailure | None = None) -> ParsedTurn:
    return ParsedTurn(level, (1, 2), (3, 5), (6, 8), (6, 9), "own", "look", "strict", failure)


def priced(price_in: PriceRule = "won") -> RLVCRSettings:
    return RLVCRSettings(price_in=price_in, cost_coef=0.4, cost_max=8)


def test_another_level_is_drawn_uniformly_at_a_share_of_the_steps():
    drawn = [
        choose_executed_level(parsed(), 0.25, 3, f"t{n}", step)
        for n in range(200)
        for step in range(10)
    ]
    counts = Counter(drawn)
    assert 0.22 < 1 - counts[None] / len(drawn) < 0.28
    assert set(counts) == {None, 1, 3, 4}
    assert all(120 < counts[level] < 215 for level in (1, 3, 4))
    again = [
        choose_executed_level(parsed(), 0.25, 3, f"t{n}", step)
        for n in range(200)
        for step in range(10)
    ]
    assert again == drawn
    other = [
        choose_executed_level(parsed(), 0.25, 4, f"t{n}", step)
        for n in range(200)
        for step in range(10)
    ]
    assert other != drawn


@pytest.mark.parametrize(("seed", "uid", "step"), [(0, "t", 0), (3, "g/1", 4), (11, "u", 2)])
def test_what_is_drawn_hangs_on_seed_trajectory_and_step(seed, uid, step):
    draw = derive_seed(seed, "executed", uid, step) / 2.0**63
    assert choose_executed_level(parsed(), draw, seed, uid, step) is None
    level = choose_executed_level(parsed(), draw + 1e-9, seed, uid, step)
    assert level == (1, 3, 4)[derive_seed(seed, "executed level", uid, step) % 3]


def test_one_of_three_others_stands_for_all():
    assert DIFFERENCE_FACTOR == 3 / 4


def test_the_size_of_a_single_difference_is_its_own():
    joined = join_credit(
        torch.tensor([0.1, 0.2]), torch.tensor([NAN, -0.4]), everywhere(2), "executed", 1.0
    )
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == pytest.approx(0.4)


def test_a_step_whose_level_was_not_sampled_is_not_tried():
    assert choose_executed_level(None, 1.0, 0, "t", 0) is None
    assert choose_executed_level(parsed(None), 1.0, 0, "t", 0) is None
    assert choose_executed_level(parsed(2, ParseFailure.MERGED_LEVEL), 1.0, 0, "t", 0) is None
    assert choose_executed_level(parsed(2), 1.0, 0, "t", 0) in (1, 3, 4)
    for failure in set(ParseFailure) - {ParseFailure.MERGED_LEVEL}:
        assert choose_executed_level(parsed(2, failure), 1.0, 0, "t", 0) in (1, 3, 4)
    unclosed = replace(parsed(None, ParseFailure.INVALID_LEVEL), choice=LevelChoice(2, 1))
    assert choose_executed_level(unclosed, 1.0, 0, "t", 0) in (1, 3, 4)
    assert choose_executed_level(parsed(2), 0.0, 0, "t", 0) is None


@pytest.mark.parametrize(
    ("price_in", "won", "expected"),
    [("won", True, 0.8), ("won", False, 1.0), ("all", False, 0.8), ("gate", False, 0.8)],
)
def test_a_play_is_worth_its_return_less_the_thought(price_in, won, expected):
    assert priced_return(1.0, won, 4, priced(price_in)) == pytest.approx(expected)


def test_executed_credit_is_the_difference_and_nothing_elsewhere():
    joined = join_credit(
        torch.tensor([0.3, -0.2, 0.5]),
        torch.tensor([0.75, NAN, -0.3]),
        everywhere(3),
        "executed",
        0.5,
    )
    assert joined.weight.tolist() == [0.0, 0.0, 0.0]
    assert joined.executed.tolist() == pytest.approx([1.5, 0.0, -0.6])
    assert joined.metrics["rlvcr/executed_steps"] == 2.0
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == pytest.approx(1.05)
    assert "rlvcr/executed_slope" not in joined.metrics


def everywhere(steps):
    return torch.ones(steps, dtype=torch.bool)


def test_confidence_counts_elsewhere_as_far_as_it_agreed():
    scored = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    found = torch.tensor([0.6, -0.9, NAN, 0.7, 1.6])  # 0.1 and half of it; confidence 0 is none
    joined = join_credit(scored, found, everywhere(5), "corrected", 1.0)
    assert joined.metrics["rlvcr/executed_slope"] == pytest.approx(0.5)
    assert joined.weight.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0, 0.0])
    assert joined.executed.tolist() == pytest.approx([0.6, -0.9, 0.0, 0.7, 1.6])
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(1.0)


def test_belief_is_joined_with_what_was_believed_before_by_hand():
    # Centred: -1 0 1 and -1 0.5 0.5. Slope 1.5 / 2 = 0.75; left over are -0.25 0.5 -0.25, that is
    # 0.375 of one degree of freedom; precision 2 / 0.375 = 16/3: (1 + 16/3 * 0.75) / (1 + 16/3).
    found = shrinkage_slope(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.5, 1.5]))
    assert found == pytest.approx(15 / 19)


@pytest.mark.parametrize(
    ("confidence", "executed"),
    [([], []), ([1.0, -1.0], [-5.0, 5.0]), ([1.0, 2.0, 3.0], [0.7, 0.7, 0.7])],
    ids=["no step", "two steps", "one worth"],
)
def test_confidence_is_believed_until_something_is_known(confidence, executed):
    assert shrinkage_slope(torch.tensor(confidence), torch.tensor(executed)) == 1.0


def test_confidence_that_is_turned_round_is_not_believed():
    scored = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    found = torch.tensor([-1.0, NAN, 1.0, NAN, -2.0])
    joined = join_credit(scored, found, everywhere(5), "corrected", 1.0)
    assert joined.weight.tolist() == pytest.approx([0.0] * 5)
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(-1.0)


def test_two_things_that_are_positive_need_not_be_connected():
    generator = torch.Generator().manual_seed(0)
    scored, found = 0.5 + torch.randn(2, 5000, generator=generator)
    through_the_origin = float((scored * found).sum() / (scored * scored).sum())
    assert through_the_origin > 0.15
    assert shrinkage_slope(scored, found) < 0.05


def test_belief_is_asked_of_the_plays_where_confidence_counts():
    scored = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
    found = torch.tensor([0.5, 1.0, 1.5, -1.0, -2.0, -3.0])
    won = torch.tensor([True, True, True, False, False, False])
    joined = join_credit(scored, found, won, "corrected", 1.0)
    assert joined.metrics["rlvcr/executed_slope"] == pytest.approx(0.5)
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(1.0)


def test_where_nothing_was_executed_confidence_stands_alone():
    joined = join_credit(
        torch.tensor([1.0, 2.0]), torch.tensor([NAN, NAN]), everywhere(2), "corrected", 1.0
    )
    assert joined.weight.tolist() == [1.0, 1.0]
    assert joined.executed.tolist() == [0.0, 0.0]
    assert joined.metrics["rlvcr/executed_steps"] == 0.0
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == 0.0
    assert "rlvcr/executed_correlation" not in joined.metrics
