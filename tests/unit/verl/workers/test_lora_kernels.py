"""Tests of the LoRA operation that replaces vLLM's on CPU, against a loop over tokens."""

import pytest
import torch

from verl.workers.rollout.vllm_cpu import add_lora_products

TOKENS, WIDTH, RANK, OUT = 7, 6, 3, 5


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tokens_without_adapter_are_unchanged_with_all_slots_in_use(dtype):
    torch.manual_seed(0)
    first, second = torch.randn(2, 1, RANK, WIDTH), torch.randn(2, 1, OUT, RANK)
    inputs, outputs = torch.randn(TOKENS, WIDTH), torch.randn(TOKENS, 2 * OUT)
    slots = [0, -1, 1, 1, -1, 0, 1]
    expected = outputs.clone()
    for token, slot in enumerate(slots):
        if slot >= 0:
            expected[token, OUT:] += second[slot, 0] @ (first[slot, 0] @ inputs[token])
    outputs = outputs.to(dtype)
    unchanged = outputs.clone()
    # The layer is a part of a fused layer.
    part = outputs.split((OUT, OUT), dim=-1)[1]
    matrices = (first.to(dtype), second.to(dtype))
    add_lora_products(part, inputs.to(dtype), *matrices, torch.tensor(slots))
    assert torch.equal(outputs[:, :OUT], unchanged[:, :OUT])
    assert torch.equal(outputs[[1, 4]], unchanged[[1, 4]])
    tolerance = 1e-5 if dtype is torch.float32 else 0.1
    torch.testing.assert_close(outputs.float(), expected, atol=tolerance, rtol=0)
