"""Losses and KL against numbers computed by hand, and their exactness under micro-batching."""

import math

import pytest
import torch

from tests.helpers.refusals import mentions, suggests
from verl.algos import (
    LOSS_AGG_MODES,
    AdaptiveKLController,
    FixedKLController,
    agg_loss,
    compute_entropy_loss,
    compute_loss_denominator,
    compute_policy_loss_vanilla,
    compute_row_shares,
    compute_value_loss,
    get_kl_controller,
    kl_penalty,
)

LOSS = torch.tensor([[1.0, 2.0, math.nan, 0.0], [3.0, 4.0, 5.0, 6.0], [7.0, 0.0, 0.0, 0.0]])
MASK = torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]])


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 21 / 6),
        ("seq-mean-token-sum", (3 + 18) / 2),
        ("seq-mean-token-mean", (1.5 + 4.5) / 2),
        ("seq-mean-token-sum-norm", (3 + 18) / 2 / 4),
    ],
)
def test_agg_loss_by_hand(mode, expected):
    assert agg_loss(LOSS, MASK, mode).item() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("token-mean", 21 / 6),
        ("seq-mean-token-sum", (3 + 18) / 1.5),
        ("seq-mean-token-mean", (0.5 * 1.5 + 4.5) / 1.5),
        ("seq-mean-token-sum-norm", (3 + 18) / 1.5 / 10),
    ],
)
def test_agg_loss_of_parts_of_sequences_by_hand(mode, expected):
    # The third row has no token, so its share has no effect.
    shares = torch.tensor([0.5, 1.0, 100.0])
    assert agg_loss(LOSS, MASK, mode, shares, loss_scale_factor=10).item() == pytest.approx(
        expected
    )


def test_agg_loss_without_tokens_is_zero_and_modes_are_checked():
    assert agg_loss(LOSS, torch.zeros_like(MASK), "token-mean").item() == 0.0
    with pytest.raises(ValueError, check=suggests("token-mean")):
        agg_loss(LOSS, MASK, "token-men")


def policy_case(rows=7, width=5):
    generator = torch.Generator().manual_seed(0)
    old, advantages = (torch.randn(rows, width, generator=generator) for _ in range(2))
    mask = torch.rand(rows, width, generator=generator) < 0.7
    mask[3] = False
    new = old + torch.randn(rows, width, generator=generator)
    return old, new.requires_grad_(), advantages, mask, torch.rand(rows, generator=generator)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_micro_batch_losses_and_gradients_sum_to_the_mini_batch(mode):
    old, new, advantages, mask, weights = policy_case()
    whole = compute_policy_loss_vanilla(
        old, new, advantages, mask, loss_agg_mode=mode, row_shares=weights
    )
    (gradient,) = torch.autograd.grad(whole[0], new)
    parts = [slice(0, 1), slice(1, 4), slice(4, 7)]
    denominator = sum(compute_loss_denominator(mask[p], mode, weights[p]) for p in parts)
    totals = torch.zeros(4)
    for p in parts:
        result = compute_policy_loss_vanilla(
            old[p],
            new[p],
            advantages[p],
            mask[p],
            loss_agg_mode=mode,
            row_shares=weights[p],
            denominator=denominator,
            num_tokens=mask.sum(),
        )
        result[0].backward()
        totals += torch.stack([value.detach() for value in result])
    torch.testing.assert_close(totals, torch.stack([value.detach() for value in whole]))
    torch.testing.assert_close(new.grad, gradient)


@pytest.mark.parametrize(
    ("mode", "row_weight", "expected"),
    [
        ("token-mean", "row", 30 / 7),
        ("token-mean", "trajectory", 30 / 7),
        ("seq-mean-token-mean", "trajectory", (3 + 7.5) / 2),
        ("seq-mean-token-sum", "trajectory", (15 + 15) / 2),
        ("seq-mean-token-sum-norm", "trajectory", (15 + 15) / 2 / 10),
    ],
)
def test_splitting_a_trajectory_into_rows_keeps_the_loss(mode, row_weight, expected):
    whole = torch.tensor([[1.0, 2.0, 3.0, 4.0, 5.0], [6.0, 9.0, 0.0, 0.0, 0.0]])
    whole_mask = torch.tensor([[1, 1, 1, 1, 1], [1, 1, 0, 0, 0]])
    cut = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 9.0, 0.0]])
    cut_mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]])
    losses = [
        agg_loss(loss, mask, mode, compute_row_shares(traj, row_weight, mask.sum(-1)), None, 10)
        for loss, mask, traj in ((whole, whole_mask, ["t", "u"]), (cut, cut_mask, ["t", "t", "u"]))
    ]
    torch.testing.assert_close(losses[0], losses[1])
    assert losses[0].item() == pytest.approx(expected)


def test_row_weighted_loss_counts_every_row_as_one_sequence():
    cut = torch.tensor([[1.0, 2.0, 0.0], [3.0, 4.0, 5.0], [6.0, 9.0, 0.0]])
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [1, 1, 0]])
    shares = compute_row_shares(["t", "t", "u"], "row", mask.sum(-1))
    loss = agg_loss(cut, mask, "seq-mean-token-mean", shares)
    assert loss.item() == pytest.approx((1.5 + 4 + 7.5) / 3)


