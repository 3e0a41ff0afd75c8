"""Groups and trajectories: names of any type, empty batches, rows with different scores."""

import math

import numpy as np
import pytest
import torch

from tests.helpers.refusals import mentions
from verl.algos import compute_group_stats, compute_row_shares, factorize_keys
from verl.algos.groups import SCORE_TOLERANCE, group_normalised_scores, merge_rows_to_trajectories


def test_keys_are_numbered_in_order_of_appearance():
    for names in (["b", "a", "b"], np.array(["b", "a", "b"]), iter(["b", "a", "b"])):
        numbers = factorize_keys(names)
        assert numbers.tolist() == [0, 1, 0]
        assert numbers.dtype == torch.long
    assert factorize_keys(torch.tensor([7, 7, 5])).tolist() == [0, 0, 1]
    assert factorize_keys([]).dtype == torch.long


def test_empty_batches_give_empty_results():
    stats = compute_group_stats(torch.zeros(0), torch.zeros(0, dtype=torch.long))
    assert [stats.mean.shape, stats.std.shape, stats.count.shape] == [(0,)] * 3
    empty = merge_rows_to_trajectories(torch.zeros(0), [])
    assert [empty.score.shape, empty.group.shape, empty.tokens.shape] == [(0,)] * 3
    assert compute_row_shares([], "trajectory", torch.ones(0)).shape == (0,)


def test_statistics_of_negative_and_positive_values():
    values = torch.tensor([-3.0, -1.0, 5.0])
    stats = compute_group_stats(values, torch.tensor([0, 0, 1]))
    assert stats.mean.tolist() == [-2, -2, 5]
    assert stats.std.tolist() == pytest.approx([math.sqrt(2), math.sqrt(2), 0])
    assert stats.count.tolist() == [2, 2, 1]
    assert stats.mean.dtype == torch.float64


def test_equal_values_far_from_zero_have_zero_std():
    far = torch.full((3,), 1e8 + 0.1, dtype=torch.float64)
    stats = compute_group_stats(far, torch.zeros(3, dtype=torch.long))
    assert torch.equal(stats.mean, far)
    assert stats.std.tolist() == [0, 0, 0]
    below = compute_group_stats(-far, torch.zeros(3, dtype=torch.long))
    assert torch.equal(below.mean, -far)


def test_rows_of_a_trajectory_are_merged():
    trajectories = merge_rows_to_trajectories(
        torch.tensor([3.0, 3.0, 3.0, -4.0]),
        ["a", "a", "a", "b"],
        ["x", "x", "x", "x"],
        torch.tensor([1, 2, 3, 4]),
    )
    # The name x in another group is another trajectory.
    assert trajectories.score.tolist() == [3, -4]
    assert trajectories.group.tolist() == [0, 1]
    assert trajectories.tokens.tolist() == [6, 4]
    assert trajectories.trajectory_of_row.tolist() == [0, 0, 0, 1]


def test_rows_of_a_trajectory_with_different_scores_are_refused():
    names = (["a", "a", "a", "b"], ["x", "y", "x", "x"])
    with pytest.raises(ValueError, check=mentions("'x'", 1, "row 2")):
        merge_rows_to_trajectories(torch.tensor([1.0, 5.0, 2.0, 9.0]), *names)
    with pytest.raises(ValueError, check=mentions("'x'", "-0.001", 0, "row 2", "step_rewards")):
        group_normalised_scores(torch.tensor([-1e-3, 5.0, 0.0, 9.0]), *names)
    # Rounding is tolerated: a difference of 1 is accepted for scores of 1e5, and refused for 1e3.
    rounded = merge_rows_to_trajectories(torch.tensor([1e5, 5.0, 1e5 + 1, 9.0]), *names)
    assert rounded.score[0].item() == 1e5 + 0.5
    with pytest.raises(ValueError, check=mentions("trajectory")):
        merge_rows_to_trajectories(torch.tensor([1e3, 5.0, 1e3 + 1, 9.0]), *names)


def test_score_tolerance_is_absolute_for_small_rewards():
    names = (["a", "a"], ["x", "x"])
    merge_rows_to_trajectories(torch.tensor([0.0, SCORE_TOLERANCE], dtype=torch.float64), *names)
    with pytest.raises(ValueError, check=mentions("trajectory")):
        merge_rows_to_trajectories(
            torch.tensor([0.0, 1.5 * SCORE_TOLERANCE], dtype=torch.float64), *names
        )


def test_equal_rows_keep_exactly_their_score():
    scores = torch.full((3,), 0.1, dtype=torch.float64)
    assert merge_rows_to_trajectories(scores, ["a"] * 3, ["x"] * 3).score.tolist() == [0.1]
    assert merge_rows_to_trajectories(-scores, ["a"] * 3, ["x"] * 3).score.tolist() == [-0.1]


def test_without_names_every_row_is_a_trajectory():
    trajectories = merge_rows_to_trajectories(torch.tensor([1.0, 2.0]), ["a", "a"])
    assert trajectories.trajectory_of_row.tolist() == [0, 1]
    assert trajectories.tokens.tolist() == [0, 0]
    with pytest.raises(ValueError, check=mentions(2, 3, 3)):
        merge_rows_to_trajectories(torch.zeros(2), ["a", "a", "a"])
    with pytest.raises(ValueError, check=mentions(2, 2, 1)):
        merge_rows_to_trajectories(torch.zeros(2), ["a", "a"], ["x"])


def test_epsilon_is_added_to_the_std():
    scores = torch.tensor([0.0, 2.0, 5.0])
    scaled = group_normalised_scores(scores, ["a", "a", "b"], epsilon=1.0)
    expected = 1 / (math.sqrt(2) + 1)
    assert scaled.tolist() == pytest.approx([-expected, expected, 2.5])
    by_default = group_normalised_scores(torch.tensor([0.0, 2e-6]), ["a", "a"])
    assert by_default[1].item() == pytest.approx(1 / (math.sqrt(2) + 1), rel=1e-4)


def test_row_share_is_one_or_its_part_of_the_trajectory():
    names = ["x", "x", "y"]
    tokens = torch.tensor([1, 3, 2])
    assert compute_row_shares(names, "row", tokens).tolist() == [1, 1, 1]
    shares = compute_row_shares(names, "trajectory", tokens)
    assert shares.tolist() == [0.25, 0.75, 1]
    assert shares.dtype == torch.float32


def test_rows_without_sampled_tokens_have_no_share():
    token_counts = torch.tensor([0, 0, 1])
    assert compute_row_shares(["x", "x", "y"], "trajectory", token_counts).tolist() == [0, 0, 1]


def test_a_share_of_one_third_is_rounded_once():
    shares = compute_row_shares(["x", "x", "x"], "trajectory", torch.ones(3))
    assert shares.tolist() == [torch.tensor(1 / 3).item()] * 3
