"""Tests of the rules for edge cases of RLVCR that need no model.

All rules. ``test_rlvcr_rules_scored`` tests those that need a model, ``test_scoring_equality`` rule
9, and ``test_forced_levels`` rule 13 for forced levels:

1. If all scores of a turn or all returns of a group are equal, the advantage is 0.
2. A turn with fewer than two scored thoughts has the thinking advantage 0.
3. A turn that cannot be parsed has the thinking advantage 0 and keeps its trajectory advantage.
4. An empty thought is scored and compared like any other.
5. A score is the mean over the tokens of the action, whether it has one token or many.
6. A trajectory alone in its group has its return as advantage, as in GRPO, and never NaN.
7. A turn is scored on its own action tokens, after its own history.
8. Batch size and packing do not change scores.
9. The pass with a shared prefix has the same scores as one forward pass per thought.
10. If two alternative thoughts are exchanged, their scores change.
11. All members of a group have the same task and start state.
12. Padding, the order of rows and their division into batches do not change advantages.
13. Forced tokens have no entropy, no token cost and no loss.
"""

import math

import pytest
import torch

from rlvcr.core_rlvcr import compute_rlvcr_outcome_advantage
from rlvcr.thinking import compute_reweight_factors, compute_thinking_advantage

MODES = ("mean_norm", "mean_std_norm")
COMBINE_RULES = ("additive", "gated", "success", "reweight")


def turn_advantage(scores, chosen_column, valid=(True,) * 4, thought_tokens=(0.0,) * 4, **options):
    advantage, _ = compute_thinking_advantage(
        torch.tensor([scores]),
        torch.tensor([valid]),
        torch.tensor([chosen_column]),
        torch.tensor([thought_tokens]),
        **options,
    )
    return advantage.item()


def estimate(scores, index, traj, thinking, mask=None, **options):
    """Return the estimator's advantages of rows with returns ``scores``; ``thinking`` is [B, R]."""
    thinking = torch.as_tensor(thinking)
    mask = torch.ones_like(thinking) if mask is None else torch.as_tensor(mask).to(thinking)
    rewards = torch.zeros_like(thinking)
    last = mask.sum(-1).long() - 1
    rewards[torch.arange(len(scores)), last] = torch.tensor(scores)
    factors = torch.where(thinking != 0, thinking.exp(), 0.0)
    return compute_rlvcr_outcome_advantage(
        rewards,
        mask,
        index,
        traj,
        thinking,
        torch.zeros_like(thinking),
        thinking_reweight=factors,
        **options,
    )[0]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("value", [-0.1, 1 / 3, -1e4])
def test_equal_scores_give_zero(mode, value):
    assert turn_advantage([value] * 4, 2, mode=mode, std_floor=0.0) == 0.0
    result = estimate([value] * 3, ["a"] * 3, ["t", "u", "v"], torch.zeros(3, 2), mode=mode)
    assert (result == 0).all()


@pytest.mark.parametrize("mode", MODES)
def test_fewer_than_two_valid_contexts_give_zero(mode):
    assert (
        turn_advantage([-1.0, -2.0, -3.0, -4.0], 0, valid=(True, False, False, False), mode=mode)
        == 0.0
    )
    assert turn_advantage([-1.0, -2.0, -3.0, -4.0], 0, valid=(False,) * 4, mode=mode) == 0.0
    assert turn_advantage([-1.0, math.nan, -math.inf, math.nan], 0, mode=mode) == 0.0
    assert (
        turn_advantage([-1.0, -2.0, -3.0, -4.0], 0, valid=(True, True, False, False), mode=mode)
        > 0.0
    )


@pytest.mark.parametrize("combine", COMBINE_RULES)
def test_unparsed_turn_gets_no_thinking_advantage(combine):
    assert turn_advantage([-1.0, -2.0, -3.0, -4.0], -1) == 0.0
    assert (
        turn_advantage([-1.0, -2.0, -3.0, -4.0], 1, valid=(True, False, True, True)) == 0.0
    )  # the context of the chosen level is missing
    result = estimate([1.0, 0.0], ["a", "a"], ["t", "u"], torch.zeros(2, 3), combine=combine)
    assert result.tolist() == [[0.5] * 3, [-0.5] * 3]


