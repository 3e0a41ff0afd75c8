"""The formulas of RLVCR against numbers computed by hand."""

import logging
import math

import numpy as np
import pytest
import torch

from rlvcr.core_rlvcr import (
    combine_advantages,
    compute_copo_outcome_advantage,
    compute_credit_metrics,
    compute_rlvcr_outcome_advantage,
)
from rlvcr.level_metrics import LevelCollapseDetector, compute_level_metrics
from rlvcr.thinking import (
    broadcast_turn_values,
    compute_action_score,
    compute_level_count_bonus,
    compute_reweight_factors,
    compute_thinking_advantage,
)
from tests.helpers.refusals import mentions, suggests
from verl.algos import find_missing_inputs, get_adv_estimator_fn
from verl.records import ScoreResult
from verl.utils.saved_state import InvalidStateError

SCORES = torch.tensor([[-1.0, -2.0, -3.0, -6.0]])
ALL = torch.ones(1, 4, dtype=torch.bool)
FREE = torch.zeros(1, 4)


def columns_chosen(*columns):
    return torch.tensor(columns)


def test_select_score_returns_the_named_measurement():
    entry = ScoreResult(
        step=0,
        label=1,
        logprob=-0.5,
        entropy=2.0,
        mean_prob=0.7,
        geometric_prob=math.exp(-0.5),
        num_tokens=2,
    )
    assert compute_action_score(entry, "entropy") == -2.0
    assert compute_action_score(entry, "logprob") == -0.5
    assert compute_action_score(entry, "prob") == math.exp(-0.5)


def test_mean_norm_by_hand():
    scores = SCORES.repeat(4, 1)
    advantage, cost = compute_thinking_advantage(
        scores, ALL.repeat(4, 1), columns_chosen(0, 1, 2, 3), FREE.repeat(4, 1)
    )
    assert advantage.tolist() == [2, 1, 0, -3]
    assert cost.tolist() == [0, 0, 0, 0]


def test_mean_std_norm_divides_by_the_std_of_the_four_scores():
    advantage, _ = compute_thinking_advantage(
        SCORES, ALL, columns_chosen(3), FREE, mode="mean_std_norm"
    )
    assert advantage.item() == pytest.approx(-3 / math.sqrt((4 + 1 + 0 + 9) / 4))


def test_std_floor_limits_the_advantage_of_a_near_tie():
    scores = torch.tensor([[-1.0, -1.0, -1.0, -1.001]])
    advantage, _ = compute_thinking_advantage(
        scores, ALL, columns_chosen(3), FREE, mode="mean_std_norm", std_floor=0.1
    )
    assert advantage.item() == pytest.approx(-0.0075, rel=1e-3)  # 1.73 with a floor of 0


def test_cost_is_capped_and_its_share_is_returned():
    thought_tokens = torch.tensor([[0.0, 10.0, 20.0, 1000.0]])
    scores = torch.zeros(1, 4)
    advantage, share = compute_thinking_advantage(
        scores, ALL, columns_chosen(3), thought_tokens, cost_coef=0.4, cost_max=40
    )
    assert advantage.item() == pytest.approx(-0.4 + (0.1 + 0.2 + 0.4) / 4)
    assert share.item() == pytest.approx(advantage.item())
    with_score, share = compute_thinking_advantage(
        SCORES, ALL, columns_chosen(3), thought_tokens, cost_coef=0.4, cost_max=40
    )
    assert (with_score - share).item() == pytest.approx(-3.0)


def test_only_valid_contexts_enter_the_mean():
    valid = torch.tensor([[True, False, True, False]])
    advantage, _ = compute_thinking_advantage(
        torch.tensor([[-1.0, math.nan, -3.0, 9.0]]), valid, columns_chosen(0), FREE
    )
    assert advantage.item() == 1.0


