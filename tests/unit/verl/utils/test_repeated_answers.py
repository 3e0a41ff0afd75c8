"""Tests of pass@k, best@k and maj@k against numbers worked out by hand."""

from itertools import combinations

import numpy as np
import pytest

from tests.helpers.refusals import mentions
from verl.utils import statistics
from verl.utils.statistics import best_at_k, list_k_values, maj_at_k, pass_at_k


@pytest.mark.parametrize(
    ("n", "correct", "k", "expected"),
    [
        (4, 1, 1, 1 / 4),
        (4, 1, 2, 1 / 2),  # 3 of the 6 pairs contain it
        (4, 2, 2, 5 / 6),  # one pair is wrong in both
        (5, 2, 3, 9 / 10),  # 1 of 10 triples contains the three wrong ones
        (4, 0, 4, 0.0),
        (4, 4, 1, 1.0),
        (4, 3, 2, 1.0),  # no pair is wrong in both
    ],
)
def test_pass_at_k_by_hand(n, correct, k, expected):
    assert pass_at_k(n, correct, k) == pytest.approx(expected)


def test_pass_at_k_is_not_the_biased_estimate():
    assert 1 - (1 - 2 / 4) ** 2 == 0.75 != pass_at_k(4, 2, 2)


def test_best_at_k_by_hand():
    scores = [3.0, 1.0, 2.0]
    assert best_at_k(scores, 1) == pytest.approx(2.0)
    assert best_at_k(scores, 2) == pytest.approx((3 + 3 + 2) / 3)
    assert best_at_k(scores, 3) == 3.0
    assert best_at_k([-1.0, -5.0], 2) == -1.0


def test_best_at_k_is_the_mean_over_subsets_and_includes_pass_at_k():
    scores = np.random.default_rng(0).normal(size=7).tolist()
    for k in range(1, 8):
        expected = np.mean([max(chosen) for chosen in combinations(scores, k)])
        assert best_at_k(scores, k) == pytest.approx(expected)
        assert best_at_k([1.0] * 3 + [0.0] * 4, k) == pytest.approx(pass_at_k(7, 3, k))


def test_maj_at_k_by_hand():
    answers, scores = ["a", "a", "b"], [1.0, 1.0, 0.0]
    assert maj_at_k(answers, scores, 3) == 1.0
    assert maj_at_k(answers, scores, 1) == pytest.approx(2 / 3)
    assert maj_at_k(answers, scores, 2) == pytest.approx(
        (1 + 0.5 + 0.5) / 3
    )  # a tie counts as one half
    assert maj_at_k(["a", "b", "b"], [1.0, 0.0, 0.0], 3) == 0.0  # the majority may be wrong
    assert maj_at_k(["a", "a"], [1.0, 0.0], 2) == 0.5  # one answer with two scores
    assert maj_at_k([None, ("x", 1)], [0.0, 1.0], 2) == 0.5


def test_many_subsets_are_drawn_with_a_fixed_seed(monkeypatch):
    answers, scores = ["a"] * 6 + ["b"] * 4, [1.0] * 6 + [0.0] * 4
    exact = maj_at_k(answers, scores, 5)
    monkeypatch.setattr(statistics, "MAX_LISTED_SUBSETS", 200)
    drawn = maj_at_k(answers, scores, 5)
    assert drawn == maj_at_k(answers, scores, 5) != exact
    assert drawn == pytest.approx(exact, abs=0.12)


def test_impossible_k_is_refused():
    for call in (lambda: pass_at_k(4, 1, 5), lambda: best_at_k([], 1), lambda: pass_at_k(4, 1, 0)):
        with pytest.raises(ValueError, check=mentions("k=")):
            call()


def test_reported_values_of_k():
    assert [list_k_values(n) for n in (1, 2, 3, 4, 5, 8)] == [
        [1],
        [1, 2],
        [1, 2, 3],
        [1, 2, 4],
        [1, 2, 4, 5],
        [1, 2, 4, 8],
    ]
