"""FlexAttention sees what packed attention sees, and gives its numbers and gradients."""

from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as library

from tests.helpers.policy_rows import add_branches, policy_config, random_rows
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.branch_attention import pack_with_branches
from verl.models.flex_attention import (
    packed_flex_attention,
    with_block_mask,
)
from verl.models.loader import load_causal_lm
from verl.models.packed_attention import UnsupportedAttention, packed_attention, with_masks
from verl.records import Branch
from verl.workers.actor import ActorWorker

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH = 4, 2, 16


def packed(long=False):
    """Three rows, of which the first two share a call of the other way, and branches of two."""
    size = 150 if long else 7
    rows = [torch.arange(size), torch.arange(size + 1), torch.arange(4)]
    branches = [
        [Branch(5, [1, 2]), Branch(2, [3]), Branch(5, [4, 5, 6]), Branch(size, [1] * 70)],
        [],
        [Branch(1, [7, 8]), Branch(4, list(range(60)))],
    ]
    return pack_with_branches(rows, branches)


def inputs(tokens):
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


@pytest.fixture
def gradients_on_cpu(monkeypatch):
    """torch computes them on a CPU as well, where nothing is compiled, and refuses to be asked."""
    monkeypatch.setattr(library, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("long", [False, True])
def test_outputs_and_gradients_are_those_of_packed_attention(gradients_on_cpu, long):
    layout = packed(long).layout
    tokens = len(packed(long).input_ids)
    upstream = torch.randn(1, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    results = []
    for attend, prepare in (
        (packed_attention, with_masks),
        (packed_flex_attention, with_block_mask),
    ):
        query, key, value = inputs(tokens)
        prepared = prepare(layout, CPU)
        out, _ = attend(torch.nn.Module(), query, key, value, None, scaling=0.3, layout=prepared)
        out.backward(upstream)
        results.append((out.detach(), query.grad, key.grad, value.grad))
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)


def test_a_token_sees_its_row_or_the_prefix_and_its_branch():
    """Row 0 of three tokens with a branch at 2, row 1 of two with one at 1."""
    layout = pack_with_branches(
        [torch.arange(3), torch.arange(2)], [[Branch(2, [5, 6])], [Branch(1, [7])]]
    ).layout
    mask = with_block_mask(layout, CPU).flex
    assert mask is not None
    place, one = torch.arange(8), torch.zeros(())
    seen = mask.mask_mod(one, one, place[:, None], place[None, :])
    assert seen.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_blocks_between_which_nothing_is_seen_are_skipped():
    rows = [torch.arange(256), torch.arange(256)]
    mask = with_block_mask(pack_with_branches(rows).layout, CPU).flex
    assert mask is not None
    assert mask.to_dense()[0, 0].tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=64, layers=2, std=0.2)


def test_a_worker_scores_rows_and_branches_with_either(policy):
    data = add_branches(random_rows(rows=5))
    answers = []
    for chosen in ("sdpa", "flex"):
        config = policy_config(policy, ppo_micro_batch_size_per_gpu=3)
        config.model.attn_implementation = chosen
        worker = ActorWorker(config, device="cpu")
        worker.init_model()
        answers.append(worker.compute_log_prob(data))
    plain, flex = answers
    for column in ("old_log_probs", "entropys"):
        torch.testing.assert_close(flex.batch[column], plain.batch[column], atol=1e-5, rtol=0)
        assert not torch.equal(flex.batch[column], plain.batch[column])
    for row, expected in zip(
        flex.non_tensor_batch["branch_scores"], plain.non_tensor_batch["branch_scores"], strict=True
    ):
        assert [score.logprob for score in row] == pytest.approx(
            [score.logprob for score in expected], abs=1e-5
        )


def test_what_it_does_not_compute_is_refused(policy):
    layout = packed().layout
    query, key, value = (x.detach() for x in inputs(len(packed().input_ids)))
    ready = with_block_mask(layout, CPU)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layout": None}, "layout"),
        ({"layout": layout}, "layout"),
        ({"layout": ready, "dropout": 0.1}, "dropout=0.1"),
        ({"layout": ready, "softcap": 30.0}, "softcap"),
        ({"layout": ready, "sliding_window": 6}, "6"),
    ]
    for more, said in cases:
        with pytest.raises(UnsupportedAttention, match=said):
            packed_flex_attention(torch.nn.Module(), query, key, value, None, **more)
    lm = load_causal_lm(policy, attention="flex")
    with pytest.raises(UnsupportedAttention):
        lm(input_ids=torch.zeros(1, 2, dtype=torch.long))