def test_one_alternative_has_the_mean_of_all_three():
    full, _ = compute_thinking_advantage(SCORES, ALL, columns_chosen(1), FREE)
    values = []
    for other in (0, 2, 3):
        valid = torch.zeros(1, 4, dtype=torch.bool)
        valid[0, [1, other]] = True
        advantage, _ = compute_thinking_advantage(
            SCORES, valid, columns_chosen(1), FREE, alternatives="one"
        )
        assert advantage.item() == pytest.approx(0.75 * (SCORES[0, 1] - SCORES[0, other]).item())
        values.append(advantage.item())
    assert sum(values) / 3 == pytest.approx(full.item())


def test_reweight_factors_by_hand():
    factor = compute_reweight_factors(
        torch.tensor([[0.0, 1.0, 2.0, 4.0]]).repeat(2, 1),
        ALL.repeat(2, 1),
        columns_chosen(3, 0),
        FREE.repeat(2, 1),
    )
    mean = sum(math.exp(2 * c) for c in (0, 0.25, 0.5, 1)) / 4
    assert factor.tolist() == pytest.approx([math.exp(2) / mean, 1 / mean])


def test_reweight_factor_is_one_without_a_comparison():
    tie = torch.zeros(1, 4)
    assert compute_reweight_factors(tie, ALL, columns_chosen(2), FREE).item() == 1.0
    assert compute_reweight_factors(SCORES, ALL, columns_chosen(-1), FREE).item() == 1.0
    assert (
        compute_reweight_factors(
            SCORES, torch.tensor([[True, False, False, False]]), columns_chosen(0), FREE
        ).item()
        == 1.0
    )


def test_invalid_arguments_are_refused():
    with pytest.raises(ValueError, check=suggests("mean_norm")):
        compute_thinking_advantage(SCORES, ALL, columns_chosen(0), FREE, mode="mean_nor")
    with pytest.raises(ValueError, check=mentions("[S, 4]")):
        compute_thinking_advantage(SCORES[:, :3], ALL, columns_chosen(0), FREE)


def test_place_turn_values_fills_only_the_spans():
    spans = [[(1, 2), (3, 5)], [(6, 7), (7, 7)], [(0, 3)]]
    placed = broadcast_turn_values((3, 8), [0, 0, 2], spans, [2.0, -1.0, 0.5])
    assert placed.tolist() == [
        [0, 2, 0, 2, 2, 0, -1, 0],
        [0, 0, 0, 0, 0, 0, 0, 0],
        [0.5, 0.5, 0.5, 0, 0, 0, 0, 0],
    ]
    assert broadcast_turn_values((2, 3), [], [], []).tolist() == [[0, 0, 0]] * 2
    with pytest.raises(ValueError, check=mentions("span")):
        broadcast_turn_values((2, 4), [0], [[(3, 5)]], [1.0])  # would reach into row 1
    with pytest.raises(ValueError, check=mentions("span")):
        broadcast_turn_values((1, 4), [0, 0], [[(0, 2)], [(1, 3)]], [1.0, 1.0])


# ---------------------------------------------------------------- combination

TRAJECTORY = torch.tensor([[1.0, 1.0, 1.0], [-2.0, -2.0, -2.0]])
THINKING = torch.tensor([[0.5, 0.0, -4.0], [0.5, 0.0, -4.0]])
FACTORS = torch.tensor([[2.0, 0.0, 0.5], [2.0, 0.0, 0.5]])


@pytest.mark.parametrize(
    ("combine", "expected"),
    [
        ("additive", [[1.25, 1, -1], [-1.75, -2, -4]]),
        ("gated", [[1.25, 1, -1], [-2.25, -2, 0]]),
        ("success", [[1.25, 1, -1], [-2, -2, -2]]),
        ("reweight", [[2, 1, 0.5], [-4, -2, -1]]),
    ],
)
def test_combinations_by_hand(combine, expected):
    success = torch.tensor([True, False])
    assert (
        combine_advantages(TRAJECTORY, THINKING, 0.5, combine, success, FACTORS).tolist()
        == expected
    )


PRICE = torch.tensor([[-0.5, 0.0, -1.0], [-0.5, 0.0, -1.0]])


