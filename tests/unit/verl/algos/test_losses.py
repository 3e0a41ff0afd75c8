"""Edge cases of losses: limits of the ratio, defaults, and arguments passed to the aggregation."""

import math
from typing import Any

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.algos import agg_loss, compute_policy_loss_vanilla, compute_value_loss
from verl.algos.losses import compute_entropy_loss, compute_loss_denominator

MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
MATRIX = torch.tensor([[1.0, 2.0, 3.0], [10.0, 99.0, 99.0]])
WEIGHTS = torch.tensor([1.0, 3.0], dtype=torch.float64)


def policy_loss(ratio, advantage, **kwargs):
    """Return the four results for one token."""
    log_prob = torch.tensor([[math.log(ratio)]])
    results = compute_policy_loss_vanilla(
        torch.zeros(1, 1), log_prob, torch.tensor([[advantage]]), torch.ones(1, 1), **kwargs
    )
    return [result.item() for result in results]


# ---------------------------------------------------------------- aggregation


def test_denominator_counts_tokens_or_rows():
    assert compute_loss_denominator(MASK, "token-mean").item() == 4
    assert compute_loss_denominator(MASK, "seq-mean-token-sum").item() == 2
    assert compute_loss_denominator(MASK, "token-mean", WEIGHTS).item() == 4
    assert compute_loss_denominator(MASK, "seq-mean-token-sum", WEIGHTS).item() == 4
    empty = torch.tensor([[1, 0, 0], [0, 0, 0]])
    assert compute_loss_denominator(empty, "seq-mean-token-mean").item() == 1


def test_token_sum_is_not_divided():
    assert compute_loss_denominator(MASK, "token-sum").item() == 0
    assert agg_loss(MATRIX, MASK, "token-sum").item() == 16
    assert agg_loss(MATRIX, MASK, "token-sum", WEIGHTS.float()).item() == 16
    assert agg_loss(MATRIX, MASK, "token-sum", denominator=0.0).item() == 16


def test_unknown_mode_is_refused_with_the_argument_name():
    for refused in (
        lambda: compute_loss_denominator(MASK, "token_mean"),
        lambda: agg_loss(MATRIX, MASK, "token_mean", denominator=1.0),
    ):
        with pytest.raises(ValueError, check=mentions("loss_agg_mode", "'token_mean'")):
            refused()


def test_denominator_below_one_divides():
    assert agg_loss(MATRIX, MASK, "token-mean", denominator=0.5).item() == 32
    assert agg_loss(MATRIX, MASK, "token-mean", denominator=1).item() == 16


def test_double_inputs_give_a_float32_loss():
    loss = agg_loss(MATRIX, MASK, "token-mean", WEIGHTS, torch.tensor(4.0, dtype=torch.float64))
    assert loss.dtype == torch.float32
    assert loss.item() == 4


def test_zero_denominator_does_not_divide():
    nothing = torch.zeros_like(MASK)
    loss = agg_loss(MATRIX, MASK, "token-mean", denominator=0.0)
    assert loss.item() == 16
    assert agg_loss(MATRIX, nothing, "seq-mean-token-mean").item() == 0


def test_row_of_one_token_is_its_own_mean():
    one = torch.tensor([[4.0, 0.0]])
    assert agg_loss(one, torch.tensor([[1, 0]]), "seq-mean-token-mean").item() == 4


# ---------------------------------------------------------------- policy


def test_ratio_is_clipped_by_0_2_by_default():
    assert policy_loss(2.0, 1.0)[:2] == pytest.approx([-1.2, 1.0])
    assert policy_loss(0.5, -1.0)[:2] == pytest.approx([0.8, 1.0])
    assert policy_loss(1.1, 1.0)[:2] == pytest.approx([-1.1, 0.0])


def test_cliprange_replaces_a_missing_bound():
    assert policy_loss(2.0, 1.0, cliprange=0.5)[0] == pytest.approx(-1.5)
    assert policy_loss(0.1, -1.0, cliprange=0.5)[0] == pytest.approx(0.5)
    bounds = {"cliprange": 0.5, "cliprange_low": 0.1, "cliprange_high": 0.3}
    assert policy_loss(2.0, 1.0, **bounds)[0] == pytest.approx(-1.3)
    assert policy_loss(0.1, -1.0, **bounds)[0] == pytest.approx(0.9)


def test_dual_clip_is_three_by_default():
    assert policy_loss(10.0, -1.0) == pytest.approx([3.0, 0.0, -math.log(10), 1.0])
    assert policy_loss(2.9, -1.0)[3] == 0.0
    assert policy_loss(10.0, -1.0, clip_ratio_c=1.5)[0] == pytest.approx(1.5)


