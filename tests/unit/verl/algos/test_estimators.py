"""Edge cases of estimators: unsampled tokens, several rows per trajectory, and defaults."""

import math

import pytest
import torch

from verl.algos import (
    compute_gae_advantage_return,
    compute_gpg_outcome_advantage,
    compute_grpo_outcome_advantage,
    compute_opo_outcome_advantage,
    compute_reinforce_plus_plus_baseline_outcome_advantage,
    compute_reinforce_plus_plus_outcome_advantage,
    compute_remax_outcome_advantage,
    compute_rloo_outcome_advantage,
)


def rows(*returns, lengths=None):
    """Return rewards and mask [B, 3] with the whole return on the first token."""
    lengths = lengths or [3] * len(returns)
    mask = torch.tensor([[int(t < n) for t in range(3)] for n in lengths])
    rewards = torch.zeros(len(returns), 3)
    rewards[:, 0] = torch.tensor(returns)
    return rewards, mask


def first_tokens(result):
    return result[0][:, 0].tolist()


# ---------------------------------------------------------------- rewards where nothing was sampled


def test_reward_before_the_first_sampled_token_moves_to_that_token():
    rewards = torch.tensor([[1.0, 0.0, 0.0, 0.0], [3.0, 0.0, 2.0, 0.0]])
    mask = torch.tensor([[0, 0, 1, 1], [0, 1, 0, 0]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0, 0, 1, 0], [0, 5, 0, 0]]


def test_reward_on_a_sampled_first_token_stays_there():
    rewards = torch.tensor([[1.0, 0.0, 0.0]])
    mask = torch.tensor([[1, 1, 1]])
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[1, 0, 0]]


def test_row_without_sampled_tokens_has_zero_advantages():
    rewards = torch.tensor([[0.0, 5.0, 0.0], [0.0, 0.0, 1.0]])
    mask = torch.tensor([[0, 0, 0], [1, 1, 1]])
    advantages, returns = compute_remax_outcome_advantage(rewards, torch.tensor([1.0, 0.5]), mask)
    assert returns.tolist() == [[0, 0, 0], [1, 1, 1]]
    assert advantages.tolist() == [[0, 0, 0], [0.5, 0.5, 0.5]]


def test_rewards_and_masks_of_one_column():
    rewards = torch.tensor([[1.0], [3.0]])
    mask = torch.ones(2, 1)
    _, returns = compute_gae_advantage_return(rewards, torch.zeros(2, 1), mask, 1.0, 1.0)
    assert returns.tolist() == [[1.0], [3.0]]
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask)
    assert returns.tolist() == [[1.0], [3.0]]


def test_reinforce_plus_plus_does_not_discount_by_default():
    rewards, mask = rows(0.0)
    rewards[0, 2] = 2.0
    _, returns = compute_reinforce_plus_plus_outcome_advantage(rewards, mask)
    assert returns.tolist() == [[2, 2, 2]]


# ---------------------------------------------------------------- groups


def test_grpo_uses_the_given_epsilon():
    rewards, mask = rows(0.0, 2.0)
    halved, _ = compute_grpo_outcome_advantage(rewards, mask, ["a", "a"], epsilon=math.sqrt(2))
    assert halved[1].tolist() == pytest.approx([1 / (2 * math.sqrt(2))] * 3)
    tiny_rewards = 1e-4 * rewards
    divided, _ = compute_grpo_outcome_advantage(tiny_rewards, mask, ["a", "a"])
    assert divided[1, 0].item() == pytest.approx(1e-4 / (math.sqrt(2) * 1e-4 + 1e-6), rel=1e-5)


def test_rloo_of_two_and_three_trajectories():
    rewards, mask = rows(1.0, 4.0, 0.0, 3.0, 6.0)
    advantages = compute_rloo_outcome_advantage(rewards, mask, ["a", "a", "b", "b", "b"])
    assert first_tokens(advantages) == pytest.approx([-3, 3, -4.5, 0, 4.5])


def test_reinforce_plus_plus_baseline_counts_trajectories():
    rewards, mask = rows(4.0, 4.0, 0.0, 10.0, 0.0)
    index = ["a", "a", "a", "b", "b"]
    traj_ids = ["a/0", "a/0", "a/1", "b/0", "b/1"]
    advantages, returns = compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards, mask, index, traj_ids
    )
    centred = torch.tensor([2.0, 2.0, -2.0, 5.0, -5.0]).repeat_interleave(3)
    expected = (centred - centred.mean()) / centred.std()
    assert advantages.flatten().tolist() == pytest.approx(expected.tolist(), abs=1e-4)
    assert torch.equal(advantages, returns)


def test_whitening_of_equal_advantages_gives_zero():
    """A std near 0 would enlarge the rounding error of a float32 mean to visible advantages."""
    rewards, mask = rows(1.7, 0.0, lengths=[3, 0])
    advantages, _ = compute_reinforce_plus_plus_baseline_outcome_advantage(rewards, mask, [7, 7])
    assert first_tokens((advantages, advantages)) == pytest.approx([0, 0], abs=1e-9)


def test_opo_counts_the_tokens_of_whole_trajectories():
    rewards, mask = rows(4.0, 4.0, 1.0, lengths=[3, 1, 2])
    advantages = compute_opo_outcome_advantage(
        rewards, mask, ["a", "a", "a"], ["a/0", "a/0", "a/1"]
    )
    baseline = (4 * 4 + 2 * 1) / 6
    assert first_tokens(advantages) == pytest.approx([4 - baseline, 4 - baseline, 1 - baseline])


def test_opo_of_a_group_with_one_sampled_token_or_none():
    rewards, mask = rows(3.0, 1.0, lengths=[1, 0])
    assert first_tokens(compute_opo_outcome_advantage(rewards, mask, ["a", "a"])) == [0, 0]
    longer = torch.ones(2, 3, dtype=torch.long)
    assert first_tokens(compute_opo_outcome_advantage(rewards, longer, ["a", "a"])) == [1, -1]


def test_opo_of_equal_returns_is_exactly_zero():
    rewards, mask = rows(0.1, 0.1, 0.1, lengths=[3, 1, 2])
    assert first_tokens(compute_opo_outcome_advantage(rewards, mask, ["a", "a", "a"])) == [0, 0, 0]


def test_opo_of_a_single_trajectory_is_its_return():
    rewards, mask = rows(4.0, 4.0)
    advantages = compute_opo_outcome_advantage(rewards, mask, ["a", "a"], ["a/0", "a/0"])
    assert first_tokens(advantages) == [4, 4]


def test_gpg_by_hand():
    rewards, mask = rows(4.0, 4.0, 0.0, 2.0)
    index = ["a", "a", "a", "b"]
    traj_ids = ["a/0", "a/0", "a/1", "b/0"]
    advantages = compute_gpg_outcome_advantage(rewards, mask, index, traj_ids)
    assert first_tokens(advantages) == pytest.approx([3, 3, -3, 3])  # 3 of 2 trajectories count
    halved = compute_gpg_outcome_advantage(rewards, mask, index, traj_ids, f_norm=2.0)
    assert first_tokens(halved) == pytest.approx([1.5, 1.5, -1.5, 1.5])


def test_gpg_without_any_return_is_zero():
    rewards, mask = rows(0.0, 0.0)
    assert first_tokens(compute_gpg_outcome_advantage(rewards, mask, ["a", "a"])) == [0, 0]
