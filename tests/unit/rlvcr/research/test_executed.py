"""Executed alternatives: choice of the turn and level, priced returns, and the credit."""

import math
from collections import Counter
from dataclasses import replace

import pytest
import torch

from rlvcr.levels import LevelChoice, ParsedTurn, ParseFailure
from rlvcr.research.executed import (
    DIFFERENCE_FACTOR,
    choose_executed_level,
    compute_priced_return,
    fit_shrinkage_slope,
    join_credit,
)
from rlvcr.settings import PriceRule, RLVCRSettings
from verl.utils.seeds import derive_seed

NAN = math.nan


def parsed(level: int | None = 2, failure: ParseFailure | None = None) -> ParsedTurn:
    return ParsedTurn(level, (1, 2), (3, 5), (6, 8), (6, 9), "own", "look", "strict", failure)


def priced(price_in: PriceRule = "won") -> RLVCRSettings:
    return RLVCRSettings(price_in=price_in, cost_coef=0.4, cost_max=8)


def test_alternative_level_is_drawn_uniformly_and_by_share():
    levels = [
        choose_executed_level(parsed(), 0.25, 3, f"t{n}", step)
        for n in range(200)
        for step in range(10)
    ]
    counts = Counter(levels)
    assert 0.22 < 1 - counts[None] / len(levels) < 0.28
    assert set(counts) == {None, 1, 3, 4}
    assert all(120 < counts[level] < 215 for level in (1, 3, 4))
    repeated = [
        choose_executed_level(parsed(), 0.25, 3, f"t{n}", step)
        for n in range(200)
        for step in range(10)
    ]
    assert repeated == levels
    other_seed = [
        choose_executed_level(parsed(), 0.25, 4, f"t{n}", step)
        for n in range(200)
        for step in range(10)
    ]
    assert other_seed != levels


@pytest.mark.parametrize(("seed", "uid", "step"), [(0, "t", 0), (3, "g/1", 4), (11, "u", 2)])
def test_draw_depends_on_seed_trajectory_and_turn(seed, uid, step):
    draw = derive_seed(seed, "executed", uid, step) / 2.0**63
    assert choose_executed_level(parsed(), draw, seed, uid, step) is None
    level = choose_executed_level(parsed(), draw + 1e-9, seed, uid, step)
    assert level == (1, 3, 4)[derive_seed(seed, "executed level", uid, step) % 3]


def test_one_alternative_counts_as_three_of_four_levels():
    assert DIFFERENCE_FACTOR == 3 / 4


def test_metric_of_one_difference_is_its_absolute_value():
    joined = join_credit(
        torch.tensor([0.1, 0.2]), torch.tensor([NAN, -0.4]), all_true(2), "executed", 1.0
    )
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == pytest.approx(0.4)


def test_turn_without_a_sampled_level_is_not_executed():
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
def test_priced_return_subtracts_the_token_cost(price_in, won, expected):
    assert compute_priced_return(1.0, won, 4, priced(price_in)) == pytest.approx(expected)


def test_executed_credit_is_the_difference_and_zero_elsewhere():
    joined = join_credit(
        torch.tensor([0.3, -0.2, 0.5]),
        torch.tensor([0.75, NAN, -0.3]),
        all_true(3),
        "executed",
        0.5,
    )
    assert joined.weight.tolist() == [0.0, 0.0, 0.0]
    assert joined.executed.tolist() == pytest.approx([1.5, 0.0, -0.6])
    assert joined.metrics["rlvcr/executed_steps"] == 2.0
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == pytest.approx(1.05)
    assert "rlvcr/executed_slope" not in joined.metrics


def all_true(steps):
    return torch.ones(steps, dtype=torch.bool)


def test_scores_of_other_turns_are_weighted_by_the_slope():
    scored = torch.tensor([1.0, -2.0, 0.5, 0.0, 3.0])
    differences = torch.tensor(
        [0.6, -0.9, NAN, 0.7, 1.6]
    )  # 0.1 + score / 2; a score of 0 is left out
    joined = join_credit(scored, differences, all_true(5), "corrected", 1.0)
    assert joined.metrics["rlvcr/executed_slope"] == pytest.approx(0.5)
    assert joined.weight.tolist() == pytest.approx([0.0, 0.0, 0.5, 0.0, 0.0])
    assert joined.executed.tolist() == pytest.approx([0.6, -0.9, 0.0, 0.7, 1.6])
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(1.0)


def test_shrinkage_slope_by_hand():
    # Centred: -1 0 1 and -1 0.5 0.5. Slope 1.5 / 2 = 0.75. The residuals -0.25 0.5 -0.25 have the
    # variance 0.375 with one degree of freedom, so the precision of the slope is 2 / 0.375 = 16/3.
    # The prior slope 1 has precision 1: (1 + 16/3 * 0.75) / (1 + 16/3) = 15/19.
    slope = fit_shrinkage_slope(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([0.0, 1.5, 1.5]))
    assert slope == pytest.approx(15 / 19)


@pytest.mark.parametrize(
    ("scored", "executed"),
    [([], []), ([1.0, -1.0], [-5.0, 5.0]), ([1.0, 2.0, 3.0], [0.7, 0.7, 0.7])],
    ids=["no turn", "two turns", "equal differences"],
)
def test_slope_is_one_without_enough_data(scored, executed):
    assert fit_shrinkage_slope(torch.tensor(scored), torch.tensor(executed)) == 1.0


def test_reversed_scores_get_weight_zero():
    scored = torch.tensor([1.0, 0.0, -1.0, 0.5, 2.0])
    differences = torch.tensor([-1.0, NAN, 1.0, NAN, -2.0])
    joined = join_credit(scored, differences, all_true(5), "corrected", 1.0)
    assert joined.weight.tolist() == pytest.approx([0.0] * 5)
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(-1.0)


def test_positive_means_alone_give_no_slope():
    generator = torch.Generator().manual_seed(0)
    scored, differences = 0.5 + torch.randn(2, 5000, generator=generator)
    through_the_origin = float((scored * differences).sum() / (scored * scored).sum())
    assert through_the_origin > 0.15
    assert fit_shrinkage_slope(scored, differences) < 0.05


def test_slope_is_fitted_only_where_scores_count():
    scored = torch.tensor([1.0, 2.0, 3.0, 1.0, 2.0, 3.0])
    differences = torch.tensor([0.5, 1.0, 1.5, -1.0, -2.0, -3.0])
    won = torch.tensor([True, True, True, False, False, False])
    joined = join_credit(scored, differences, won, "corrected", 1.0)
    assert joined.metrics["rlvcr/executed_slope"] == pytest.approx(0.5)
    assert joined.metrics["rlvcr/executed_correlation"] == pytest.approx(1.0)


def test_without_executed_turns_scores_keep_weight_one():
    joined = join_credit(
        torch.tensor([1.0, 2.0]), torch.tensor([NAN, NAN]), all_true(2), "corrected", 1.0
    )
    assert joined.weight.tolist() == [1.0, 1.0]
    assert joined.executed.tolist() == [0.0, 0.0]
    assert joined.metrics["rlvcr/executed_steps"] == 0.0
    assert joined.metrics["rlvcr/executed_advantage_abs_mean"] == 0.0
    assert "rlvcr/executed_correlation" not in joined.metrics
