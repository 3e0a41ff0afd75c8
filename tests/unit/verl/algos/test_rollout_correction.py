"""Weights of the rollout correction and metrics of the mismatch against numbers by hand."""

import math

import pytest
import torch

from verl.algos import CorrectionRule, compute_correction_weights, compute_mismatch_metrics

LOG2 = math.log(2.0)
# Ratios 2, 1/4, 4 in the first row; 1/2 and two unsampled positions in the second.
OLD = torch.tensor([[-1.0, -1.0 - 2 * LOG2, -1.0], [-1.0 - LOG2, math.nan, 0.0]])
ROLLOUT = torch.tensor([[-1.0 - LOG2, -1.0, -1.0 - 2 * LOG2], [-1.0, 7.0, math.nan]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0]])
SEPARATE = torch.tensor([0, 1])
JOINED = torch.tensor([0, 0])


def correction_weights(sequence=SEPARATE, **settings):
    weights, metrics = compute_correction_weights(
        OLD, ROLLOUT, MASK, sequence, CorrectionRule(**settings)
    )
    assert (weights[MASK == 0] == 0).all()
    return weights[MASK == 1].tolist(), metrics


def test_tokens_are_weighted_by_their_truncated_ratio():
    weights, metrics = correction_weights(largest_weight=3.0)
    assert weights == pytest.approx([2, 0.25, 3, 0.5])
    mean = 5.75 / 4
    squares = (4 + 1 / 16 + 9 + 1 / 4) / 4
    assert metrics == pytest.approx(
        {
            "rollout_corr/rollout_is_mean": mean,
            "rollout_corr/rollout_is_min": 0.25,
            "rollout_corr/rollout_is_max": 3.0,
            "rollout_corr/rollout_is_eff_sample_size": mean**2 / squares,
            "rollout_corr/rollout_is_ratio_fraction_high": 0.25,
        }
    )


def test_sequences_are_weighted_by_the_product_of_their_ratios():
    # Products: 2 * 1/4 * 4 = 2 and 1/2. As one sequence: 1.
    assert correction_weights(weight_level="sequence")[0] == pytest.approx([2, 2, 2, 0.5])
    weights, metrics = correction_weights(weight_level="sequence", largest_weight=1.5)
    assert weights == pytest.approx([1.5, 1.5, 1.5, 0.5])
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.75
    assert correction_weights(JOINED, weight_level="sequence")[0] == pytest.approx([1, 1, 1, 1])


def test_rejected_tokens_have_zero_weight():
    weights, metrics = correction_weights(
        weight_level=None, reject_level="token", accept_from=0.49, accept_to=2.01
    )
    assert weights == [1, 0, 0, 1]
    assert metrics == {"rollout_corr/rollout_rs_masked_fraction": 0.5}
    weights, _ = correction_weights(
        reject_level="token", accept_from=0.3, accept_to=9.0, largest_weight=3.0
    )
    assert weights == pytest.approx([2, 0, 3, 0.5])


def test_sequences_are_rejected_by_product_or_geometric_mean():
    options = {"weight_level": None, "accept_from": 0.6}
    assert correction_weights(reject_level="sequence", accept_to=1.9, **options)[0] == [0, 0, 0, 0]
    assert correction_weights(reject_level="sequence", accept_to=2.1, **options)[0] == [1, 1, 1, 0]
    # 2^(1/3) = 1.26 and 1/2
    assert correction_weights(reject_level="geometric", accept_to=1.25, **options)[0] == [
        0,
        0,
        0,
        0,
    ]
    assert correction_weights(reject_level="geometric", accept_to=1.27, **options)[0] == [
        1,
        1,
        1,
        0,
    ]
    assert correction_weights(JOINED, reject_level="geometric", accept_to=1.01, **options)[0] == [
        1,
        1,
        1,
        1,
    ]


def test_rows_and_batches_without_tokens():
    nothing = torch.zeros_like(MASK)
    weights, metrics = compute_correction_weights(
        OLD, ROLLOUT, nothing, SEPARATE, CorrectionRule(reject_level="geometric")
    )
    assert not weights.any() and metrics == {"rollout_corr/rollout_rs_masked_fraction": 0.0}
    assert compute_mismatch_metrics(OLD, ROLLOUT, nothing, SEPARATE) == {}
    mismatch = compute_mismatch_metrics(
        OLD, ROLLOUT, torch.tensor([[1, 1, 1], [0, 0, 0]]), SEPARATE
    )
    assert mismatch["rollout_corr/ppl_ratio"] == pytest.approx(2 ** (-1 / 3))


