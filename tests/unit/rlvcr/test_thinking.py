"""Edge cases of the thinking advantage: missing contexts, several turns, prices, defaults."""

import math

import pytest
import torch

from rlvcr.thinking import (
    broadcast_turn_values,
    compute_level_count_bonus,
    compute_reweight_factors,
    compute_thinking_advantage,
    compute_token_cost,
)
from tests.helpers.refusals import mentions

SCORES = torch.tensor([[-1.0, -2.0, -3.0, -6.0]])
ALL = torch.ones(1, 4, dtype=torch.bool)
FREE = torch.zeros(1, 4)
COSTS = torch.tensor([[0.0, 8.0, 16.0, 100.0]])


def columns_chosen(*columns):
    return torch.tensor(columns)


def mask_of(*levels):
    """Return a mask [1, 4] that is true at these columns."""
    valid = torch.zeros(1, 4, dtype=torch.bool)
    valid[0, list(levels)] = True
    return valid


# ---------------------------------------------------------------- prices


def test_cost_max_may_be_below_one_token():
    price = compute_token_cost(torch.tensor([0.0, 0.25, 3.0]), cost_coef=2.0, cost_max=0.5)
    assert price.tolist() == [0.0, 1.0, 2.0]
    assert price.dtype == torch.float64


def test_default_price_is_zero():
    advantage, share = compute_thinking_advantage(SCORES, ALL, columns_chosen(3), COSTS)
    assert (advantage.item(), share.item()) == (-3.0, 0.0)
    free = compute_reweight_factors(SCORES, ALL, columns_chosen(3), COSTS, cost_coef=0.0)
    assert torch.equal(compute_reweight_factors(SCORES, ALL, columns_chosen(3), COSTS), free)


def test_default_cost_max_is_64_tokens():
    flat = torch.zeros(1, 4)
    thought_tokens = torch.tensor([[0.0, 0.0, 0.0, 1000.0]])
    advantage, _ = compute_thinking_advantage(
        flat, ALL, columns_chosen(3), thought_tokens, cost_coef=64.0
    )
    half = torch.tensor([[0.0, 0.0, 0.0, 32.0]])
    halved, _ = compute_thinking_advantage(flat, ALL, columns_chosen(3), half, cost_coef=64.0)
    assert advantage.item() == -48.0  # -(64 - mean(0, 0, 0, 64))
    assert halved.item() == -24.0
    expected = compute_reweight_factors(
        SCORES, ALL, columns_chosen(1), half, cost_coef=1.0, cost_max=64
    )
    assert torch.equal(
        compute_reweight_factors(SCORES, ALL, columns_chosen(1), half, cost_coef=1.0), expected
    )


def test_price_share_is_computed_per_turn():
    thought_tokens = torch.tensor([[0.0, 8.0, 16.0, 24.0], [32.0, 32.0, 32.0, 32.0]])
    scores = SCORES.repeat(2, 1)
    _, share = compute_thinking_advantage(
        scores, ALL.repeat(2, 1), columns_chosen(0, 0), thought_tokens, cost_coef=1.0, cost_max=32
    )
    assert share.tolist() == [0.375, 0.0]  # (0 + 8 + 16 + 24) / 4 / 32


def test_missing_contexts_have_no_price():
    _, share = compute_thinking_advantage(
        SCORES, mask_of(0, 2), columns_chosen(0), COSTS, cost_coef=1.0, cost_max=32
    )
    assert share.item() == 0.25  # half of 16 / 32


# ---------------------------------------------------------------- turns with credit


def test_turn_without_a_level_gets_no_advantage_and_no_share():
    for column in (-1, 4):
        advantage, share = compute_thinking_advantage(
            SCORES, ALL, columns_chosen(column), COSTS, cost_coef=1.0, cost_max=32
        )
        assert (advantage.item(), share.item()) == (0.0, 0.0)
        assert compute_reweight_factors(SCORES, ALL, columns_chosen(column), FREE).item() == 1.0


def test_turn_without_its_own_context_gets_no_advantage():
    advantage, share = compute_thinking_advantage(
        SCORES, mask_of(1, 2, 3), columns_chosen(0), COSTS, cost_coef=1.0, cost_max=32
    )
    assert (advantage.item(), share.item()) == (0.0, 0.0)
    assert compute_reweight_factors(SCORES, mask_of(1, 2, 3), columns_chosen(0), FREE).item() == 1.0


def test_tables_without_four_columns_are_refused():
    three = SCORES[:, :3]
    with pytest.raises(ValueError, check=mentions("[S, 4]")):
        compute_thinking_advantage(three, ALL[:, :3], columns_chosen(0), FREE[:, :3])
    with pytest.raises(ValueError, check=mentions("[S, 4]")):
        compute_thinking_advantage(SCORES, ALL[:, :3], columns_chosen(0), FREE)
    with pytest.raises(ValueError, check=mentions("[S, 4]")):
        compute_thinking_advantage(SCORES, ALL, columns_chosen(0), FREE[:, :3])


# ---------------------------------------------------------------- modes


def test_one_alternative_of_several_turns():
    valid = torch.cat([mask_of(0, 1), mask_of(2, 3)])
    thought_tokens = torch.tensor([[0.0, 16.0, 0.0, 0.0], [0.0, 0.0, 0.0, 32.0]])
    advantage, share = compute_thinking_advantage(
        SCORES.repeat(2, 1),
        valid,
        columns_chosen(0, 3),
        thought_tokens,
        cost_coef=1.0,
        cost_max=32,
        alternatives="one",
    )
    assert advantage.tolist() == pytest.approx([0.75 * (1 + 0.5), 0.75 * (-3 - 1)])
    assert share.tolist() == pytest.approx([0.75 * 0.5, -0.75])


