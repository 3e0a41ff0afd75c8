"""GDPO, pass@k, GraphGPO and HGPO estimators against numbers by hand."""

import math

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.algos import (
    compute_gdpo_outcome_advantage,
    compute_gigpo_outcome_advantage,
    compute_graphgpo_outcome_advantage,
    compute_grpo_passk_outcome_advantage,
    compute_hgpo_outcome_advantage,
)


def rows(*returns):
    """Return rewards and mask [B, 3] with the whole return on the first token."""
    rewards = torch.zeros(len(returns), 3)
    rewards[:, 0] = torch.tensor(returns)
    return rewards, torch.ones(len(returns), 3)


def first_tokens(result):
    advantages, returns = result
    assert torch.equal(advantages, returns)
    return advantages[:, 0].tolist()


# ---------------------------------------------------------------- pass@k


def test_only_the_best_trajectory_of_a_group_has_an_advantage():
    rewards, mask = rows(1.0, 2.0, 3.0, 2.0, 0.0, 5.0)
    index = ["a", "b", "a", "b", "a", "c"]
    advantages = compute_grpo_passk_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    )
    assert first_tokens(advantages) == [0, 0, 2, 0, 0, 0]
    divided = compute_grpo_passk_outcome_advantage(rewards, mask, index)
    assert first_tokens(divided) == pytest.approx([0, 0, 2 / math.sqrt(7 / 3), 0, 0, 0], rel=1e-5)


def test_rows_of_the_best_trajectory_do_not_compete():
    rewards, mask = rows(3.0, 3.0, 1.0)
    names = ["best", "best", "other"]
    advantages = compute_grpo_passk_outcome_advantage(
        rewards, mask, ["a"] * 3, names, norm_adv_by_std_in_grpo=False
    )
    assert first_tokens(advantages) == [2, 2, 0]


def test_every_group_has_a_best_trajectory_at_any_position():
    rewards, mask = rows(1.0, 3.0, 5.0, 2.0)
    index = ["a", "a", "b", "b"]
    advantages = compute_grpo_passk_outcome_advantage(
        rewards, mask, index, norm_adv_by_std_in_grpo=False
    )
    assert first_tokens(advantages) == [0, 2, 3, 0]
    # a difference of d has the std d / sqrt(2)
    advantages = compute_grpo_passk_outcome_advantage(rewards, mask, index, epsilon=1.0)
    root = math.sqrt(2)
    assert first_tokens(advantages) == pytest.approx([0, 2 / (root + 1), 3 / (3 / root + 1), 0])


# ---------------------------------------------------------------- several rewards

PARTS = [
    {"accuracy": 1.0, "format": 0.0},
    {"accuracy": 0.0, "format": 100.0},
    {"accuracy": 1.0, "format": 5.0},
    {"accuracy": 0.0, "format": 1.0},
]
TWO_TASKS = ["a", "a", "b", "b"]


def gdpo(parts=PARTS, index=TWO_TASKS, keys=("accuracy", "format"), **kwargs):
    return first_tokens(
        compute_gdpo_outcome_advantage(torch.ones(len(parts), 2), index, parts, keys, **kwargs)
    )


def test_gdpo_rewards_have_equal_influence_at_any_scale():
    root = math.sqrt(2)
    scale = math.sqrt(4 / 3)  # of 0, 0, root 2 and -root 2
    assert gdpo() == pytest.approx([0, 0, root / scale, -root / scale], abs=1e-5)


def test_gdpo_rewards_are_weighted_after_normalisation():
    expected = math.sqrt(0.5) / math.sqrt(4 * 0.5 / 3)
    only_first = [expected, -expected, expected, -expected]
    assert gdpo(weights=[1.0, 0.0]) == pytest.approx(only_first, rel=1e-4)
    assert gdpo(keys=["accuracy"]) == pytest.approx(only_first, rel=1e-4)


