"""Rank correlation; the bootstrap is tested where rates are reported."""

import math

import pytest

from verl.utils.statistics import rank_correlation


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
def test_by_hand(first, second, expected):
    assert rank_correlation(first, second) == pytest.approx(expected)


@pytest.mark.parametrize("pair", [([], []), ([1], [2]), ([1, 1], [1, 2]), ([1, 2], [3, 3])])
def test_without_an_order_there_is_none(pair):
    assert math.isnan(rank_correlation(*pair))


def test_lists_of_different_lengths_are_refused():
    with pytest.raises(ValueError, match="2 and 1 values"):
        rank_correlation([1, 2], [1])