def test_empty_thought_is_compared_like_any_other():
    scores, thought_tokens = [-1.0, -2.0, -2.0, -3.0], (0.0, 5.0, 9.0, 0.0)
    assert turn_advantage(scores, 0, thought_tokens=thought_tokens) == 1.0
    assert (
        turn_advantage(scores, 3, thought_tokens=thought_tokens) == -1.0
    )  # level 4 with an empty thought
    assert turn_advantage(
        scores, 0, thought_tokens=thought_tokens, cost_coef=1.0, cost_max=10
    ) == pytest.approx(1.0 + (0.5 + 0.9) / 4)


@pytest.mark.parametrize("combine", COMBINE_RULES)
@pytest.mark.parametrize("mode", MODES)
def test_trajectory_alone_in_its_group_keeps_its_return(mode, combine):
    result = estimate([3.0], ["a"], ["t"], torch.zeros(1, 2), mode=mode, combine=combine)
    assert result.tolist() == [[pytest.approx(3.0, rel=1e-5)] * 2]
    credited = estimate([0.0], ["a"], ["t"], torch.tensor([[0.5, 0.0]]), mode=mode, combine=combine)
    assert credited.isfinite().all()


@pytest.mark.parametrize("combine", COMBINE_RULES)
@pytest.mark.parametrize("mode", MODES)
def test_padding_order_and_splits_keep_advantages(mode, combine):
    generator = torch.Generator().manual_seed(0)
    rows, width = 9, 5
    scores = torch.rand(rows, generator=generator).tolist()
    index = ["a", "a", "a", "b", "b", "b", "c", "c", "c"]
    traj = [f"t{i}" for i in range(rows)]
    thinking = torch.randn(rows, width, generator=generator)
    mask = torch.ones(rows, width)
    for row in range(rows):
        mask[row, 2 + row % 4 :] = 0
    whole = estimate(scores, index, traj, thinking * mask, mask, mode=mode, combine=combine)

    pad = torch.nn.functional.pad
    padded = estimate(
        scores,
        index,
        traj,
        pad(thinking * mask, (0, 3)),
        pad(mask, (0, 3)),
        mode=mode,
        combine=combine,
    )
    torch.testing.assert_close(padded, pad(whole, (0, 3)))

    def part(rows_of_part):
        pick = list(rows_of_part)
        return estimate(
            [scores[i] for i in pick],
            [index[i] for i in pick],
            [traj[i] for i in pick],
            (thinking * mask)[pick],
            mask[pick],
            mode=mode,
            combine=combine,
        )

    order = torch.randperm(rows, generator=generator).tolist()
    torch.testing.assert_close(part(order), whole[order])
    torch.testing.assert_close(torch.cat([part(range(0, 3)), part(range(3, 9))]), whole)


def test_turns_do_not_depend_on_their_batch():
    generator = torch.Generator().manual_seed(1)
    scores, thought_tokens = (
        torch.randn(6, 4, generator=generator),
        torch.rand(6, 4, generator=generator) * 40,
    )
    valid = torch.rand(6, 4, generator=generator) < 0.8
    chosen_columns = torch.tensor([0, 1, 2, 3, -1, 0])
    options = {"cost_coef": 0.3, "cost_max": 32}
    for function in (
        compute_reweight_factors,
        lambda *a, **k: compute_thinking_advantage(*a, mode="mean_std_norm", **k)[0],
    ):
        whole = function(scores, valid, chosen_columns, thought_tokens, **options)
        alone = []
        for i in range(6):
            one = slice(i, i + 1)
            arguments = (scores[one], valid[one], chosen_columns[one], thought_tokens[one])
            alone.append(function(*arguments, **options))
        torch.testing.assert_close(torch.cat(alone), whole)