def test_gdpo_without_division_keeps_the_scale():
    # 0.5 - 50, -0.5 + 50, 0.5 + 2, -0.5 - 2
    totals = [-49.5, 49.5, 2.5, -2.5]
    scale = math.sqrt(sum(t * t for t in totals) / 3)
    advantages = gdpo(norm_adv_by_std_in_grpo=False)
    assert advantages == pytest.approx([t / scale for t in totals], rel=1e-4)


def test_gdpo_counts_a_trajectory_once():
    names = ["1", "1", "2", "3", "4"]
    advantages = gdpo([PARTS[0], *PARTS], ["a", *TWO_TASKS], traj_index=names)
    assert advantages[1:] == pytest.approx(gdpo(), abs=1e-5) and advantages[0] == advantages[1]


def test_gdpo_compares_trajectories_instead_of_rows():
    names = ["1", "1", "2", "3", "4"]
    parts = [PARTS[0], *PARTS]
    advantages = gdpo(parts, ["a", *TWO_TASKS], keys=["accuracy"], traj_index=names)
    assert advantages[1:] == pytest.approx(gdpo(keys=["accuracy"]), abs=1e-5)


def test_gdpo_adds_epsilon_to_both_stds():
    # GRPO gives +-1/2; over all four the std is sqrt(1/3)
    advantages = gdpo(keys=["accuracy"], norm_adv_by_std_in_grpo=False, epsilon=1.0)
    assert advantages[0] == pytest.approx(0.5 / (math.sqrt(1 / 3) + 1))
    normalised = 0.5 / (math.sqrt(0.5) + 1)
    advantages = gdpo(keys=["accuracy"], epsilon=1.0)
    assert advantages[0] == pytest.approx(normalised / (normalised * math.sqrt(4 / 3) + 1))


def test_gdpo_is_centred_on_the_whole_batch():
    # A single trajectory keeps its reward: 1/2, -1/2 and 3, whose mean is 1.
    parts = [{"accuracy": 1.0}, {"accuracy": 0.0}, {"accuracy": 3.0}]
    advantages = gdpo(parts, ["a", "a", "b"], ["accuracy"], norm_adv_by_std_in_grpo=False)
    scale = math.sqrt((0.25 + 2.25 + 4) / 2)
    assert advantages == pytest.approx([-0.5 / scale, -1.5 / scale, 2 / scale], rel=1e-5)


def test_gdpo_keeps_small_differences_of_large_numbers():
    steps = [{"steps": 2.0**24 + 1}, {"steps": 2.0**24}]
    root = math.sqrt(0.5)
    assert gdpo(steps, ["a", "a"], ["steps"]) == pytest.approx([root, -root], rel=1e-5)
    parts = [{"a": 1.0, "b": 1.0, "c": 1.0}, {"a": 0.0, "b": 0.0, "c": 0.0}]
    options = {"weights": [1e9, 1.0, -1e9], "norm_adv_by_std_in_grpo": False}
    advantages = gdpo(parts, ["a", "a"], ["a", "b", "c"], **options)
    assert advantages == pytest.approx([root, -root], rel=1e-5)


def test_gdpo_lists_the_available_rewards():
    with pytest.raises(ValueError, check=mentions("'speed'", "accuracy", "format")):
        gdpo(keys=["speed"])


def test_gdpo_names_the_reward_that_a_row_lacks():
    with pytest.raises(ValueError, check=mentions("row 1", "'format'", "accuracy")):
        gdpo([PARTS[0], {"accuracy": 1.0}], ["a", "a"])
    with pytest.raises(ValueError, check=mentions("row 0")):
        gdpo([{}], ["a"])


def test_gdpo_needs_a_weight_for_every_reward():
    with pytest.raises(ValueError, check=mentions("zip")):
        gdpo(weights=[1.0])


# ---------------------------------------------------------------- steps