@pytest.mark.parametrize(
    ("combine", "price_in", "expected"),
    [
        # The price is a part of THINKING, w = 0.5. Inside the gate its sign flips for a failure.
        ("gated", "gate", [[1.25, 1, -1], [-2.25, -2, 0]]),
        ("gated", "all", [[1.25, 1, -1], [-2.75, -2, -1]]),
        ("success", "gate", [[1.25, 1, -1], [-2, -2, -2]]),
        ("success", "all", [[1.25, 1, -1], [-2.25, -2, -2.5]]),
        ("additive", "gate", [[1.25, 1, -1], [-1.75, -2, -4]]),
        ("additive", "all", [[1.25, 1, -1], [-1.75, -2, -4]]),
    ],
)
def test_price_is_placed_by_price_in(combine, price_in, expected):
    actual = combine_advantages(
        TRAJECTORY,
        THINKING,
        0.5,
        combine,
        torch.tensor([True, False]),
        price_share=PRICE,
        price_in=price_in,
    )
    assert actual.tolist() == expected


@pytest.mark.parametrize("combine", ["gated", "success"])
def test_price_counts_where_the_gate_is_closed(combine):
    """A_traj is 0 in a group that always succeeds, so only the price shortens thoughts there."""
    zero = torch.zeros(1, 2)
    thinking = torch.tensor([[-0.4, 0.0]])
    actual = combine_advantages(
        zero, thinking, 1.0, combine, torch.tensor([False]), price_share=thinking, price_in="won"
    )
    torch.testing.assert_close(actual, thinking)


def test_additive_combination_is_exact_for_any_price_share():
    generator = torch.Generator().manual_seed(0)
    thinking, price = torch.randn(2, 5, 7, generator=generator)
    trajectory = torch.randn(5, 7, generator=generator)
    actual = combine_advantages(trajectory, thinking, 0.3, price_share=price, price_in="all")
    assert torch.equal(actual, trajectory + 0.3 * thinking)


def test_unknown_price_rule_is_refused():
    with pytest.raises(ValueError, check=suggests("won")):
        combine_advantages(TRAJECTORY, THINKING, 1.0, price_share=PRICE, price_in="win")


@pytest.mark.parametrize("combine", ["additive", "gated", "success"])
def test_level_bonus_is_added_for_any_outcome(combine):
    arguments = make_batch()
    shape = arguments["response_mask"].shape
    plain, returns = compute_rlvcr_outcome_advantage(**arguments, combine=combine)
    bonus = torch.full(shape, 0.25)
    with_bonus, bonus_returns = compute_rlvcr_outcome_advantage(
        **arguments, combine=combine, thinking_level_bonus=bonus
    )
    torch.testing.assert_close(with_bonus - plain, bonus * arguments["response_mask"])
    assert torch.equal(returns, bonus_returns) and (returns < 0).any() and (returns > 0).any()


@pytest.mark.parametrize("combine", ["additive", "gated", "success"])
def test_group_price_is_added_for_any_outcome(combine):
    arguments = make_batch()
    plain, returns = compute_rlvcr_outcome_advantage(**arguments, combine=combine)
    price = torch.full(arguments["response_mask"].shape, 0.25)
    with_price, priced_returns = compute_rlvcr_outcome_advantage(
        **arguments, combine=combine, thinking_group_price=price
    )
    weighted_with_price, _ = compute_rlvcr_outcome_advantage(
        **arguments, combine=combine, thinking_group_price=price, step_advantage_w=3.0
    )
    weighted, _ = compute_rlvcr_outcome_advantage(
        **arguments, combine=combine, step_advantage_w=3.0
    )
    torch.testing.assert_close(with_price - plain, price * arguments["response_mask"])
    torch.testing.assert_close(
        weighted_with_price - weighted, 3.0 * price * arguments["response_mask"]
    )
    assert torch.equal(returns, priced_returns)


def test_combination_refuses_invalid_arguments():
    with pytest.raises(ValueError, check=suggests("gated")):
        combine_advantages(TRAJECTORY, THINKING, 1.0, "gate")
    with pytest.raises(ValueError, check=mentions("thinking_reweight")):
        combine_advantages(TRAJECTORY, THINKING, 1.0, "reweight")
    with pytest.raises(ValueError, check=mentions("combine=success")):
        combine_advantages(TRAJECTORY, THINKING, 1.0, "success")


