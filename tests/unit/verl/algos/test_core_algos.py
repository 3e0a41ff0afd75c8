"""Registries, group statistics and estimators against numbers computed by hand."""

import math
from typing import Any

import numpy as np
import pytest
import torch

from tests.helpers.refusals import mentions, suggests
from verl.algos import (
    AdvantageEstimator,
    compute_group_stats,
    compute_row_shares,
    find_missing_inputs,
    get_adv_estimator_fn,
    get_policy_loss_fn,
    register_adv_est,
)
from verl.trainer.ppo import core_algos as algos


def outcome(scores, width=3, lengths=None):
    """Return rewards and mask of rows whose whole reward is on the last sampled token."""
    lengths = lengths or [width] * len(scores)
    mask = torch.tensor([[int(t < n) for t in range(width)] for n in lengths])
    rewards = torch.zeros(len(scores), width)
    for row, (score, n) in enumerate(zip(scores, lengths, strict=True)):
        rewards[row, n - 1] = score
    return rewards, mask


def first_column(result):
    return result[0][:, 0].tolist()


def objects(*rows):
    array = np.empty(len(rows), dtype=object)
    array[:] = rows
    return array


INDEX = np.array(["a", "a", "a", "b", "b"], dtype=object)
SCORES = [1.0, 2.0, 6.0, 5.0, 5.0]


# ---------------------------------------------------------------- registries


def test_every_estimator_is_registered_and_declares_its_inputs():
    import rlvcr.core_rlvcr  # noqa: F401  (registers rlvcr and copo)

    for name in AdvantageEstimator:
        estimator = get_adv_estimator_fn(name)
        rewards = "reward_parts" if name == "gdpo" else "token_level_rewards"
        assert rewards in estimator.inputs
        assert all(path.startswith("algorithm.") for path in estimator.params.values())
    assert get_adv_estimator_fn("grpo").inputs["index"] == "uid"
    assert get_adv_estimator_fn("gae").params == {
        "gamma": "algorithm.gamma",
        "lam": "algorithm.lam",
    }
    assert get_policy_loss_fn("vanilla") is algos.compute_policy_loss_vanilla


def test_unknown_names_list_the_allowed_and_the_nearest():
    with pytest.raises(ValueError, check=suggests("grpo", "'grppo'", "gae")):
        get_adv_estimator_fn("grppo")
    with pytest.raises(ValueError, check=mentions("loss_mode", "vanilla")):
        get_policy_loss_fn("vanila")


def test_missing_inputs_are_the_required_columns_only():
    estimator = get_adv_estimator_fn("gigpo")
    assert find_missing_inputs(
        estimator, {"token_level_rewards", "response_mask", "uid", "traj_uid", "step_ids"}
    ) == [
        "anchor_obs",
        "step_index",
        "step_rewards",
    ]
    assert (
        find_missing_inputs(
            get_adv_estimator_fn("grpo"), {"token_level_rewards", "response_mask", "uid"}
        )
        == []
    )


def test_user_estimator_is_registered_with_conventional_inputs(monkeypatch):
    monkeypatch.setattr("verl.algos.algorithm_registry.ADV_ESTIMATORS", {})

    @register_adv_est("mine", params={"gamma": "algorithm.gamma"})
    def mine(token_level_rewards, response_mask, gamma, index=None):
        return token_level_rewards, token_level_rewards

    assert get_adv_estimator_fn("mine").inputs == {
        "token_level_rewards": "token_level_rewards",
        "response_mask": "response_mask",
        "index": "uid?",
    }

    def other(token_level_rewards):
        return token_level_rewards, token_level_rewards

    def warm(token_level_rewards, temperature):
        return token_level_rewards / temperature, token_level_rewards

    with pytest.raises(ValueError, check=mentions("mine")):
        register_adv_est("mine")(other)
    with pytest.raises(ValueError, check=mentions("temperature")):
        register_adv_est("other")(warm)
    with pytest.raises(ValueError, check=mentions("beta")):
        register_adv_est("other", params={"beta": "x"})(other)