# A trajectory of three turns is one row of three tokens.
SUCCESS = ["A", "B", "C"]
SHORT_CUT = ["A", "C", "D"]
IDLE = ["A", "A", "B"]


def columns(states, rewards, uid="u"):
    """Return the keyword arguments of a step estimator. The last turn has the reward."""
    count = len(states)
    outcome, mask = rows(*rewards)
    return {
        "token_level_rewards": outcome,
        "response_mask": mask,
        "index": [uid] * count,
        "traj_index": [f"{uid}{k}" for k in range(count)],
        "step_ids": torch.arange(3).expand(count, 3),
        "step_rewards": [[0.0, 0.0, reward] for reward in rewards],
        "step_index": [[0, 1, 2]] * count,
        "anchor_obs": states,
    }


def join_columns(first, second):
    def join(a, b):
        return torch.cat([a, b]) if isinstance(a, torch.Tensor) else [*a, *b]

    return {key: join(first[key], second[key]) for key in first}


TRAJECTORIES = columns([SUCCESS, SHORT_CUT, IDLE], [1.0, 0.0, 0.0])
# Distances to the goal: goal 0, C 1, B 2, A 2 by the short cut. Returns are 10 * 0.1^d of the next
# state: SUCCESS 0.1 1 10, SHORT_CUT 1 0 0, IDLE 0.1 0.1 0. A has the mean 0.325, B 0.5, C 5.
STEPS = [[-0.225, 0.5, 5.0], [0.675, -5.0, 0.0], [-0.225, -0.225, -0.5]]
OUTCOMES = [2 / 3, -1 / 3, -1 / 3]


def graphgpo(arguments, won, **kwargs):
    advantages, returns = compute_graphgpo_outcome_advantage(**arguments, won=won, **kwargs)
    assert torch.equal(advantages, returns)
    return advantages


def test_turn_is_valued_by_the_progress_to_a_successful_end():
    advantages = graphgpo(TRAJECTORIES, [True, False, False], mode="mean_norm")
    expected = torch.tensor(STEPS) + torch.tensor(OUTCOMES)[:, None]
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


def test_graphgpo_weight_gamma_and_goal_value_by_hand():
    options = {"mode": "mean_norm", "step_advantage_w": 0.5, "gamma": 0.5, "goal_value": 4.0}
    advantages = graphgpo(TRAJECTORIES, [True, False, False], **options)
    # 4 * 0.5^d: at B 2 and 0, at C 4 and 0
    assert advantages[0, 1].item() == pytest.approx(2 / 3 + 0.5 * 1.0)
    assert advantages[1, 1].item() == pytest.approx(-1 / 3 - 0.5 * 2.0)


def test_graphgpo_divides_groups_by_their_std():
    advantages = graphgpo(TRAJECTORIES, [True, False, False])
    std_of_outcomes = math.sqrt((4 + 1 + 1) / 9 / 2)
    expected = 2 / 3 / std_of_outcomes + 1 / math.sqrt(2)  # two turns: 5 / (5 sqrt 2)
    assert advantages[0, 2].item() == pytest.approx(expected, rel=1e-4)


def test_graphgpo_without_success_uses_the_outcome_alone():
    advantages = graphgpo(TRAJECTORIES, [False] * 3, mode="mean_norm")
    expected = torch.tensor(OUTCOMES)[:, None].expand(3, 3)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)


def test_graphgpo_tasks_share_neither_states_nor_goals():
    other = columns([SUCCESS, SHORT_CUT, IDLE], [0.0, 0.0, 0.0], uid="v")
    advantages = graphgpo(join_columns(TRAJECTORIES, other), [True] + [False] * 5, mode="mean_norm")
    single_task = graphgpo(TRAJECTORIES, [True, False, False], mode="mean_norm")
    torch.testing.assert_close(advantages[:3], single_task)
    assert not advantages[3:].any()