def test_one_alternative_scales_the_difference_by_three_quarters():
    advantage, _ = compute_thinking_advantage(
        SCORES, mask_of(0, 1, 2), columns_chosen(0), FREE, alternatives="one"
    )
    assert advantage.item() == pytest.approx(0.75 * (-1 - (-2 - 3) / 2))


def test_std_is_that_of_the_valid_contexts():
    advantage, _ = compute_thinking_advantage(
        SCORES, mask_of(0, 2), columns_chosen(0), FREE, mode="mean_std_norm", std_floor=0.01
    )
    assert advantage.item() == pytest.approx(1.0)  # 1 above the mean, divided by a std of 1


def test_price_share_is_divided_like_the_advantage():
    thought_tokens = torch.tensor([[0.0, 0.0, 0.0, 64.0]])
    scores = torch.zeros(1, 4)
    advantage, share = compute_thinking_advantage(
        scores, ALL, columns_chosen(3), thought_tokens, mode="mean_std_norm", cost_coef=4.0
    )
    assert advantage.item() == pytest.approx(-3 / math.sqrt(3))
    assert share.item() == pytest.approx(advantage.item())


def test_default_std_floor_is_a_tenth():
    scores = torch.tensor([[0.0, 0.0, 0.0, -0.04]])
    advantage, _ = compute_thinking_advantage(
        scores, ALL, columns_chosen(3), FREE, mode="mean_std_norm"
    )
    assert advantage.item() == pytest.approx(-0.3)


def test_tie_without_a_floor_is_divided_by_one():
    scores = torch.tensor([[0.0, 0.0, 0.0, 0.5]])
    thought_tokens = torch.tensor([[0.0, 0.0, 0.0, 32.0]])
    advantage, share = compute_thinking_advantage(
        scores,
        ALL,
        columns_chosen(3),
        thought_tokens,
        mode="mean_std_norm",
        cost_coef=1.0,
        std_floor=0.0,
    )
    assert advantage.item() == 0.0
    assert share.item() == pytest.approx(-0.375)


# ---------------------------------------------------------------- reweight factor


def test_factor_does_not_change_if_scores_shift():
    near = torch.tensor([[0.0, 0.1, 0.2, 0.4]])
    far = near - 7
    expected = math.exp(2) / (sum(math.exp(2 * c) for c in (0, 0.25, 0.5, 1)) / 4)
    assert compute_reweight_factors(near, ALL, columns_chosen(3), FREE).item() == pytest.approx(
        expected
    )
    assert compute_reweight_factors(far, ALL, columns_chosen(3), FREE).item() == pytest.approx(
        expected, rel=1e-5
    )


def test_factor_ignores_rounding_noise():
    noise = torch.tensor([[0.9999 + 1e-6, 0.9999, 0.9999, 0.9999]], dtype=torch.float64)
    assert compute_reweight_factors(noise, ALL, columns_chosen(0), FREE).item() == pytest.approx(
        1, abs=1e-4
    )


def test_factor_shrinks_with_the_range_below_spread_floor():
    half = torch.tensor([[0.0, 0.01, 0.0, 0.0]])
    expected = math.exp(1) / (
        (math.exp(1) + 3) / 4
    )  # a range of 0.01 with a floor of 0.02 gives c = 1/2
    assert compute_reweight_factors(half, ALL, columns_chosen(1), FREE).item() == pytest.approx(
        expected
    )
    lower_floor = compute_reweight_factors(half, ALL, columns_chosen(1), FREE, spread_floor=0.01)
    assert lower_floor.item() == pytest.approx(math.exp(2) / ((math.exp(2) + 3) / 4))


def test_factor_includes_the_price():
    thought_tokens = torch.tensor([[0.0, 64.0, 64.0, 64.0]])
    equal = torch.full((1, 4), 0.5)
    factor = compute_reweight_factors(
        equal, ALL, columns_chosen(0), thought_tokens, cost_coef=0.4, cost_max=64
    )
    assert factor.item() == pytest.approx(math.exp(2) / ((math.exp(2) + 3) / 4))


def test_factor_compares_only_valid_contexts():
    factor = compute_reweight_factors(SCORES, mask_of(1, 3), columns_chosen(1), FREE)
    assert factor.item() == pytest.approx(math.exp(2) / ((math.exp(2) + 1) / 2))


# ---------------------------------------------------------------- spans and counts


def test_span_may_end_with_the_response():
    assert broadcast_turn_values((1, 3), [0], [[(1, 3)]], [2.0]).tolist() == [[0, 2, 2]]
    with pytest.raises(ValueError, check=mentions("span")):
        broadcast_turn_values((1, 3), [0], [[(-1, 2)]], [2.0])
    with pytest.raises(ValueError, check=mentions("span")):
        broadcast_turn_values((1, 3), [0], [[(2, 1)]], [2.0])


def test_number_of_spans_and_values_must_be_equal():
    with pytest.raises(ValueError):
        broadcast_turn_values((1, 3), [0, 0], [[(0, 1)], [(1, 2)]], [2.0])
    with pytest.raises(ValueError):
        broadcast_turn_values((1, 3), [0], [[(0, 1)], [(1, 2)]], [2.0, 1.0])


def test_rare_levels_are_counted_within_their_group():
    levels = torch.tensor([0, 0, 0, 3, 3, 1])
    bonus = compute_level_count_bonus(levels, ["a", "a", "a", "a", "b", "b"])
    common = -math.log(3 / 4)
    rare = -math.log(1 / 4)
    mean = (3 * common + rare) / 4
    assert bonus.tolist() == pytest.approx([common - mean] * 3 + [rare - mean, 0, 0], abs=1e-6)