def test_mismatch_by_hand():
    metrics = compute_mismatch_metrics(OLD, ROLLOUT, MASK, SEPARATE)
    k3 = [2 - 1 - LOG2, 0.25 - 1 + 2 * LOG2, 4 - 1 - 2 * LOG2, 0.5 - 1 + LOG2]
    assert metrics == pytest.approx(
        {
            "rollout_corr/kl": (-LOG2 + 2 * LOG2 - 2 * LOG2 + LOG2) / 4,
            "rollout_corr/k3_kl": sum(k3) / 4,
            "rollout_corr/ppl_ratio": (2 ** (-1 / 3) + 2) / 2,
        },
        abs=1e-7,
    )


def test_mismatch_kl_has_a_sign():
    metrics = compute_mismatch_metrics(OLD, ROLLOUT, torch.tensor([[1, 1, 1], [0, 0, 0]]), SEPARATE)
    assert metrics["rollout_corr/kl"] == pytest.approx(-LOG2 / 3)
    assert metrics["rollout_corr/k3_kl"] == pytest.approx((2 + 0.25 + 4 - 3 - LOG2) / 3)


def test_batch_without_rows_has_no_weights():
    nothing = torch.zeros(0, 3)
    for level in ("token", "sequence"):
        weights, metrics = compute_correction_weights(
            nothing, nothing, nothing, SEPARATE[:0], CorrectionRule(weight_level=level)
        )
        assert weights.shape == (0, 3) and metrics == {}
    assert compute_mismatch_metrics(nothing, nothing, nothing, SEPARATE[:0]) == {}


def test_weight_at_the_bound_is_not_counted_as_above():
    _, metrics = compute_correction_weights(
        OLD, OLD, MASK, SEPARATE, CorrectionRule(largest_weight=1.0)
    )
    assert metrics["rollout_corr/rollout_is_ratio_fraction_high"] == 0.0


def test_equal_small_weights_have_full_effective_sample_size():
    weights, metrics = compute_correction_weights(OLD - LOG2, OLD, MASK, SEPARATE, CorrectionRule())
    assert weights[MASK == 1].tolist() == pytest.approx([0.5] * 4)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == pytest.approx(1.0)


def test_equal_log_probs_have_weight_exactly_one():
    settings = CorrectionRule(reject_level="geometric", accept_from=1.0, accept_to=1.0)
    weights, metrics = compute_correction_weights(OLD, OLD, MASK, SEPARATE, settings)
    assert weights[MASK == 1].tolist() == [1, 1, 1, 1]
    assert metrics["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 0.0


def test_defaults_truncate_at_2_and_accept_from_half_to_2():
    assert correction_weights()[0] == pytest.approx([2, 0.25, 2, 0.5])
    ratios = torch.tensor([[0.49, 0.51, 1.99, 2.01]])
    old = ratios.log()
    settings = CorrectionRule(weight_level=None, reject_level="token")
    weights, _ = compute_correction_weights(
        old, torch.zeros(1, 4), torch.ones(1, 4), torch.tensor([0]), settings
    )
    assert weights.tolist() == [[0, 1, 1, 0]]


def test_very_large_ratio_is_finite():
    old = torch.tensor([[0.0, -800.0]])
    weights, _ = compute_correction_weights(
        old, old.flip(-1), torch.ones(1, 2), torch.tensor([0]), CorrectionRule(largest_weight=1e9)
    )
    assert weights.tolist()[0] == pytest.approx([math.exp(20), math.exp(-20)])


def test_very_large_product_is_finite():
    old = torch.tensor([[0.0, 0.0], [-15.0, -15.0]])
    settings = CorrectionRule(weight_level="sequence", largest_weight=1e12)
    weights, _ = compute_correction_weights(old, old.flip(0), torch.ones(2, 2), SEPARATE, settings)
    assert weights[:, 0].tolist() == pytest.approx([math.exp(20), math.exp(-20)])


@pytest.mark.parametrize(("level", "accept_from"), [("sequence", 0.006), ("geometric", 0.08)])
def test_product_contains_the_whole_ratio_of_a_token(level, accept_from):
    """Log-ratios -30 and 25 have the product e^-5 and the geometric mean e^-2.5.

    With a limit of 20 per token both would be 1.
    """
    old, rollout = torch.tensor([[-30.0, -1.0]]), torch.tensor([[0.0, -26.0]])
    sequence = torch.ones(1, 2), torch.tensor([0])
    accepted = CorrectionRule("sequence", 2.0, level, accept_from, accept_to=0.1)
    weights, _ = compute_correction_weights(old, rollout, *sequence, accepted)
    assert weights.tolist()[0] == pytest.approx([math.exp(-5)] * 2)
    rejected = CorrectionRule("sequence", 2.0, level, accept_from=0.1, accept_to=2.0)
    assert not compute_correction_weights(old, rollout, *sequence, rejected)[0].any()
    mismatch = compute_mismatch_metrics(old, rollout, *sequence)
    assert mismatch["rollout_corr/ppl_ratio"] == pytest.approx(math.exp(2.5))
