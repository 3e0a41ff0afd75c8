"""Tests of the operation counts, against numbers worked out by hand and torch's counter."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from tests.helpers.policy_rows import random_rows
from tests.helpers.tiny_model import make_tiny_policy
from verl.models.flops import ForwardSize, ModelFlops, count_model_weights
from verl.models.loader import load_causal_lm, prepare_for_training
from verl.models.policy import PolicyModel, ValueModel
from verl.workers.rows import Rows
from verl.workers.update import PEAK_TFLOPS, find_peak_tflops


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"), hidden=64, layers=2)


def test_forward_and_update_by_hand():
    flops = ModelFlops(
        weights=10, trained_weights=10, head_weights=3, trained_head_weights=3, query_size=2
    )
    work = ForwardSize(tokens=5, head_positions=4, attention_pairs=15)
    assert flops.compute_forward_flops(work) == 2 * (10 * 5 + 3 * 4) + 4 * 2 * 15
    assert flops.compute_update_flops(work) == 3 * flops.compute_forward_flops(work)
    frozen = ModelFlops(
        weights=10, trained_weights=1, head_weights=3, trained_head_weights=0, query_size=2
    )
    assert frozen.compute_update_flops(work) == 3 * flops.compute_forward_flops(work) - 2 * (
        9 * 5 + 3 * 4
    )
    assert work + ForwardSize(1, 2, 3, 4) == ForwardSize(6, 6, 18, 4)


def test_work_of_rows_counts_tokens_samples_and_pairs():
    rows = Rows(random_rows(rows=3))
    first, last = rows.lengths[0], rows.lengths[2]
    sampled = int(rows.mask[0].sum() + rows.mask[2].sum())
    pairs = first * (first + 1) // 2 + last * (last + 1) // 2
    rows.pack_rows([0, 2])
    assert rows.packed_size == ForwardSize(first + last, sampled, pairs, first + last)


def measure_size(rows, index):
    return rows.measure_forward_size(rows.pack_rows(index), index)


def count_with_torch(module, rows, backward):
    """Return torch's count for a pass over all rows.

    Each row has its own attention call with plain products, because torch counts only those.
    """
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        for row in range(len(rows)):
            packed = rows.pack_rows([row])
            targets = rows.sampled_targets(packed, [row])
            inputs = (packed.input_ids, packed.position_ids, packed.layout)
            if isinstance(module, PolicyModel):
                loss = module(*inputs, [targets])[0].log_probs.sum()
            else:
                loss = module(*inputs, targets.predicting_positions).sum()
            if backward:
                loss.backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("backward", [False, True])
@pytest.mark.parametrize("make", [PolicyModel, ValueModel])
def test_counts_equal_those_of_torch(policy, make, backward):
    module = make(load_causal_lm(policy))
    rows = Rows(random_rows(rows=3))
    work = measure_size(rows, [0, 1, 2])
    square = replace(work, attention_pairs=sum(length**2 for length in rows.lengths))
    flops = count_model_weights(module)
    expected = (
        flops.compute_update_flops(square) if backward else flops.compute_forward_flops(square)
    )
    with torch.set_grad_enabled(backward):
        assert count_with_torch(module, rows, backward) == expected


def test_adapters_cost_a_forward_and_input_gradients(policy):
    """The formula also counts the gradients of the inputs of the first layer, which torch skips."""
    module = PolicyModel(load_causal_lm(policy, lora_rank=4))
    rows = Rows(random_rows(rows=3))
    work = measure_size(rows, [0, 1, 2])
    square = replace(work, attention_pairs=sum(length**2 for length in rows.lengths))
    flops = count_model_weights(module)
    assert 0 < flops.trained_weights < 0.3 * flops.weights and flops.trained_head_weights == 0
    expected = flops.compute_update_flops(square)
    actual = count_with_torch(module, rows, backward=True)
    first_layer_weights = sum(
        weight.numel()
        for name, weight in module.sharded_layers[0].named_parameters()
        if "self_attn" in name
        and weight.dim() == 2
        and "o_proj" not in name
        and "lora_B" not in name
    )
    assert actual == expected - 2 * first_layer_weights * work.tokens


@pytest.mark.parametrize("backward", [False, True])
def test_experts_count_as_often_as_a_token_uses_them(backward):
    model = AutoModelForCausalLM.from_config(
        Qwen3MoeConfig(
            vocab_size=400,
            hidden_size=32,
            moe_intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            num_experts=4,
            num_experts_per_tok=2,
        )
    )
    lm = prepare_for_training(model.float())
    lm.set_experts_implementation("eager")  # torch does not count grouped products
    rows = Rows(random_rows(rows=3))
    work = measure_size(rows, [0, 1, 2])
    square = replace(work, attention_pairs=sum(length**2 for length in rows.lengths))
    flops = count_model_weights(PolicyModel(lm))
    expected = (
        flops.compute_update_flops(square) if backward else flops.compute_forward_flops(square)
    )
    with torch.set_grad_enabled(backward):
        assert count_with_torch(PolicyModel(lm), rows, backward) == expected


@pytest.mark.parametrize(
    ("device", "peak"),
    [
        ("NVIDIA H100 80GB HBM3", 989.0),
        ("NVIDIA H100 PCIe", 756.0),
        ("NVIDIA A100-SXM4-80GB", 312.0),
        ("NVIDIA A10G", 70.0),
        ("NVIDIA GeForce RTX 4090", 165.0),
        ("NVIDIA RTX A4000", None),
        ("NVIDIA L40S", 362.0),
        ("", None),
    ],
)
def test_peak_is_found_by_whole_device_names(device, peak):
    assert find_peak_tflops(device) == peak
    assert all(find_peak_tflops(f"NVIDIA {name}") == value for name, value in PEAK_TFLOPS.items())
