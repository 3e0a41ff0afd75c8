"""Mutual information of levels and situations, against its value by chance."""

import math
import random

import pytest

from rlvcr.level_metrics import compute_level_mutual_information

INFORMATION = "rlvcr/level_information"
NULL = "rlvcr/level_information_null"


def test_levels_set_by_the_situation_have_full_information():
    information = compute_level_mutual_information([1, 2, 3, 4] * 50, ["a", "b", "c", "d"] * 50)
    assert information[INFORMATION] == pytest.approx(math.log(4))
    assert 0 < information[NULL] < 0.1


def test_level_information_by_hand():
    # p(1|a) = 1, p(1|b) = p(2|b) = 1/2: I = H(3/4, 1/4) - 1/2 H(1/2, 1/2)
    information = compute_level_mutual_information([1, 1, 1, 2], ["a", "a", "b", "b"])
    entropy = -(0.75 * math.log(0.75) + 0.25 * math.log(0.25))
    assert information[INFORMATION] == pytest.approx(entropy - 0.5 * math.log(2))


def test_one_level_has_no_information():
    information = compute_level_mutual_information([2] * 8, list("abcdabcd"))
    assert information == {INFORMATION: 0.0, NULL: 0.0}


def test_random_levels_have_the_information_of_the_null():
    """If every turn has its own situation, random levels seem informative; so does the null."""
    rng = random.Random(0)
    levels = [rng.choice((1, 2, 3, 4)) for _ in range(400)]
    few = compute_level_mutual_information(levels, [rng.choice("ab") for _ in levels])
    assert few[INFORMATION] < 0.02 and few[INFORMATION] == pytest.approx(few[NULL], abs=0.02)
    one_each = compute_level_mutual_information(levels, [str(number) for number in range(400)])
    assert one_each[INFORMATION] == pytest.approx(one_each[NULL])
    assert one_each[INFORMATION] > 1.3


def test_turns_without_a_level_do_not_count():
    assert compute_level_mutual_information([None, None], ["a", "b"]) == {}
    with_one = compute_level_mutual_information([1, None, 2], ["a", "a", "b"])
    assert with_one == compute_level_mutual_information([1, 2], ["a", "b"])


def test_null_is_the_same_in_every_call():
    rng = random.Random(0)
    levels = [rng.choice((1, 2, 3, 4)) for _ in range(50)]
    names = [rng.choice("abc") for _ in levels]
    information = compute_level_mutual_information(levels, names)
    assert compute_level_mutual_information(levels, names) == information
