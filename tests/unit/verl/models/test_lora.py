"""Tests of LoRA: supported targets merge as in peft, and all others are refused."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM, GPT2Config, Qwen2Config

from tests.helpers.refusals import mentions
from verl.models.export import merge_weights, tied_names
from verl.models.lora import UnsupportedTargets, add_lora, lora_scales, merge_lora

SMALL: dict[str, Any] = {
    "vocab_size": 48,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
}
HEADS: dict[str, Any] = {"num_attention_heads": 2, "num_key_value_heads": 1}


def make_model(kind):
    if kind == "gpt2":
        config = GPT2Config(vocab_size=48, n_embd=16, n_layer=1, n_head=2)
    else:
        config = Qwen2Config(tie_word_embeddings=kind == "tied", **SMALL, **HEADS)
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config)


SUPPORTED = [
    ("tied", "all-linear"),
    ("tied", "q_proj"),
    ("tied", ["q_proj", "down_proj"]),
    ("tied", ["layers.1.mlp.up_proj"]),
    ("untied", "all-linear"),
    ("untied", ["q_proj", "lm_head"]),
    ("untied", ("lm_head",)),
]
REFUSED = [
    ("tied", ["q_proj", "lm_head"]),
    ("tied", "lm_head"),
    ("tied", ["embed_tokens"]),
    ("untied", ["embed_tokens", "q_proj"]),
    ("tied", ["q_porj"]),
    ("tied", ".*q_proj"),
    ("tied", "q_proj,v_proj"),
    ("tied", ["all-linear"]),
    ("tied", ["self_attn"]),
    ("tied", ["input_layernorm"]),
    ("tied", ["model"]),
    ("tied", []),
    ("tied", ""),
    ("tied", None),
    ("tied", [None]),
    ("tied", 3),
    ("tied", [["q_proj"]]),
    ("tied", {"q_proj": 4}),
    ("gpt2", ["c_attn"]),
    ("gpt2", "all-linear"),
]


@pytest.mark.parametrize(("kind", "targets"), SUPPORTED)
def test_merged_weights_equal_those_of_peft(kind, targets):
    adapted = add_lora(make_model(kind), rank=2, alpha=3.0, target_modules=targets)
    with torch.no_grad():
        for name, weight in adapted.named_parameters():
            if ".lora_" in name:
                weight.copy_(torch.randn(weight.shape))
    state = {f"lm.{name}": weight.data for name, weight in adapted.named_parameters()}
    merged = merge_weights(state, "lm.", lora_scales(adapted), tied_names(adapted))
    peft_model = get_peft_model(
        make_model(kind),
        LoraConfig(
            r=2,
            lora_alpha=3,
            target_modules=targets
            if targets == "all-linear"
            else ([targets] if isinstance(targets, str) else list(targets)),
        ),
    )
    peft_model.load_state_dict(
        {f"base_model.model.{name}": weight for name, weight in adapted.state_dict().items()}
    )
    plain = dict(peft_model.merge_and_unload().named_parameters())
    assert merged.keys() == plain.keys() == dict(make_model(kind).named_parameters()).keys()
    for name, weight in plain.items():
        torch.testing.assert_close(merged[name], weight.data)


@pytest.mark.parametrize(("kind", "targets"), REFUSED)
def test_targets_that_cannot_be_merged_are_refused(kind, targets):
    model = make_model(kind)
    with pytest.raises(UnsupportedTargets):
        add_lora(model, rank=2, alpha=3.0, target_modules=targets)
    assert all(weight.requires_grad for weight in model.parameters())  # unchanged by the refusal


@pytest.mark.parametrize(
    "name",
    [
        "lm_head.lora_A.default.weight",
        "embed.lora_embedding_A.default",
        "q.lora_magnitude_vector.default.weight",
        "head.modules_to_save.default.weight",
        "head.original_module.weight",
        "q.lora_A.other.weight",
    ],
)
def test_unknown_adapter_weight_is_refused(name):
    weight, low, high = torch.ones(4, 3), torch.ones(2, 3), torch.ones(4, 2)
    state = {
        "q.base_layer.weight": weight,
        "q.lora_A.default.weight": low,
        "q.lora_B.default.weight": high,
    }
    assert torch.equal(merge_lora(state, {"q": 0.5})["q.weight"], torch.full((4, 3), 2.0))
    with pytest.raises(ValueError, check=mentions("adapter")):
        merge_lora(state | {name: low}, {"q": 0.5})


@pytest.mark.parametrize("missing", ["q.lora_A.default.weight", "q.lora_B.default.weight", "scale"])
def test_adapted_weight_without_its_adapter_is_refused(missing):
    state = {
        "q.base_layer.weight": torch.ones(4, 3),
        "q.lora_A.default.weight": torch.ones(2, 3),
        "q.lora_B.default.weight": torch.ones(4, 2),
    }
    state.pop(missing, None)
    with pytest.raises(ValueError, check=mentions("adapter")):
        merge_lora(state, {} if missing == "scale" else {"q": 0.5})


def test_weight_outside_the_model_is_refused():
    with pytest.raises(ValueError, check=mentions("value_head")):
        merge_weights({"lm.a": torch.ones(1), "value_head.weight": torch.ones(1)}, "lm.", {}, set())
