"""Tests that FlexAttention equals packed attention in mask, outputs and gradients."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention import flex_attention as library
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.policy_rows import add_branches, policy_config, random_rows
from tests.helpers.refusals import mentions
from tests.helpers.tiny_model import make_tiny_policy
from verl.models import packed_attention as attention_module
from verl.models.attention_calls import AttentionCalls
from verl.models.loader import load_causal_lm
from verl.models.packed_attention import (
    UnsupportedAttentionError,
    packed_attention,
    with_block_mask,
)
from verl.models.packed_layout import layout_of_rows, number_tokens_depth_first
from verl.models.prefix_tree import pack_rows
from verl.records import BranchRequest
from verl.workers.actor import ActorWorker

CPU = torch.device("cpu")
HEADS, KEY_HEADS, WIDTH = 4, 2, 16


def pack_three_rows(long=False, merged=False):
    """Pack three rows with branches of two. Packed attention computes the first two rows in one
    call.
    """
    size = 150 if long else 7
    rows = [torch.arange(size), torch.arange(size + 1), torch.arange(4)]
    branches = [
        [
            BranchRequest(5, [1, 2]),
            BranchRequest(2, [3]),
            BranchRequest(5, [4, 5, 6]),
            BranchRequest(size, [1] * 70),
        ],
        [],
        [BranchRequest(1, [7, 8]), BranchRequest(4, list(range(60)))],
    ]
    return pack_rows(rows, branches, prefix_tree=merged)


def make_inputs(tokens):
    draw = torch.Generator().manual_seed(0)
    shapes = [(1, heads, tokens, WIDTH) for heads in (HEADS, KEY_HEADS, KEY_HEADS)]
    return [torch.randn(shape, generator=draw).requires_grad_() for shape in shapes]


def with_calls(layout, device):
    return replace(layout, calls=AttentionCalls(layout, device))


@pytest.fixture
def gradients_on_cpu(monkeypatch):
    """Disable torch's refusal of these gradients on a CPU, where they are correct too."""
    monkeypatch.setattr(library, "_validate_device", lambda *_: None)


@pytest.mark.parametrize("long", [False, True])
@pytest.mark.parametrize("merged", [False, True])
def test_outputs_and_gradients_equal_packed_attention(gradients_on_cpu, long, merged):
    packed = pack_three_rows(long, merged)
    layout, tokens = packed.layout, len(packed.input_ids)
    upstream = torch.randn(1, tokens, HEADS, WIDTH, generator=torch.Generator().manual_seed(1))
    results = []
    for prepare in (with_calls, with_block_mask):
        query, key, value = make_inputs(tokens)
        options = {"scaling": 0.3, "layout": prepare(layout, CPU)}
        out, _ = packed_attention(torch.nn.Module(), query, key, value, None, **options)
        out.backward(upstream)
        results.append((out.detach(), query.grad, key.grad, value.grad))
    torch.testing.assert_close(results[1], results[0], atol=2e-5, rtol=1e-4)