# ---------------------------------------------------------------- groups


def test_group_mean_std_by_hand():
    stats = compute_group_stats(
        torch.tensor([1.0, 10.0, 3.0, 8.0, 7.0]), torch.tensor([0, 1, 0, 1, 2])
    )
    assert stats.mean.tolist() == [2, 9, 2, 9, 7]
    assert stats.std.tolist() == pytest.approx([math.sqrt(2)] * 4 + [0])
    assert stats.count.tolist() == [2, 2, 2, 2, 1]


def test_equal_values_have_exact_mean_and_zero_std():
    value = torch.tensor(0.1).double()
    stats = compute_group_stats(value.repeat(7), torch.zeros(7, dtype=torch.long))
    assert (stats.mean == value).all() and (stats.std == 0).all()


def test_row_shares_by_hand():
    traj = ["x", "y", "x", "x"]
    tokens = torch.tensor([1, 5, 2, 3])
    assert compute_row_shares(traj, "row", tokens).tolist() == [1, 1, 1, 1]
    by_trajectory = compute_row_shares(traj, "trajectory", tokens)
    assert by_trajectory.tolist() == pytest.approx([1 / 6, 1, 2 / 6, 3 / 6])


# ---------------------------------------------------------------- outcome estimators


def test_grpo_by_hand():
    rewards, mask = outcome(SCORES, lengths=[3, 2, 3, 1, 3])
    std = math.sqrt((4 + 1 + 9) / 2)
    advantages, returns = algos.compute_grpo_outcome_advantage(rewards, mask, INDEX)
    assert advantages[:, 0].tolist() == pytest.approx([-2 / std, -1 / std, 3 / std, 0, 0], rel=1e-5)
    assert advantages[1].tolist() == pytest.approx([-1 / std, -1 / std, 0], rel=1e-5)
    assert returns is advantages
    plain = algos.compute_grpo_outcome_advantage(
        rewards, mask, INDEX, norm_adv_by_std_in_grpo=False
    )
    assert first_column(plain) == [-2, -1, 3, 0, 0]


def test_grpo_counts_a_trajectory_with_several_rows_once():
    rewards, mask = outcome([1.0, 1.0, 1.0, 4.0])
    advantages = algos.compute_grpo_outcome_advantage(
        rewards, mask, ["a"] * 4, norm_adv_by_std_in_grpo=False, traj_index=["t", "t", "t", "u"]
    )
    assert first_column(advantages) == [-1.5, -1.5, -1.5, 1.5]


def test_single_trajectory_keeps_its_return():
    rewards, mask = outcome([3.0])
    for name in ("grpo", "rloo", "opo"):
        assert first_column(
            get_adv_estimator_fn(name)(rewards, mask, index=["a"])
        ) == pytest.approx([3.0], rel=1e-5)


def test_rloo_by_hand():
    rewards, mask = outcome(SCORES)
    expected = [1 - (2 + 6) / 2, 2 - (1 + 6) / 2, 6 - (1 + 2) / 2, 0, 0]
    assert first_column(
        algos.compute_rloo_outcome_advantage(rewards, mask, INDEX)
    ) == pytest.approx(expected)


def test_opo_weights_the_baseline_by_tokens():
    rewards, mask = outcome([1.0, 4.0], lengths=[1, 2])
    baseline = (1 * 1 + 2 * 4) / 3
    assert first_column(
        algos.compute_opo_outcome_advantage(rewards, mask, ["a", "a"])
    ) == pytest.approx([1 - baseline, 4 - baseline])


def test_gpg_scales_by_the_share_of_non_zero_returns():
    rewards, mask = outcome([0.0, 2.0, 0.0, 0.0])
    result = algos.compute_gpg_outcome_advantage(rewards, mask, ["a", "a", "b", "b"])
    assert first_column(result) == [-4.0, 4.0, 0.0, 0.0]  # alpha = 4 / 1