def make_batch(**options):
    return {
        "token_level_rewards": torch.tensor([[0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 0.0]]),
        "response_mask": torch.tensor([[1, 1, 1, 0], [1, 1, 1, 1]]),
        "index": ["a", "a"],
        "traj_index": ["t", "u"],
        "thinking_level_entropies": torch.tensor([[0.2, 0.0, 0.0, 9.0], [0.0, -0.4, 0.0, 0.0]]),
        "thinking_token_costs": torch.zeros(2, 4),
    } | options


def test_estimator_adds_weighted_thinking_to_normalised_return():
    advantages, returns = compute_rlvcr_outcome_advantage(
        **make_batch(), step_advantage_w=2.0, thinking_diversity_w=0.5, mode="mean_norm"
    )
    torch.testing.assert_close(
        advantages, torch.tensor([[0.9, 0.5, 0.5, 0.0], [-0.5, -1.3, -0.5, -0.5]])
    )
    assert returns.tolist() == [[0.5, 0.5, 0.5, 0.0], [-0.5] * 4]


def test_estimator_can_divide_by_the_std():
    _, returns = compute_rlvcr_outcome_advantage(**make_batch(), mode="mean_std_norm")
    assert returns[:, 0].tolist() == pytest.approx(
        [0.5 / math.sqrt(0.5), -0.5 / math.sqrt(0.5)], rel=1e-5
    )


def test_estimator_keeps_the_price_out_of_the_gate_by_default():
    price_shares = torch.tensor([[0.0, 0.0, 0.0, 9.0], [0.0, -0.3, 0.0, 0.0]])
    priced = make_batch(thinking_token_costs=price_shares)
    outside, _ = compute_rlvcr_outcome_advantage(**priced, combine="gated")
    assert outside[1].tolist() == pytest.approx([-0.5, -0.7, -0.5, -0.5])
    assert outside[0].tolist() == pytest.approx([0.7, 0.5, 0.5, 0.0])
    within, _ = compute_rlvcr_outcome_advantage(**priced, combine="gated", price_in="gate")
    assert within[1].tolist() == pytest.approx([-0.5, -0.1, -0.5, -0.5])


def test_trajectory_of_several_rows_counts_once_in_its_group():
    arguments = {
        "token_level_rewards": torch.tensor([[1.0], [1.0], [0.0]]),
        "response_mask": torch.ones(3, 1),
        "index": ["a", "a", "a"],
        "traj_index": ["t", "t", "u"],
    }
    zeros = torch.zeros(3, 1)
    _, returns = compute_rlvcr_outcome_advantage(
        **arguments, thinking_level_entropies=zeros, thinking_token_costs=zeros
    )
    assert returns.squeeze(-1).tolist() == [0.5, 0.5, -0.5]  # a mean over rows would be 2/3


def test_epsilon_is_added_to_the_std():
    _, returns = compute_rlvcr_outcome_advantage(**make_batch(), mode="mean_std_norm", epsilon=1.0)
    assert returns[0, 0].item() == pytest.approx(0.5 / (math.sqrt(0.5) + 1))


@pytest.mark.parametrize(
    ("name", "required"),
    [
        ("rlvcr", ["thinking_level_entropies", "thinking_token_costs"]),
        ("copo", ["thinking_reweight"]),
        ("level_groups", ["thinking_group_price"]),
    ],
)
def test_estimators_read_their_inputs_from_the_batch(name, required):
    """The column names are those that the trainer and the scoring write."""
    estimator = get_adv_estimator_fn(name)
    common = ["response_mask", "token_level_rewards", "traj_uid", "uid"]
    assert find_missing_inputs(estimator, []) == sorted([*common, *required])
    columns = make_batch(thinking_reweight=torch.zeros(2, 4))
    columns |= {"uid": columns.pop("index"), "traj_uid": columns.pop("traj_index")}
    columns |= {"won": [True, False], "thinking_level_bonus": torch.zeros(2, 4)}
    columns |= {"thinking_group_price": torch.zeros(2, 4)}
    arguments = {argument: columns[key.rstrip("?")] for argument, key in estimator.inputs.items()}
    _, returns = estimator(**arguments)
    assert returns[:, 0].tolist() == [0.5, -0.5]