def test_token_attends_to_its_row_or_its_branch_and_prefix():
    """Row 0 has four tokens and a branch at 2, row 1 has two tokens and a branch at 1."""
    layout = pack_rows(
        [torch.arange(4), torch.arange(2)], [[BranchRequest(2, [5, 6])], [BranchRequest(1, [7])]]
    ).layout
    mask = with_block_mask(layout, CPU).block_mask
    assert mask is not None
    positions, unused = torch.arange(9), torch.zeros(())
    is_visible = mask.mask_mod(unused, unused, positions[:, None], positions[None, :])
    assert is_visible.int().tolist() == [
        [1, 0, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 1, 1, 0, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 0, 0],
        [1, 1, 0, 0, 0, 0, 1, 1, 0],
        [0, 0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_invisible_blocks_are_skipped():
    rows = [torch.arange(256), torch.arange(256)]
    mask = with_block_mask(pack_rows(rows).layout, CPU).block_mask
    assert mask is not None
    assert mask.to_dense()[0, 0].tolist() == [
        [1, 0, 0, 0],
        [1, 1, 0, 0],
        [0, 0, 1, 0],
        [0, 0, 1, 1],
    ]


def draw_tree(seed):
    """Return the layout of rows that share nested prefixes, of about 3,000 tokens."""
    draw = torch.Generator().manual_seed(seed)
    rows = [torch.randint(0, 9, (400,), generator=draw)]
    for _ in range(9):
        parent = rows[int(torch.randint(0, len(rows), (1,), generator=draw))]
        shared = int(torch.randint(0, len(parent) + 1, (1,), generator=draw))
        length = int(torch.randint(1, 500, (1,), generator=draw))
        rows.append(torch.cat([parent[:shared], torch.randint(0, 9, (length,), generator=draw)]))
    return pack_rows(rows, prefix_tree=True).layout


def list_blocks(counts, indices):
    """Return the sets of block indices that are listed for each block."""
    rows = zip(counts.flatten().tolist(), indices.flatten(0, 2).tolist(), strict=True)
    return [set(row[:count]) for count, row in rows]


LAYOUTS = {
    "one token": layout_of_rows([1]),
    "whole blocks": layout_of_rows([256, 128, 384]),
    "full blocks": layout_of_rows([700, 3, 600]),
    **{f"tree {seed}": draw_tree(seed) for seed in range(4)},
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("max_pairs", [1, 2**19, attention_module.MAX_PAIRS])
def test_blocks_equal_those_of_torch(monkeypatch, layout, max_pairs):
    monkeypatch.setattr(attention_module, "MAX_PAIRS", max_pairs)
    actual = with_block_mask(layout, CPU).block_mask
    assert actual is not None
    enter, leave = map(torch.from_numpy, number_tokens_depth_first(layout))
    tokens = len(enter)

    def is_visible(_batch, _head, query, key):
        return (enter[key] <= enter[query]) & (enter[query] < leave[key])

    expected = library.create_block_mask(is_visible, None, None, tokens, tokens, device="cpu")
    assert actual.seq_lengths == expected.seq_lengths
    assert actual.BLOCK_SIZE == expected.BLOCK_SIZE
    assert torch.equal(actual.to_dense(), expected.to_dense())
    for kind in ("kv", "full_kv", "q", "full_q"):
        counts, indices = (
            [getattr(mask, f"{kind}_{name}") for mask in (actual, expected)]
            for name in ("num_blocks", "indices")
        )
        assert torch.equal(*counts), kind
        assert [x.dtype for x in indices] == [torch.int32] * 2
        assert list_blocks(counts[0], indices[0]) == list_blocks(counts[1], indices[1]), kind
    positions = torch.arange(tokens)
    pairs = (torch.zeros(()), torch.zeros(()), positions[:, None], positions)
    assert torch.equal(actual.mask_mod(*pairs), expected.mask_mod(*pairs))


class LargestTensor(TorchDispatchMode):
    """Record the largest number of elements of any tensor that an operation returns."""

    elements = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        output = func(*args, **(kwargs or {}))
        if isinstance(output, torch.Tensor):
            self.elements = max(self.elements, output.numel())
        return output


def test_block_mask_compares_a_few_blocks_of_queries_at_once(monkeypatch):
    """4,225 tokens are 34 blocks. Four blocks of queries have 2.2 M of all 17.9 M pairs."""
    monkeypatch.setattr(attention_module, "MAX_PAIRS", 4 * 128 * 34 * 128)
    with LargestTensor() as largest:
        with_block_mask(layout_of_rows([4000, 225]), CPU)
    assert largest.elements == 4 * 128 * 34 * 128


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=64, layers=2, std=0.2)


def test_worker_scores_rows_and_branches_with_both_attentions(policy):
    data = add_branches(random_rows(rows=5))
    outputs = []
    for attention in ("sdpa", "flex"):
        config = policy_config(policy, ppo_micro_batch_size_per_gpu=3)
        config.model.attn_implementation = attention
        worker = ActorWorker(config, device="cpu")
        worker.init_model()
        outputs.append(worker.compute_log_prob(data))
    plain, flex = outputs
    for column in ("old_log_probs", "entropys"):
        torch.testing.assert_close(flex.batch[column], plain.batch[column], atol=1e-5, rtol=0)
        assert not torch.equal(flex.batch[column], plain.batch[column])
    for row, expected in zip(
        flex.non_tensor_batch["branch_scores"], plain.non_tensor_batch["branch_scores"], strict=True
    ):
        assert [score.logprob for score in row] == pytest.approx(
            [score.logprob for score in expected], abs=1e-5
        )


def test_unsupported_arguments_are_refused(policy):
    layout = pack_three_rows().layout
    query, key, value = (x.detach() for x in make_inputs(len(pack_three_rows().input_ids)))
    layout_with_mask = with_block_mask(layout, CPU)
    cases: list[tuple[dict[str, Any], str]] = [
        ({"layout": None}, "layout"),
        ({"layout": layout}, "layout"),
        ({"layout": layout_with_mask, "dropout": 0.1}, "dropout=0.1"),
        ({"layout": layout_with_mask, "softcap": 30.0}, "softcap"),
        ({"layout": layout_with_mask, "sliding_window": 6}, "6"),
    ]
    for arguments, message in cases:
        with pytest.raises(UnsupportedAttentionError, check=mentions(message)):
            packed_attention(torch.nn.Module(), query, key, value, None, **arguments)
    lm = load_causal_lm(policy, attention="flex")
    with pytest.raises(UnsupportedAttentionError):
        lm(input_ids=torch.zeros(1, 2, dtype=torch.long))