def test_reinforce_plus_plus_baseline_whitens_over_sampled_tokens():
    rewards, mask = outcome([0.0, 2.0], width=2, lengths=[1, 2])
    advantages, _ = algos.compute_reinforce_plus_plus_baseline_outcome_advantage(
        rewards, mask, ["a", "a"]
    )
    mean, var = 1 / 3, 4 / 3  # of -1, 1, 1
    expected = [[(-1 - mean) / math.sqrt(var), 0], [(1 - mean) / math.sqrt(var)] * 2]
    torch.testing.assert_close(advantages, torch.tensor(expected))


# ---------------------------------------------------------------- token-level estimators


def reference_gae(rewards, values, gamma, lam):
    advantages, running, following = [], 0.0, 0.0
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        running = reward + gamma * following - value + gamma * lam * running
        following = value
        advantages.insert(0, running)
    return advantages


def test_gae_skips_unsampled_tokens():
    rewards = torch.tensor(
        [[0.0, 1.0, 0.0, 2.0, 0.0]]
    )  # the 2 is on an unsampled token after the second segment
    values = torch.tensor([[0.5, 0.3, 9.0, 0.2, 9.0]])
    mask = torch.tensor([[1, 1, 0, 1, 0]])
    advantages, returns = algos.compute_gae_advantage_return(
        rewards, values, mask, gamma=0.9, lam=0.8
    )
    expected = torch.tensor(reference_gae([0.0, 1.0, 2.0], [0.5, 0.3, 0.2], 0.9, 0.8))
    sampled = mask.bool()
    torch.testing.assert_close(returns[sampled], expected + torch.tensor([0.5, 0.3, 0.2]))
    torch.testing.assert_close(advantages[sampled], (expected - expected.mean()) / expected.std())
    assert (advantages[~sampled] == 0).all() and (returns[~sampled] == 0).all()


def test_reward_on_an_unsampled_token_moves_to_the_token_before():
    mask = torch.tensor([[1, 1, 0, 1]])
    values = torch.zeros(1, 4)
    on_token = algos.compute_gae_advantage_return(
        torch.tensor([[0.0, 1.0, 0.0, 0.0]]), values, mask, 0.9, 0.9
    )
    after_it = algos.compute_gae_advantage_return(
        torch.tensor([[0.0, 0.0, 1.0, 0.0]]), values, mask, 0.9, 0.9
    )
    torch.testing.assert_close(on_token, after_it)


def test_reinforce_plus_plus_discounts_over_sampled_tokens():
    rewards = torch.tensor([[0.0, 0.0, 0.0, 1.0]])
    mask = torch.tensor([[1, 0, 1, 1]])
    _, returns = algos.compute_reinforce_plus_plus_outcome_advantage(rewards, mask, gamma=0.5)
    assert returns.tolist() == [[0.25, 0.0, 0.5, 1.0]]


def test_remax_subtracts_the_greedy_return():
    rewards, mask = outcome([1.0, 0.0], width=2)
    advantages, returns = algos.compute_remax_outcome_advantage(
        rewards, torch.tensor([0.5, 0.25]), mask
    )
    assert returns.tolist() == [[1, 1], [0, 0]]
    assert advantages.tolist() == [[0.5, 0.5], [-0.25, -0.25]]


# ---------------------------------------------------------------- GiGPO

# Two trajectories of two and three turns. State "s" is seen three times, "q" and "r" once.
APPEND: dict[str, Any] = {
    "index": objects("a", "a"),
    "traj_index": objects("t", "u"),
    "step_ids": torch.tensor([[0, 1, 1, -1, -1], [0, -1, 1, 2, -1]]),
    "step_rewards": objects([0.0, 1.0], [0.0, 0.0, 4.0]),
    "step_index": objects([0, 1], [0, 1, 2]),
    "anchor_obs": objects(["s", "q"], ["s", "s", "r"]),
}
APPEND_MASK = (APPEND["step_ids"] >= 0).long()
APPEND_REWARDS = torch.tensor([[0.0, 0, 1, 0, 0], [0, 0, 0, 4, 0]])


