"""Tests of rank correlation and bootstrap intervals."""

import math

import numpy as np
import pytest

from verl.utils.statistics import (
    bootstrap_interval,
    compute_resampled_means,
    compute_weighted_correlations,
    compute_weighted_rank_correlations,
    compute_weighted_ranks,
    expand_confidence_level,
    percentile_interval,
    rate_interval,
)


def correlate_ranks(first: list[int], second: list[int]) -> float:
    weights = np.ones((1, len(first)))
    return compute_weighted_rank_correlations(np.array(first), np.array(second), weights)[0]


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        ([1, 2, 3], [10, 100, 1000], 1.0),
        ([1, 2, 3], [3, 2, -9], -1.0),
        ([1, 2, 3, 4], [1, 3, 2, 4], 0.8),
        # Ranks 1.5, 1.5, 3 against 1, 2, 3.
        ([5, 5, 6], [1, 2, 3], 0.8660254),
    ],
)
def test_rank_correlation_by_hand(first, second, expected):
    assert correlate_ranks(first, second) == pytest.approx(expected)


@pytest.mark.parametrize("pair", [([1], [2]), ([1, 1], [1, 2]), ([1, 2], [3, 3])])
def test_constant_values_have_no_rank_correlation(pair):
    assert math.isnan(correlate_ranks(*pair))


def test_resample_uses_the_same_tasks_in_every_column():
    first = np.array([1.0, 5.0, 25.0])
    means, doubled_means = compute_resampled_means([first, 2 * first], resamples=400)
    assert doubled_means.tolist() == (2 * means).tolist()
    # A resample draws three of three tasks with replacement, which gives ten possible sums.
    sums = {round(3 * mean) for mean in means}
    assert sums == {3, 7, 11, 15, 27, 31, 35, 51, 55, 75}
    assert compute_resampled_means([first], resamples=400)[0].tolist() == means.tolist()


def test_interval_covers_the_middle_of_the_resamples():
    assert percentile_interval(np.arange(101.0), confidence_level=0.9) == pytest.approx((5.0, 95.0))
    assert percentile_interval(np.arange(201.0)) == pytest.approx((5.0, 195.0))
    values = [0.0, 1.0, 1.0, 5.0]
    (means,) = compute_resampled_means([values])
    assert bootstrap_interval(values) == percentile_interval(means)


def test_empty_values_have_no_interval():
    assert compute_resampled_means([[], []]).shape == (2, 0)
    assert all(math.isnan(bound) for bound in percentile_interval(np.array([])))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [
        ([0] * 4, 0.0, 0.6024),
        ([1] * 4, 0.3976, 1.0),
        ([0] * 100, 0.0, 0.0362),
        ([1] * 100, 0.9638, 1.0),
        ([0], 0.0, 0.975),
    ],
)
def test_rate_of_zero_or_one_has_an_exact_interval(values, low, high):
    assert rate_interval(values) == pytest.approx((low, high), abs=1e-4)


def test_other_rates_use_the_bootstrap():
    values = [0, 1, 1, 0, 1]
    assert rate_interval(values) == bootstrap_interval(values)
    assert all(map(math.isnan, rate_interval([])))


@pytest.mark.parametrize(
    ("values", "low", "high"),
    [([0.5], 0.0546, 0.9454), ([0.5] * 3, 0.1254, 0.8746), ([0.25] * 4, 0.0456, 0.6994)],
)
def test_equal_rates_between_zero_and_one_have_the_interval_of_wilson(values, low, high):
    assert rate_interval(values) == pytest.approx((low, high), abs=1e-4)


@pytest.mark.parametrize(
    ("count", "quantile"), [(5, 2.77645), (10, 2.26216), (20, 2.09302), (64, 1.99834)]
)
def test_percentiles_are_expanded_by_students_t(count, quantile):
    """The quantiles are from a table of Student's t with ``count - 1`` degrees of freedom."""
    tail = (1 - math.erf(math.sqrt(count / (count - 1)) * quantile / math.sqrt(2))) / 2
    assert expand_confidence_level(0.95, count) == pytest.approx(1 - 2 * tail, abs=2e-4)
    assert 0.95 < expand_confidence_level(0.95, 10_000) < 0.9501
    assert expand_confidence_level(0.95, 2) < 1


def test_ranks_of_resamples_are_those_of_the_repeated_values():
    values, weights = np.array([5.0, 9.0, 7.0, 7.0]), np.array([[1, 0, 2, 1], [1, 1, 1, 1]])
    assert compute_weighted_ranks(values, weights).tolist() == [[1, 4.5, 3, 3], [1, 4, 2.5, 2.5]]


def test_correlations_of_resamples_are_those_of_the_repeated_values():
    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(2, 7))
    weights = np.stack([rng.multinomial(7, [1 / 7] * 7) for _ in range(5)])
    correlations = compute_weighted_correlations(first, second, weights)
    expected = [np.corrcoef(first.repeat(w), second.repeat(w))[0, 1] for w in weights]
    assert correlations.tolist() == pytest.approx(expected)
    alone = np.array([[0, 0, 3, 0, 0, 0, 0]])
    assert math.isnan(compute_weighted_correlations(first, second, alone)[0])
