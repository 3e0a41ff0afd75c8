"""Tests of the LoRA operations that replace vLLM's on CPU, against a loop over tokens."""

import pytest
import torch

from verl.workers.rollout.vllm_cpu import expand_by_slot, expand_slice_by_slot, shrink_by_slot

TOKENS, WIDTH, RANK, OUT = 7, 6, 3, 5
# All slots are in use. -1 stands for a token without an adapter.
SLOTS = torch.tensor([0, -1, 1, 1, -1, 0, 1])


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def matrices(request):
    torch.manual_seed(0)
    shapes = ((2, 1, RANK, WIDTH), (2, 1, OUT, RANK))
    return [torch.randn(shape).to(request.param) for shape in shapes]


def multiply(inputs, weights):
    rows = [
        weights[slot, 0].float() @ row.float() if slot >= 0 else torch.zeros(weights.shape[2])
        for row, slot in zip(inputs, SLOTS.tolist(), strict=True)
    ]
    return torch.stack(rows)


def test_tokens_without_adapter_get_zeros_with_all_slots_in_use(matrices):
    first, second = matrices
    inputs = torch.randn(TOKENS, WIDTH).to(first.dtype)
    shrunk = torch.full((TOKENS, RANK), 9.0)
    shrink_by_slot(inputs, first, shrunk, SLOTS, 0.5)
    torch.testing.assert_close(shrunk, 0.5 * multiply(inputs, first))
    output = torch.randn(TOKENS, OUT + 2)
    expected = output.clone()
    expected[:, :OUT] += multiply(shrunk, second)
    expand_by_slot(shrunk, second, output, SLOTS)
    torch.testing.assert_close(output, expected)
    expand_by_slot(shrunk, second, output, SLOTS, add_inputs=False)
    torch.testing.assert_close(output[:, :OUT], multiply(shrunk, second))
    torch.testing.assert_close(output[:, OUT:], expected[:, OUT:])


def test_slices_of_a_fused_layer_are_separate(matrices):
    _, second = matrices
    inputs = torch.randn(TOKENS, RANK)
    output = torch.zeros(TOKENS, 2 * OUT)
    expand_slice_by_slot(inputs, second, output, SLOTS, OUT, OUT)
    torch.testing.assert_close(output[:, OUT:], multiply(inputs, second))
    assert not output[:, :OUT].any()