def one_row_per_turn(arguments):
    """Return trajectories as rows of one turn each, as ``env.history=window`` makes them, last row
    first."""
    states = arguments["anchor_obs"]
    count = len(states)
    lists = {
        "traj_index": [f"u{k}" for k in range(count) for _ in range(3)],
        "step_rewards": [[reward] for row in arguments["step_rewards"] for reward in row],
        "step_index": [[0], [1], [2]] * count,
        "anchor_obs": [[state] for row in states for state in row],
    }
    return {
        "token_level_rewards": arguments["token_level_rewards"].repeat_interleave(3, 0).flip(0),
        "response_mask": torch.ones(3 * count, 3),
        "index": ["u"] * 3 * count,
        "step_ids": torch.tensor([0, 1, 2] * count).flip(0)[:, None].expand(3 * count, 3),
    } | {name: column[::-1] for name, column in lists.items()}


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_graphgpo_of_several_rows_equals_that_of_one_row(mode):
    whole = graphgpo(TRAJECTORIES, [True, False, False], mode=mode)
    won = [False] * 6 + [True] * 3
    advantages = graphgpo(one_row_per_turn(TRAJECTORIES), won, mode=mode)[:, 0].flip(0)
    assert advantages.tolist() == pytest.approx(whole.flatten().tolist(), abs=1e-6)


def test_graphgpo_first_state_may_have_no_predecessor():
    # goal 0, C 1, A 2: from A 0.1 by B and 1 by C; from C 10 and 0
    states = columns([SUCCESS, SHORT_CUT], [0.0, 0.0])
    advantages = graphgpo(states, [True, False], mode="mean_norm")
    expected = torch.tensor([[-0.45, 0.0, 5.0], [0.45, -5.0, 0.0]])
    torch.testing.assert_close(advantages, expected, atol=1e-5, rtol=0)


def test_graphgpo_returns_may_be_large_and_nearly_equal():
    # 1e8 minus 2 and minus 1
    options = {"mode": "mean_norm", "gamma": 1 - 1e-8, "goal_value": 1e8}
    advantages = graphgpo(columns([SUCCESS, SHORT_CUT], [0.0, 0.0]), [True, False], **options)
    assert advantages[:, 0].tolist() == pytest.approx([-0.5, 0.5], abs=1e-5)


def test_graphgpo_adds_epsilon_to_both_stds():
    advantages = graphgpo(TRAJECTORIES, [True, False, False], epsilon=1.0)
    expected = 2 / 3 / (math.sqrt(1 / 3) + 1) + 5 / (5 * math.sqrt(2) + 1)
    assert advantages[0, 2].item() == pytest.approx(expected, rel=1e-5)


@pytest.mark.parametrize(
    "estimator", [compute_graphgpo_outcome_advantage, compute_hgpo_outcome_advantage]
)
def test_unknown_mode_is_refused(estimator):
    extra = {"won": [True] * 3} if estimator is compute_graphgpo_outcome_advantage else {}
    with pytest.raises(ValueError, check=mentions("mode")):
        estimator(**TRAJECTORIES, **extra, mode="mean")


# ---------------------------------------------------------------- contexts

# Returns with gamma 1: 1 for all turns of the first trajectory, 0 for the others. State B is
# reached twice from A and once from C.
CONTEXTS = columns([["A", "B", "E"], ["C", "B", "E"], ["A", "B", "F"]], [1.0, 0.0, 0.0])


def hgpo(**kwargs):
    options = {"gamma": 1.0, "context": 1} | kwargs
    advantages, _ = compute_hgpo_outcome_advantage(**CONTEXTS, **options)
    return advantages - torch.tensor(OUTCOMES)[:, None] * ("mode" not in kwargs)