def test_estimator_without_thinking_advantage_is_grpo():
    arguments = make_batch(thinking_level_entropies=torch.zeros(2, 4))
    grpo, _ = get_adv_estimator_fn("grpo")(
        arguments["token_level_rewards"],
        arguments["response_mask"],
        ["a", "a"],
        traj_index=["t", "u"],
    )
    for combine in ("additive", "gated", "success", "reweight"):
        arguments["thinking_reweight"] = torch.zeros(2, 4)
        advantages, returns = compute_rlvcr_outcome_advantage(
            **arguments, mode="mean_std_norm", combine=combine
        )
        torch.testing.assert_close(advantages, grpo)
        torch.testing.assert_close(returns, grpo)


def test_success_is_read_from_the_batch_or_the_return():
    by_return, _ = compute_rlvcr_outcome_advantage(**make_batch(), combine="success")
    assert by_return[0, 0].item() == pytest.approx(0.7)
    assert by_return.tolist()[1] == [-0.5] * 4
    won = np.array([False, True], dtype=object)
    by_column, _ = compute_rlvcr_outcome_advantage(**make_batch(), combine="success", success=won)
    assert by_column[0].tolist() == [0.5, 0.5, 0.5, 0.0]
    assert by_column[1, 1].item() == pytest.approx(-0.9)


def test_copo_reweights_positive_advantages_only():
    factors = torch.tensor([[2.0, 0.0, 0.5, 0.0], [2.0, 0.0, 0.5, 0.0]])
    arguments = make_batch()
    for key in ("thinking_level_entropies", "thinking_token_costs"):
        del arguments[key]
    advantages, returns = compute_copo_outcome_advantage(**arguments, thinking_reweight=factors)
    assert advantages.tolist() == [[1.0, 0.5, 0.25, 0.0], [-0.5] * 4]
    assert returns[0].tolist() == [0.5, 0.5, 0.5, 0.0]


def test_copo_can_divide_by_the_std():
    arguments = make_batch(thinking_reweight=torch.zeros(2, 4))
    for key in ("thinking_level_entropies", "thinking_token_costs"):
        del arguments[key]
    _, returns = compute_copo_outcome_advantage(**arguments, mode="mean_std_norm")
    assert returns[:, 0].tolist() == pytest.approx([math.sqrt(0.5), -math.sqrt(0.5)], rel=1e-5)


# ---------------------------------------------------------------- metrics


def test_credit_metrics_by_hand():
    """The tokens: same sign; closed gate; bonus alone; flipped sign; cancelled; no credit; not
    sampled.
    """
    returns = torch.tensor([[1.0, -1.0, 0.0, 2.0, 1.0, 7.0, 5.0]])
    advantages = torch.tensor([[3.0, -1.0, 0.5, -1.0, 0.0, 7.0, 9.0]])
    placed = torch.tensor([[2.0, 1.0, 0.0, -3.0, -1.0, 0.0, 7.0]])
    price_shares = torch.tensor([[-0.5, -0.25, 0.0, -0.25, 0.0, 0.0, 9.0]])
    sampled = torch.tensor([[1, 1, 1, 1, 1, 1, 0]])
    expected = {
        "rlvcr/trajectory_advantage_abs_mean": 5 / 5,
        "rlvcr/thinking_share": 6.5 / 11.5,
        "rlvcr/sign_flip_share": 1 / 4,
        "rlvcr/credited_token_share": 5 / 6,
    }
    factors = compute_credit_metrics(advantages, returns, sampled, thinking_reweight=placed)
    assert factors == pytest.approx(expected)
    actual = compute_credit_metrics(advantages, returns, sampled, placed, price_shares)
    assert actual == pytest.approx(
        expected | {"rlvcr/thinking_advantage_abs_mean": 7 / 5, "rlvcr/cost_share_mean": -1 / 5}
    )


def test_credit_metrics_without_credit_are_zero():
    nothing = torch.zeros(1, 3)
    assert set(compute_credit_metrics(nothing, nothing, nothing + 1).values()) == {0.0}


