"""Prices of tokens relative to the other successes of the group in the same state."""

import pytest
import torch

from rlvcr.core_rlvcr import compute_level_groups_outcome_advantage
from rlvcr.thinking import compute_thought_length_statistics


def compare(tokens, successes, states, trajectories):
    return compute_thought_length_statistics(
        torch.tensor(tokens, dtype=torch.float64),
        torch.tensor(successes, dtype=torch.bool),
        states,
        trajectories,
    )


def test_successes_in_the_same_state_are_compared():
    tokens = [5, 9, 2, 7]
    comparison = compare(
        tokens, [True, True, False, True], ["d", "d", "d", "e"], ["a", "b", "c", "f"]
    )
    assert comparison.has_other_success.tolist() == [True, True, False, False]
    # The other success has 9 and 5 tokens; the population std of (5, 9) is 2.
    assert comparison.compute_group_prices(torch.tensor(tokens)).tolist() == pytest.approx(
        [-2.0, 2.0, 0.0, 0.0]
    )


def test_trajectory_is_not_compared_with_itself():
    comparison = compare([5, 9, 1], [True] * 3, ["d"] * 3, ["a", "a", "b"])
    # Turns of a: the other trajectory used 1. Turn of b: mean of 5 and 9.
    std = torch.tensor([5.0, 9.0, 1.0]).std(correction=0).item()
    assert comparison.compute_group_prices(torch.tensor([5, 9, 1])).tolist() == pytest.approx(
        [4 / std, 8 / std, -6 / std]
    )
    alone = compare([5, 9], [True, True], ["d", "d"], ["a", "a"])
    assert alone.has_other_success.tolist() == [False, False]


def test_different_tasks_are_not_compared():
    comparison = compare([5, 9], [True, True], [("t1", "d"), ("t2", "d")], ["a", "b"])
    assert not comparison.has_other_success.any()


def test_differences_below_one_token_are_not_scaled_up():
    comparison = compare([5, 5, 6], [True] * 3, ["d"] * 3, ["a", "b", "c"])
    assert comparison.scale.tolist() == [1.0, 1.0, 1.0]
    assert comparison.compute_group_prices(torch.tensor([5, 5, 6])).tolist() == [-0.5, -0.5, 1.0]


def test_alternative_thoughts_are_priced_by_the_same_comparison():
    comparison = compare([5, 9], [True, True], ["d", "d"], ["a", "b"])
    prices = comparison.compute_group_prices(torch.tensor([[9.0, 11.0], [5.0, 1.0]]))
    assert prices.flatten().tolist() == pytest.approx([0.0, 1.0, 0.0, -2.0])


def test_without_turns_or_successes_prices_are_zero():
    assert compare([], [], [], []).compute_group_prices(torch.zeros(0)).tolist() == []
    failed = compare([5, 9], [False, False], ["d", "d"], ["a", "b"])
    assert failed.compute_group_prices(torch.tensor([5, 9])).tolist() == [0.0, 0.0]


def test_estimator_adds_the_prices_to_the_trajectory_advantage():
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    rewards = torch.tensor([[0.0, 1.0, 0.0], [0.0, 0.0, 0.0]])
    prices = torch.tensor([[0.5, 0.0, 9.0], [-1.0, 0.0, 0.0]])
    advantages, returns = compute_level_groups_outcome_advantage(
        rewards, mask, ["t", "t"], ["a", "b"], prices, step_advantage_w=2.0
    )
    assert returns.tolist() == [[0.5, 0.5, 0.0], [-0.5, -0.5, -0.5]]
    assert advantages.tolist() == [[1.5, 0.5, 0.0], [-2.5, -0.5, -0.5]]