def test_hgpo_compares_turns_by_state_and_context():
    # level 0: A +-1/2; B 2/3 -1/3 -1/3; E +-1/2
    # level 1: A +-1/2; B after A +-1/2; E after B +-1/2
    third = 1 / 3
    expected = [
        [0.5, third * 2 / 3 + 2 * third * 0.5, 0.5],
        [0.0, third * -third, -0.5],
        [-0.5, third * -third + 2 * third * -0.5, 0.0],
    ]
    torch.testing.assert_close(hgpo(), torch.tensor(expected), atol=1e-6, rtol=0)


def test_alpha_weights_longer_contexts():
    uniform = hgpo(alpha=0.0)
    assert uniform[1, 1].item() == pytest.approx(-1 / 6, abs=1e-6)
    assert hgpo(alpha=2.0)[1, 1].item() == pytest.approx(-1 / 15, abs=1e-6)
    # level 2: E after B after A, and E after B after C, have no other members
    assert hgpo(context=2)[0, 2].item() == pytest.approx(0.25, abs=1e-6)


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_hgpo_without_context_is_gigpo(mode):
    options = {"gamma": 0.9, "mode": mode, "step_advantage_w": 0.7}
    advantages, _ = compute_hgpo_outcome_advantage(**TRAJECTORIES, context=0, **options)
    expected, _ = compute_gigpo_outcome_advantage(**TRAJECTORIES, **options)
    torch.testing.assert_close(advantages, expected)


def test_hgpo_divides_each_level_by_its_std():
    # B after A: +-1/2 over sqrt(1/2); B: 2/3 over sqrt(1/3)
    advantages = hgpo(mode="mean_std_norm", step_advantage_w=1.0)[0, 1].item()
    outcome = 2 / 3 / math.sqrt(1 / 3)
    level_0 = 2 / 3 / math.sqrt(1 / 3)
    level_1 = 0.5 / math.sqrt(0.5)
    assert advantages == pytest.approx(outcome + level_0 / 3 + 2 * level_1 / 3, rel=1e-4)


def test_hgpo_adds_epsilon_to_all_stds():
    advantages = hgpo(mode="mean_std_norm", epsilon=1.0)[0, 1].item()
    third = 2 / 3 / (math.sqrt(1 / 3) + 1)  # of the outcome, and of B
    level_1 = 0.5 / (math.sqrt(0.5) + 1)
    assert advantages == pytest.approx(third + third / 3 + 2 * level_1 / 3, rel=1e-5)


@pytest.mark.parametrize("mode", ["mean_norm", "mean_std_norm"])
def test_hgpo_of_several_rows_equals_that_of_one_row(mode):
    second = columns(TRAJECTORIES["anchor_obs"], [0.0, 1.0, 0.0])
    whole, _ = compute_hgpo_outcome_advantage(**second, mode=mode)
    advantages, _ = compute_hgpo_outcome_advantage(**one_row_per_turn(second), mode=mode)
    assert advantages[:, 0].flip(0).tolist() == pytest.approx(whole.flatten().tolist(), abs=1e-6)


def test_hgpo_adds_the_outcome_of_the_row():
    second = columns([["A", "B", "C"]] * 3, [0.0, 1.0, 0.0])
    advantages, _ = compute_hgpo_outcome_advantage(**second, step_advantage_w=0.0)
    expected = torch.tensor([-1 / 3, 2 / 3, -1 / 3])[:, None].expand(3, 3)
    torch.testing.assert_close(advantages, expected, atol=1e-6, rtol=0)


def test_hgpo_defaults_are_two_states_of_context_and_gamma_0_95():
    advantages, _ = compute_hgpo_outcome_advantage(**CONTEXTS, gamma=1.0)
    # E: 1/2 at levels 0 and 1, nothing at level 2, with weights 1, 2, 3
    assert advantages[0, 2].item() - 2 / 3 == pytest.approx(1.5 / 6, abs=1e-6)
    advantages, _ = compute_hgpo_outcome_advantage(**CONTEXTS)
    assert advantages[0, 0].item() - 2 / 3 == pytest.approx(0.95**2 / 2, abs=1e-6)