def test_credit_metrics_show_a_dominant_thinking_advantage():
    small = make_batch()
    advantages, returns = compute_rlvcr_outcome_advantage(**small)
    metrics = compute_credit_metrics(advantages, returns, **small)
    assert metrics["rlvcr/sign_flip_share"] == 0.0
    assert metrics["rlvcr/thinking_share"] == pytest.approx(0.3 / 0.8)
    assert metrics["rlvcr/trajectory_advantage_abs_mean"] == pytest.approx(0.5)
    assert metrics["rlvcr/thinking_advantage_abs_mean"] == pytest.approx(0.3)
    assert metrics["rlvcr/credited_token_share"] == pytest.approx(2 / 7)
    large = make_batch(
        thinking_level_entropies=torch.tensor([[-3.0, 0.0, 0.0, 0.0], [0.0, -3.0, 0.0, 0.0]])
    )
    metrics = compute_credit_metrics(*compute_rlvcr_outcome_advantage(**large), **large)
    assert metrics["rlvcr/sign_flip_share"] == 0.5
    assert metrics["rlvcr/thinking_share"] > 0.8
    assert get_adv_estimator_fn("rlvcr").metrics is compute_credit_metrics


def test_level_metrics_by_hand():
    metrics = compute_level_metrics(
        [1, 1, 3, None], [True, False, True, True], [None, None, None, "missing_level"]
    )
    assert metrics == {
        "rlvcr/level_share_1": 2 / 3,
        "rlvcr/level_share_2": 0.0,
        "rlvcr/level_share_3": 1 / 3,
        "rlvcr/level_share_4": 0.0,
        "rlvcr/level_success_1": 0.5,
        "rlvcr/level_success_3": 1.0,
        "rlvcr/level_steps": 3.0,
        "rlvcr/parse_fail_missing_level": 0.25,
    }
    assert compute_level_metrics([], [])["rlvcr/level_share_1"] == 0.0


def test_collapse_detector_warns_after_patience_updates(caplog):
    watch = LevelCollapseDetector(patience=2)
    with caplog.at_level(logging.WARNING):
        assert watch.update([1, 2, 3, None]) == []
        assert not caplog.records
        assert watch.update([1, 2, 3]) == [4]
        assert "level 4" in caplog.text
        assert watch.update([1, 2, 3]) == [4]
    assert len(caplog.records) == 1
    assert watch.update([1, 2, 4]) == []
    assert watch.steps_since_sampled == {1: 0, 2: 0, 3: 1, 4: 0}


@pytest.mark.parametrize("state", [None, 4, "1234", [1, 2, 3], [1] * 5, [1, 2, 3, -4], [1.0] * 4])
def test_collapse_detector_refuses_other_counts(state):
    with pytest.raises(InvalidStateError, check=mentions("levels_unseen", 4)):
        LevelCollapseDetector(patience=3).resume(state)


def test_collapse_detector_resumes_its_counts():
    watch, resumed = LevelCollapseDetector(patience=3), LevelCollapseDetector(patience=3)
    for _ in range(2):
        watch.update([1, 2, 4])
    assert watch.state() == [0, 0, 2, 0]
    resumed.resume(watch.state())
    assert resumed.update([1, 2, 4]) == [3]
    resumed.resume([])
    assert resumed.state() == [0, 0, 0, 0]


def test_collapse_patience_of_one_step():
    assert LevelCollapseDetector(patience=1).update([1, 2, 3]) == [4]


def test_count_bonus_favours_rare_levels_and_sums_to_zero():
    levels = torch.tensor([0, 0, 0, 3, 2, -1])
    bonus = compute_level_count_bonus(levels, ["a", "a", "a", "a", "b", "a"])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    common, rare = -math.log(0.75) - entropy, -math.log(0.25) - entropy
    assert bonus.tolist() == pytest.approx([common, common, common, rare, 0, 0], abs=1e-6)
    assert bonus.sum().item() == pytest.approx(0, abs=1e-6)
    assert compute_level_count_bonus(torch.tensor([-1]), ["a"]).tolist() == [0]
