"""Micro-batches of bounded token counts, for job code that imports them."""

import random
from typing import cast

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.compat.micro_batches import partition_by_token_limit
from verl.utils.seqlen_balancing import get_reverse_idx, rearrange_micro_batches


def sums(lengths, parts):
    return [sum(lengths[i] for i in part) for part in parts]


def test_bounded_partitions_respect_the_bound():
    rng = random.Random(1)
    for _ in range(100):
        lengths = [rng.randint(1, 100) for _ in range(rng.randint(1, 40))]
        parts = partition_by_token_limit(
            lengths, 120, min_partitions=rng.randint(1, 3), divided_by=rng.randint(1, 3)
        )
        assert sorted(i for part in parts for i in part) == list(range(len(lengths)))
        assert max(sums(lengths, parts)) <= 120


def test_bounded_partitions_use_no_more_parts_than_needed():
    assert partition_by_token_limit([60, 60, 60, 60], 120) in (
        [[0, 1], [2, 3]],
        [[0, 3], [1, 2]],
        [[0, 2], [1, 3]],
    )
    assert len(partition_by_token_limit([10] * 9, 1000)) == 1
    assert len(partition_by_token_limit([10] * 9, 1000, min_partitions=2)) == 2
    assert len(partition_by_token_limit([50] * 6, 120, divided_by=2)) == 4
    assert partition_by_token_limit([], 10) == []


def test_row_longer_than_the_bound_is_refused_by_name():
    with pytest.raises(ValueError, check=mentions("row 1", 11, "ppo_max_token_len_per_gpu")):
        partition_by_token_limit([3, 11], 10)


def test_micro_batches_of_a_dict_can_be_restored_in_order():
    mask = torch.zeros(5, 8, dtype=torch.long)
    for row, length in enumerate([8, 3, 5, 2, 6]):
        mask[row, :length] = 1
    batch = {"attention_mask": mask, "row": torch.arange(5)}
    micro_batches, indices = rearrange_micro_batches(batch, max_token_len=10)
    assert all(int(micro["attention_mask"].sum()) <= 10 for micro in micro_batches)
    flat = torch.cat([micro["row"] for micro in micro_batches])
    assert flat.tolist() == [i for part in indices for i in part]
    assert flat[get_reverse_idx(flat.tolist())].tolist() == list(range(5))


def test_micro_batches_of_a_tensordict_with_given_lengths():
    from tensordict import TensorDict

    batch = TensorDict({"attention_mask": torch.ones(4, 8), "row": torch.arange(4)}, batch_size=4)
    micro_batches, indices = rearrange_micro_batches(batch, max_token_len=8, lengths=[4, 4, 4, 4])
    assert [len(part) for part in indices] == [2, 2]
    assert [micro["row"].tolist() for micro in micro_batches] == indices


def test_reverse_index_inverts_a_permutation():
    assert get_reverse_idx([2, 0, 1]) == [1, 2, 0]


def test_ranks_agree_on_the_number_of_micro_batches(monkeypatch):
    group = cast(torch.distributed.ProcessGroup, object())  # passed through, never used
    other_rank_needs = 3
    monkeypatch.setattr(torch.distributed, "get_backend", lambda _: "gloo")
    monkeypatch.setattr(
        torch.distributed, "all_reduce", lambda t, **_: t.clamp_(min=other_rank_needs)
    )
    batch = {"attention_mask": torch.ones(4, 5), "row": torch.arange(4)}
    micro_batches, indices = rearrange_micro_batches(batch, max_token_len=20, dp_group=group)
    assert len(micro_batches) == 3
    assert sorted(i for part in indices for i in part) == [0, 1, 2, 3]
    other_rank_needs = 5
    with pytest.raises(ValueError, check=mentions(5)):
        rearrange_micro_batches(batch, max_token_len=20, dp_group=group)