def test_gigpo_by_hand():
    result, _ = algos.compute_gigpo_outcome_advantage(
        APPEND_REWARDS, APPEND_MASK, **APPEND, step_advantage_w=2.0, mode="mean_norm", gamma=0.5
    )
    # Discounted returns at s: 0.5 (t0), 1 (u0), 2 (u1); mean 7/6. Trajectories: 1 and 4, mean 2.5.
    mean = 3.5 / 3
    expected = torch.tensor(
        [
            [-1.5 + 2 * (0.5 - mean), -1.5, -1.5, 0, 0],
            [1.5 + 2 * (1 - mean), 0, 1.5 + 2 * (2 - mean), 1.5, 0],
        ]
    )
    torch.testing.assert_close(result, expected)


def test_gigpo_mean_std_norm_divides_at_both_levels():
    result, _ = algos.compute_gigpo_outcome_advantage(
        APPEND_REWARDS, APPEND_MASK, **APPEND, mode="mean_std_norm", gamma=0.5
    )
    at_s = torch.tensor([0.5, 1.0, 2.0])
    trajectory = 1.5 / torch.tensor([1.0, 4.0]).std()
    assert result[0, 0].item() == pytest.approx(
        float(-trajectory + (0.5 - at_s.mean()) / at_s.std()), rel=1e-5
    )
    assert result[0, 1].item() == pytest.approx(float(-trajectory), rel=1e-5)  # q was seen once


def test_gigpo_gives_the_same_advantages_with_one_row_per_turn():
    whole, _ = algos.compute_gigpo_outcome_advantage(
        APPEND_REWARDS, APPEND_MASK, **APPEND, gamma=0.5
    )
    rows = [(0, k) for k in range(2)] + [(1, k) for k in range(3)]
    step_ids = torch.tensor([[k, k] for _, k in rows])
    rewards = torch.tensor(
        [[0.0, (1.0, 4.0)[row]] for row, _ in rows]
    )  # every row has the whole return
    split, _ = algos.compute_gigpo_outcome_advantage(
        rewards,
        torch.ones(5, 2),
        index=objects(*["a"] * 5),
        traj_index=objects(*["tu"[row] for row, _ in rows]),
        step_ids=step_ids,
        step_rewards=objects(*[[APPEND["step_rewards"][row][k]] for row, k in rows]),
        step_index=objects(*[[k] for _, k in rows]),
        anchor_obs=objects(*[[APPEND["anchor_obs"][row][k]] for row, k in rows]),
        gamma=0.5,
    )
    for i, (row, k) in enumerate(rows):
        expected = whole[row][APPEND["step_ids"][row] == k][0]
        torch.testing.assert_close(split[i], expected.expand(2))


def test_gigpo_merges_similar_states():
    anchors = objects(["you see a mug 1", "q"], ["you see a mug 2", "w", "z"])
    arguments: dict[str, Any] = APPEND | {"anchor_obs": anchors}
    exact, _ = algos.compute_gigpo_outcome_advantage(
        APPEND_REWARDS, APPEND_MASK, **arguments, gamma=0.5
    )
    assert exact[0, 0].item() == -1.5
    merged, _ = algos.compute_gigpo_outcome_advantage(
        APPEND_REWARDS,
        APPEND_MASK,
        **arguments,
        gamma=0.5,
        enable_similarity=True,
        similarity_thresh=0.9,
    )
    assert merged[0, 0].item() == pytest.approx(-1.5 + (0.5 - 0.75))


def test_gigpo_refuses_unequal_turn_counts_and_unknown_modes():
    with pytest.raises(ValueError, check=mentions("row 0", 1, 2)):
        arguments: dict[str, Any] = APPEND | {"step_rewards": objects([0.0], [0.0, 0.0, 4.0])}
        algos.compute_gigpo_outcome_advantage(APPEND_REWARDS, APPEND_MASK, **arguments)
    with pytest.raises(ValueError, check=suggests("mean_norm", "gigpo.mode")):
        algos.compute_gigpo_outcome_advantage(
            APPEND_REWARDS, APPEND_MASK, **APPEND, mode="mean_nrom"
        )