def one_token(advantage, ratio, **options):
    tensors = (
        torch.zeros(1, 1),
        torch.full((1, 1), math.log(ratio)),
        torch.full((1, 1), advantage),
        torch.ones(1, 1),
    )
    return [value.item() for value in compute_policy_loss_vanilla(*tensors, **options)]


@pytest.mark.parametrize(
    ("advantage", "ratio", "loss", "clipped", "clipped_lower"),
    [
        (1.0, 1.5, -1.3, 1, 0),  # gain limited at 1 + high
        (1.0, 0.5, -0.5, 0, 0),  # no limit downwards for a positive advantage
        (-1.0, 0.5, 0.8, 1, 0),  # limited at 1 - low
        (-1.0, 2.0, 2.0, 0, 0),
        (-1.0, 5.0, 3.0, 0, 1),  # dual clip at c
        (0.0, 5.0, 0.0, 0, 0),
    ],
)
def test_clipping_by_hand(advantage, ratio, loss, clipped, clipped_lower):
    options = {"cliprange_low": 0.2, "cliprange_high": 0.3, "clip_ratio_c": 3.0}
    actual = one_token(advantage, ratio, **options)
    assert actual == pytest.approx([loss, clipped, -math.log(ratio), clipped_lower], abs=1e-6)


def test_nan_on_masked_tokens_does_not_reach_the_gradient():
    new = torch.tensor([[0.1, math.nan]], requires_grad=True)
    mask = torch.tensor([[1, 0]])
    loss, *_ = compute_policy_loss_vanilla(
        torch.tensor([[0.0, -math.inf]]), new, torch.ones(1, 2), mask
    )
    loss.backward()
    assert new.grad is not None
    assert loss.isfinite() and new.grad.isfinite().all()


def test_zero_advantages_give_zero_gradient():
    old, new, advantages, mask, _ = policy_case()
    compute_policy_loss_vanilla(old, new, torch.zeros_like(advantages), mask)[0].backward()
    assert (new.grad == 0).all()


def test_dual_clip_bound_of_one_is_refused():
    with pytest.raises(ValueError, check=mentions("clip_ratio_c")):
        one_token(1.0, 1.0, clip_ratio_c=1.0)


def test_value_loss_takes_the_larger_error():
    vpreds, values, returns = (
        torch.tensor([[2.0, 0.1]]),
        torch.zeros(1, 2),
        torch.tensor([[3.0, 0.0]]),
    )
    loss, clipfrac = compute_value_loss(
        vpreds, returns, values, torch.ones(1, 2), cliprange_value=0.5
    )
    assert loss.item() == pytest.approx(0.5 * (2.5**2 + 0.1**2) / 2)
    assert clipfrac.item() == 0.5


def test_entropy_loss_accepts_logits_or_entropies():
    logits = torch.zeros(1, 2, 8)
    mask = torch.tensor([[1, 0]])
    assert compute_entropy_loss(logits, mask).item() == pytest.approx(math.log(8))
    assert compute_entropy_loss(torch.tensor([[1.5, 9.0]]), mask).item() == 1.5


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("kl", 0.5),
        ("k1", 0.5),
        ("abs", 0.5),
        ("mse", 0.125),
        ("k2", 0.125),
        ("low_var_kl", math.exp(-0.5) - 0.5),
        ("k3", math.exp(-0.5) - 0.5),
    ],
)
def test_kl_penalty_by_hand(kind, expected):
    assert kl_penalty(torch.tensor([-1.0]), torch.tensor([-1.5]), kind).item() == pytest.approx(
        expected
    )


def test_kl_penalty_is_limited_and_refuses_unknown_names():
    assert kl_penalty(torch.tensor([-100.0]), torch.tensor([0.0]), "k3").item() == 10.0
    with pytest.raises(ValueError, check=mentions("low_var_kl")):
        kl_penalty(torch.zeros(1), torch.zeros(1), "low_var")


def test_fixed_and_adaptive_kl_coefficients_by_hand():
    fixed = get_kl_controller("fixed", kl_coef=0.1)
    fixed.update(current_kl=9.0, n_steps=5)
    assert isinstance(fixed, FixedKLController) and fixed.value == 0.1
    adaptive = get_kl_controller("adaptive", kl_coef=0.1, horizon=100, target_kl=0.5)
    assert isinstance(adaptive, AdaptiveKLController)
    adaptive.update(current_kl=0.55, n_steps=10)
    assert adaptive.value == pytest.approx(0.1 * (1 + 0.1 * 0.1))
    adaptive.update(current_kl=50.0, n_steps=10)
    assert adaptive.value == pytest.approx(0.1 * 1.01 * (1 + 0.2 * 0.1))


def test_ratio_is_new_over_old_probability():
    """Log-probs of -1.3 and then -1.2 give the ratio e^0.1. Neither log-prob is 0."""
    old = torch.tensor([[-1.3, -0.4]])
    new = torch.tensor([[-1.2, -0.5]])
    loss, clipped, kl, _ = compute_policy_loss_vanilla(
        old, new, torch.tensor([[2.0, -1.0]]), torch.ones(1, 2), cliprange=0.2
    )
    expected = (-2.0 * math.exp(0.1) + 1.0 * math.exp(-0.1)) / 2
    assert loss.item() == pytest.approx(expected)
    assert (clipped.item(), kl.item()) == (0.0, pytest.approx(0.0, abs=1e-7))