def test_dual_clip_limits_only_negative_advantages():
    assert policy_loss(10.0, 0.0)[3] == 0.0
    assert policy_loss(0.1, 0.5, cliprange=0.2)[3] == 0.0
    assert policy_loss(10.0, 0.5)[3] == 0.0


def test_very_large_ratio_is_limited_and_finite():
    e20 = math.exp(20)
    up, down = ([[sign * 1000.0]] for sign in (1, -1))
    for log_prob, expected in ((up, e20), (down, 1 / e20)):
        loss, _, kl, _ = compute_policy_loss_vanilla(
            torch.zeros(1, 1),
            torch.tensor(log_prob),
            torch.tensor([[1.0]]),
            torch.ones(1, 1),
            cliprange_low=1.0,
            cliprange_high=1e10,
        )
        assert loss.item() == pytest.approx(-expected, rel=1e-5)
        assert kl.item() == -log_prob[0][0]


def test_policy_loss_passes_the_aggregation_arguments():
    log_prob = torch.zeros(2, 3)
    cases: dict[str, dict[str, Any]] = {
        "token-mean": {},
        "seq-mean-token-sum": {"row_shares": WEIGHTS.float()},
        "seq-mean-token-mean": {"denominator": 7.0},
        "seq-mean-token-sum-norm": {"loss_scale_factor": 11.0},
    }
    for mode, kwargs in cases.items():
        loss, *_ = compute_policy_loss_vanilla(
            log_prob, log_prob, -MATRIX, MASK, loss_agg_mode=mode, **kwargs
        )
        expected = agg_loss(MATRIX, MASK, mode, **kwargs)
        assert loss.item() == pytest.approx(expected.item())


def test_clip_fractions_are_shares_of_all_tokens_of_a_mini_batch():
    ratios = torch.tensor([[2.0, 1.0, 10.0], [1.0, 1.0, 1.0]])
    advantages = torch.tensor([[1.0, 1.0, -1.0], [1.0, 1.0, 1.0]])
    results = compute_policy_loss_vanilla(
        torch.zeros(2, 3), ratios.log(), advantages, MASK, num_tokens=8
    )
    _, clipped, kl, clipped_lower = [result.item() for result in results]
    assert clipped == pytest.approx(1 / 8)
    assert kl == pytest.approx(-math.log(20) / 8)
    assert clipped_lower == pytest.approx(1 / 8)


# ---------------------------------------------------------------- value and entropy


def test_value_predictions_are_clipped_on_both_sides():
    values = torch.zeros(1, 2)
    predictions = torch.tensor([[-3.0, 3.0]])
    returns = torch.tensor([[-3.0, 3.0]])
    loss, clipped = compute_value_loss(predictions, returns, values, torch.ones(1, 2), 1.0)
    assert loss.item() == 2.0  # half of 2^2, on both sides
    assert clipped.item() == 1.0


@pytest.mark.parametrize(
    ("mode", "kwargs"),
    [
        ("token-mean", {}),
        ("seq-mean-token-sum", {"row_shares": WEIGHTS.float()}),
        ("seq-mean-token-mean", {"denominator": 7.0}),
        ("seq-mean-token-sum-norm", {"loss_scale_factor": 11.0}),
    ],
)
def test_value_and_entropy_loss_pass_the_aggregation_arguments(mode, kwargs):
    expected = agg_loss(MATRIX, MASK, mode, **kwargs).item()
    entropy = compute_entropy_loss(MATRIX, MASK, mode, **kwargs)
    assert entropy.item() == pytest.approx(expected)
    predictions = (2 * MATRIX).sqrt()
    zeros = torch.zeros(2, 3)
    value, _ = compute_value_loss(predictions, zeros, predictions, MASK, 1e6, mode, **kwargs)
    assert value.item() == pytest.approx(expected)


def test_value_and_entropy_loss_are_token_means_by_default():
    zeros = torch.zeros(2, 3)
    predictions = (2 * MATRIX).sqrt()
    assert compute_value_loss(predictions, zeros, predictions, MASK, 1e6)[0].item() == 4
    assert compute_entropy_loss(MATRIX, MASK).item() == 4


def test_value_clip_fraction_is_a_share_of_all_tokens():
    values = torch.zeros(1, 2)
    predictions = torch.tensor([[3.0, 0.5]])
    _, share = compute_value_loss(
        predictions, torch.tensor([[3.0, 0.5]]), values, torch.ones(1, 2), 1.0, num_tokens=8
    )
    assert share.item() == 1 / 8
