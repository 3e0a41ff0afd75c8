"""Parts of GiGPO against numbers by hand: missing turns, similar states, positions of tokens."""

import math

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.algos.step_advantages import (
    EnvSteps,
    broadcast_to_step_tokens,
    compute_discounted_step_returns,
    compute_gigpo_outcome_advantage,
    flatten_steps,
    merge_similar_states,
)


def steps_of(numbers, rewards, row=0):
    count = len(numbers)
    return EnvSteps([row] * count, numbers, [("a", "x")] * count, rewards, [("a", "s")] * count)


def test_missing_turn_discounts_but_adds_nothing():
    returns = compute_discounted_step_returns(steps_of([0, 3], [1.0, 8.0]), gamma=0.5)
    assert returns.tolist() == [2.0, 8.0]  # 1 + 8 / 2^3
    assert returns.dtype == torch.float64


def test_turns_may_come_in_any_order():
    returns = compute_discounted_step_returns(steps_of([2, 0, 1], [4.0, 1.0, 2.0]), gamma=0.5)
    assert returns.tolist() == [4.0, 3.0, 4.0]


def test_returns_keep_double_precision():
    returns = compute_discounted_step_returns(steps_of([0, 1], [1e8, 0.5]), gamma=1.0)
    assert returns[0].item() == 1e8 + 0.5


def test_similar_states_are_merged_only_within_their_task():
    states = [("a", "abcd"), ("a", "abcx"), ("b", "abcx"), ("a", "zzzz")]
    # The first two states have exactly this similarity.
    merged = merge_similar_states(states, threshold=0.75)
    assert merged == [("a", "abcd"), ("a", "abcd"), ("b", "abcx"), ("a", "zzzz")]
    assert merge_similar_states(states, threshold=0.76) == states


def test_values_are_put_on_the_tokens_of_their_turn():
    steps = steps_of([1, 3], [0.0, 0.0])
    ids = torch.tensor([[-1, 1, 2, 3, 3]])
    placed = broadcast_to_step_tokens(torch.tensor([5.0, 7.0], dtype=torch.float64), steps, ids)
    assert placed.tolist() == [[0, 5, 0, 7, 7]]
    assert placed.dtype == torch.float32


def test_without_turns_all_values_are_zero():
    placed = broadcast_to_step_tokens(
        torch.zeros(0), EnvSteps([], [], [], [], []), torch.tensor([[0, -1]])
    )
    assert placed.tolist() == [[0, 0]]
    assert placed.dtype == torch.float32


def test_turns_without_tokens_are_skipped():
    placed = broadcast_to_step_tokens(
        torch.tensor([5.0]), steps_of([4], [0.0]), torch.tensor([[0, 1]])
    )
    assert placed.tolist() == [[0, 0]]
    beyond = broadcast_to_step_tokens(
        torch.tensor([5.0]), steps_of([0], [0.0]), torch.tensor([[0, 6]])
    )
    assert beyond.tolist() == [[5, 0]]


def test_every_list_of_a_row_needs_an_entry_per_turn():
    for lengths in ((1, 2, 2), (2, 1, 2), (2, 2, 1)):
        rewards, numbers, anchors = ([[0] * n] for n in lengths)
        with pytest.raises(ValueError, check=mentions("row 0")):
            flatten_steps(["a"], ["x"], rewards, numbers, anchors)


def advantages_of_two(rewards, **kwargs):
    """Return the advantages of two trajectories of one task. Each has one token and one turn, from
    the same state unless ``different_states`` is given."""
    return compute_gigpo_outcome_advantage(
        torch.tensor(rewards).unsqueeze(-1),
        torch.ones(2, 1),
        ["a", "a"],
        ["x", "y"],
        torch.zeros(2, 1, dtype=torch.long),
        [[reward] for reward in rewards],
        [[0], [0]],
        [["s"], ["t"]] if kwargs.pop("different_states", False) else [["s"], ["s"]],
        **kwargs,
    )[0].flatten()


def test_epsilon_is_added_at_both_levels():
    advantages = advantages_of_two([0.0, 2.0], mode="mean_std_norm", epsilon=1.0)
    assert advantages[1].item() == pytest.approx(2 / (math.sqrt(2) + 1))
    tiny = advantages_of_two([0.0, 2e-6], mode="mean_std_norm")
    assert tiny[1].item() == pytest.approx(2 / (math.sqrt(2) + 1), rel=1e-4)


def test_default_weight_adds_trajectory_and_turn_advantages():
    assert advantages_of_two([0.0, 2.0]).tolist() == [-2, 2]  # 1 of the trajectory, 1 of the turn
    assert advantages_of_two([0.0, 2.0], different_states=True).tolist() == [-1, 1]
    assert advantages_of_two([0.0, 2.0], step_advantage_w=3.0).tolist() == [-4, 4]


def test_default_gamma_of_turns_is_0_95():
    advantages, _ = compute_gigpo_outcome_advantage(
        torch.tensor([[0.0, 1.0], [0.0, 0.0]]),
        torch.ones(2, 2),
        ["a", "a"],
        ["x", "y"],
        torch.tensor([[0, 1], [0, 1]]),
        [[0.0, 1.0], [0.0, 0.0]],
        [[0, 1], [0, 1]],
        [["s", "t"], ["s", "u"]],
    )
    assert advantages[0].tolist() == pytest.approx([0.5 + 0.95 / 2, 0.5])


def test_default_similarity_threshold_merges_nearly_equal_states():
    common_text = "x" * 19
    states = [["s" + common_text], ["t" + common_text]]
    arguments = (
        torch.tensor([[0.0], [2.0]]),
        torch.ones(2, 1),
        ["a", "a"],
        ["x", "y"],
        torch.zeros(2, 1, dtype=torch.long),
        [[0.0], [2.0]],
        [[0], [0]],
        states,
    )
    merged, _ = compute_gigpo_outcome_advantage(*arguments, enable_similarity=True)
    assert merged.flatten().tolist() == [-2, 2]
    unmerged, _ = compute_gigpo_outcome_advantage(*arguments)
    assert unmerged.flatten().tolist() == [-1, 1]
