"""Tests of LoRA: supported targets merge as in peft, and all others are refused."""

from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model, inject_adapter_in_model
from transformers import (
    AutoModelForCausalLM,
    DeepseekV2Config,
    FalconMambaConfig,
    Glm4MoeConfig,
    GPT2Config,
    LongcatFlashConfig,
    PhimoeConfig,
    Qwen2Config,
    Qwen3MoeConfig,
)

from tests.helpers.model_families import (
    EXPERTS,
    LATENT,
    ROW_WISE,
    SCALED,
    WINDOWED,
    build_family,
    sizes,
)
from tests.helpers.refusals import mentions
from verl.models import lora
from verl.models.export import merge_weights, tied_names
from verl.models.lora import UnsupportedTargetsError, add_lora, lora_scales, merge_lora

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


# Families with fused experts, with subclasses of nn.Linear that compute something else, and with
# linear layers that are not called: the config, and the modules to adapt of each decoder layer.
ATTENTION = ["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"]
LATENT_ATTENTION = [
    f"self_attn.{name}"
    for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
]
INDEXER = [f"self_attn.indexer.{name}" for name in ("wq_b", "wk", "weights_proj")]
DELTA_NET = [f"linear_attn.{name}" for name in ("in_proj_ba", "in_proj_qkvz", "out_proj")]
DENSE = [f"mlp.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
SHARED = [f"mlp.shared_experts.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
GATED = [f"mlp.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
GATED.append("mlp.shared_expert_gate")
LATENT_LAYERS = (LATENT_ATTENTION + DENSE, LATENT_ATTENTION + SHARED)
INDEXED_LAYERS = tuple(layer + INDEXER for layer in LATENT_LAYERS)
GROUPED = [f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_proj", "o_b_proj")]
COMPRESSOR = ["self_attn.compressor.kv_proj", "self_attn.compressor.gate_proj"]
ROUTED = [f"feed_forward.shared_expert.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
FEED_FORWARD = [f"feed_forward.{name}" for name in ("gate_proj", "up_proj", "down_proj")]
FUSED_GATE = ["shared_mlp.input_linear", "shared_mlp.output_linear"]
UNGATED = ["mixer.shared_experts.up_proj", "mixer.shared_experts.down_proj"]
FALCON = ["self_attention.query_key_value", "self_attention.dense"]
FALCON += ["mlp.dense_h_to_4h", "mlp.dense_4h_to_h"]
FAMILIES: dict[str, Any] = {
    "deepseek_v2": (lambda: DeepseekV2Config(**sizes(LATENT)), LATENT_LAYERS),
    "deepseek_v3": (SCALED["deepseek-v3"], LATENT_LAYERS),
    "deepseek_v32": (ROW_WISE["deepseek-v3.2"], INDEXED_LAYERS),
    "glm4_moe": (
        lambda: Glm4MoeConfig(**sizes(LATENT, num_key_value_heads=2)),
        (ATTENTION + DENSE, ATTENTION + SHARED),
    ),
    "glm_moe_dsa": (ROW_WISE["glm-5"], INDEXED_LAYERS),
    "qwen3_next": (ROW_WISE["qwen3-next"], (DELTA_NET + GATED, ATTENTION + GATED)),
    "qwen3_moe": (
        lambda: Qwen3MoeConfig(**sizes(EXPERTS, head_dim=8), mlp_only_layers=[0]),
        (ATTENTION + DENSE, ATTENTION),
    ),
    "llama4": (WINDOWED["llama4"], [ATTENTION + ROUTED] * 2),
    "phimoe": (
        lambda: PhimoeConfig(**sizes(num_local_experts=4, num_experts_per_tok=2)),
        [ATTENTION] * 2,
    ),
    "deepseek_v4": (ROW_WISE["deepseek-v4"], [GROUPED + COMPRESSOR + SHARED] * 2),
    "falcon": (ROW_WISE["falcon-alibi"], [FALCON] * 2),
    "mamba": (ROW_WISE["mamba"], [["mixer.in_proj"]] * 2),
    "mamba2": (ROW_WISE["mamba2"], [["mixer.in_proj"]] * 2),
    "falcon_mamba": (
        lambda: FalconMambaConfig(
            vocab_size=320, hidden_size=32, num_hidden_layers=2, state_size=8
        ),
        [["mixer.in_proj"]] * 2,
    ),
    "falcon_h1": (ROW_WISE["falcon-h1"], [["mamba.in_proj", *ATTENTION, *FEED_FORWARD]] * 2),
    "jamba": (
        ROW_WISE["jamba"],
        (
            [*(f"mamba.{name}" for name in ("in_proj", "x_proj", "out_proj")), *FEED_FORWARD],
            [*ATTENTION, "feed_forward.router"],
        ),
    ),
    "bamba": (
        ROW_WISE["bamba"],
        (["mamba.in_proj", *FEED_FORWARD], ATTENTION + FEED_FORWARD),
    ),
    "granitemoehybrid": (
        ROW_WISE["granite-4-hybrid"],
        (["mamba.in_proj", *FUSED_GATE], ATTENTION + FUSED_GATE),
    ),
    "nemotron_h": (
        ROW_WISE["nemotron-3"],
        (
            ["mixer.in_proj"],
            UNGATED,
            [name.replace("self_attn", "mixer") for name in ATTENTION],
            UNGATED,
        ),
    ),
    "longcat_flash": (
        lambda: LongcatFlashConfig(
            **sizes(
                LATENT,
                num_layers=1,
                head_dim=8,
                ffn_hidden_size=32,
                expert_ffn_hidden_size=16,
            )
        ),
        [
            [
                layer.replace("self_attn", f"self_attn.{i}").replace("mlp", f"mlps.{i}")
                for i in range(2)
                for layer in LATENT_ATTENTION + DENSE
            ]
        ],
    ),
}
LAYER_PREFIXES = {"falcon": "transformer.h"} | dict.fromkeys(
    ("mamba", "mamba2", "falcon_mamba"), "backbone.layers"
)
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


@torch.no_grad()
def compute_logits(model):
    torch.manual_seed(2)
    return model(torch.randint(1, 40, (2, 7)), use_cache=False).logits


def randomize_adapters(model):
    torch.manual_seed(1)
    for name, weight in model.named_parameters():
        if ".lora_" in name:
            weight.data.normal_(std=0.1)


@pytest.mark.parametrize("family", FAMILIES)
def test_exactly_the_linear_layers_are_adapted_and_merged(family):
    make_config, layers = FAMILIES[family]
    model, merged_model = (build_family(make_config()) for _ in range(2))
    base_logits = compute_logits(model)
    add_lora(model, rank=2, alpha=4.0)
    prefix = LAYER_PREFIXES.get(family, "model.layers")
    names = {f"{prefix}.{i}.{name}" for i, layer in enumerate(layers) for name in layer}
    assert lora_scales(model) == dict.fromkeys(names, 2.0)
    randomize_adapters(model)
    state = {f"lm.{name}": weight.data for name, weight in model.named_parameters()}
    merged = merge_weights(state, "lm.", lora_scales(model), tied_names(model))
    assert merged.keys() == {name for name, _ in merged_model.named_parameters()}
    merged_model.load_state_dict(merged, strict=False)
    logits = compute_logits(model)
    assert not torch.allclose(logits, base_logits, atol=1e-3)
    torch.testing.assert_close(compute_logits(merged_model), logits, atol=2e-5, rtol=0)


@pytest.mark.filterwarnings("ignore:The following (rank|alpha)_pattern")
def test_other_modules_than_the_targets_are_refused(monkeypatch):
    # If peft sees the config of transformers, it adapts the experts instead of the linear layers.
    monkeypatch.setattr(
        lora,
        "inject_adapter",
        lambda model, config, name: inject_adapter_in_model(config, model, adapter_name=name),
    )
    model = build_family(SCALED["deepseek-v3"]())
    with pytest.raises(UnsupportedTargetsError, check=mentions("down_proj")):
        add_lora(model, rank=2, alpha=4.0)


@pytest.mark.parametrize(("kind", "targets"), REFUSED)
def test_targets_that_cannot_be_merged_are_refused(kind, targets):
    model = make_model(kind)
    with pytest.raises(UnsupportedTargetsError):
        add_lora(model, rank=2, alpha=3.0, target_modules=targets)
    assert all(weight.requires_grad for weight in model.parameters())  # unchanged by the refusal


@pytest.mark.parametrize(
    ("family", "target"),
    [
        ("llama4", "router"),
        ("phimoe", "mlp.router"),
        ("deepseek_v4", "o_a_proj"),
        ("mamba", "x_proj"),
        ("falcon_mamba", "dt_proj"),
        ("mamba2", "out_proj"),
        ("falcon_h1", "out_proj"),
        ("nemotron_h", "mixer.out_proj"),
        ("bamba", "out_proj"),
        ("granitemoehybrid", "out_proj"),
        ("jamba", "dt_proj"),
        ("longcat_flash", "classifier"),
    ],
)
def test_linear_layer_whose_adapter_would_have_no_effect_is_refused(family, target):
    model = build_family(FAMILIES[family][0]())
    with pytest.raises(UnsupportedTargetsError, check=mentions(target)):
        add_lora(model, rank=2, alpha=4.0, target_modules=[target])


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
