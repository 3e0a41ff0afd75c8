import random

import pytest

from tests.helpers.refusals import mentions
from verl.utils.seqlen_balancing import get_seqlen_balanced_partitions


def sum_parts(lengths, parts):
    return [sum(lengths[i] for i in part) for part in parts]


def test_partitions_balance_known_numbers():
    lengths = [8, 7, 6, 5, 4]  # the differencing method ends at 14 and 16
    parts = get_seqlen_balanced_partitions(lengths, 2)
    assert sorted(sum_parts(lengths, parts)) == [14, 16]
    assert sorted(i for part in parts for i in part) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("equal_size", [False, True])
def test_partitions_hold_every_row_once_and_are_balanced(equal_size):
    rng = random.Random(0)
    for _ in range(50):
        k = rng.randint(1, 6)
        lengths = [rng.randint(1, 500) for _ in range(k * rng.randint(4, 12))]
        parts = get_seqlen_balanced_partitions(lengths, k, equal_size)
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert all(part == sorted(part) and part for part in parts)
        if equal_size:
            assert {len(part) for part in parts} == {len(lengths) // k}
        totals = sum_parts(lengths, parts)
        assert max(totals) - min(totals) <= max(lengths)


def test_zero_lengths_leave_no_part_empty():
    parts = get_seqlen_balanced_partitions([5, 0, 0], 3)
    assert sorted(map(len, parts)) == [1, 1, 1]


def test_impossible_partitions_are_refused():
    with pytest.raises(ValueError, check=mentions(2, 3)):
        get_seqlen_balanced_partitions([1, 2], 3)
    with pytest.raises(ValueError, check=mentions(2)):
        get_seqlen_balanced_partitions([1, 2, 3], 2, equal_size=True)
