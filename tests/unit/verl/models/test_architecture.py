"""Tests of architectures on tiny random models: packed rows are scored correctly, or the model gets
row-wise passes with a reason.
"""

import copy
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from torch import nn

import verl.models.architecture as architecture
from tests.helpers import model_families
from tests.helpers.model_families import EXPERTS
from tests.helpers.policy_rows import naive_sequences
from tests.helpers.refusals import mentions
from verl.models.architecture import (
    UnsupportedArchitectureError,
    choose_forward_kind,
)
from verl.models.attention_calls import AttentionCalls
from verl.models.backbone import attention_window, compute_packed_hidden, output_head
from verl.models.forward_kind import PackedForward, RowWiseForward
from verl.models.loader import load_causal_lm, prepare_for_training
from verl.models.packed_attention import (
    PACKED_ATTENTION,
    UnsupportedAttentionError,
    packed_attention,
    register_packed_attention,
)
from verl.models.packed_layout import layout_of_rows
from verl.models.policy import PolicyModel
from verl.models.prefix_tree import pack_rows
from verl.models.token_scores import Targets, forward_changes_logits
from verl.records import BranchRequest

SIZES: dict[str, Any] = model_families.SIZES | {"vocab_size": 120}


def measure_packed_log_prob_gap(lm):
    """Return the largest difference (nats) between log-probs of packed and of plain passes."""
    with architecture._without_dropout_and_gradient(lm):
        architecture._require_packed_attention(lm)
        forward_kind = PackedForward(
            PACKED_ATTENTION, computes_logits_by_forward=forward_changes_logits(lm)
        )
        return architecture._measure_smallest_log_prob_gap(lm, forward_kind)


def build_model(config, std=0.2):
    """Return a random model of ``config`` on packed attention, in the state that
    ``from_pretrained`` gives.
    """
    register_packed_attention()
    config.initializer_range = std  # the usual 0.02 leaves the attention nearly uniform
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=PACKED_ATTENTION)
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.data.normal_()
    return model.float().eval()


SUPPORTED: dict[str, Callable[[], Any]] = {
    "qwen2": lambda: hf.Qwen2Config(**SIZES),
    "qwen3": lambda: hf.Qwen3Config(**SIZES, head_dim=8),
    "qwen3-moe": lambda: hf.Qwen3MoeConfig(**SIZES, **EXPERTS),
    "llama": lambda: hf.LlamaConfig(**SIZES),
    "mistral": lambda: hf.MistralConfig(**SIZES, sliding_window=None),
    "mistral, long window": lambda: hf.MistralConfig(**SIZES, sliding_window=64),
    "mixtral": lambda: hf.MixtralConfig(**SIZES, num_local_experts=4, num_experts_per_tok=2),
    "phi3": lambda: hf.Phi3Config(**SIZES),
    "gemma": lambda: hf.GemmaConfig(**SIZES, head_dim=8),
    "gemma3, long window": lambda: hf.Gemma3TextConfig(**SIZES, head_dim=8, sliding_window=64),
    "granite": lambda: hf.GraniteConfig(**SIZES),
    "olmo2": lambda: hf.Olmo2Config(**SIZES),
    "smollm3": lambda: hf.SmolLM3Config(**SIZES),
    "starcoder2": lambda: hf.Starcoder2Config(**SIZES),
    "lfm2 without convolutions": lambda: hf.Lfm2Config(**SIZES, layer_types=["full_attention"] * 2),
    "gpt2": lambda: hf.GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=256),
    "opt": lambda: hf.OPTConfig(**SIZES, ffn_dim=64, word_embed_proj_dim=32),
    "cohere": lambda: hf.CohereConfig(**SIZES),
    "granite, scaled": lambda: hf.GraniteConfig(**SIZES, logits_scaling=8.0),
    "gemma2, plain attention": lambda: hf.Gemma2Config(
        **SIZES, head_dim=8, attn_logit_softcapping=None
    ),
    "llama4": lambda: hf.Llama4TextConfig(**SIZES, head_dim=8, num_local_experts=2),
    "deepseek-v2": lambda: hf.DeepseekV2Config(
        **{**SIZES, "num_key_value_heads": 4},
        moe_intermediate_size=16,
        n_routed_experts=4,
        num_experts_per_tok=2,
        n_group=1,
        topk_group=1,
        kv_lora_rank=8,
        q_lora_rank=None,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=8,
        n_shared_experts=1,
    ),
}

ROW_WISE: dict[str, tuple[Callable[[], Any], str]] = {
    "gpt-oss": (
        lambda: hf.GptOssConfig(
            **SIZES, head_dim=8, sliding_window=64, num_local_experts=4, num_experts_per_tok=2
        ),
        "s_aux: attention sinks",
    ),
    "bloom": (lambda: hf.BloomConfig(vocab_size=120, hidden_size=32, n_layer=2, n_head=4), "alibi"),
    "mpt": (lambda: hf.MptConfig(vocab_size=120, d_model=32, n_heads=4, n_layers=2), "alibi"),
    "gemma2, capped attention": (
        lambda: hf.Gemma2Config(**SIZES, head_dim=8, final_logit_softcapping=None),
        "attn_logit_softcapping=50.0: a soft cap on the attention",
    ),
    "mamba": (
        lambda: hf.MambaConfig(
            vocab_size=120, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0
        ),
        "linear_attention",
    ),
    "mamba2": (
        lambda: hf.Mamba2Config(
            vocab_size=120,
            hidden_size=32,
            num_hidden_layers=2,
            state_size=8,
            num_heads=8,
            head_dim=8,
            expand=2,
            n_groups=1,
        ),
        "linear_attention",
    ),
    "falcon-h1": (
        lambda: hf.FalconH1Config(
            **SIZES,
            mamba_d_ssm=32,
            mamba_n_heads=4,
            mamba_d_head=8,
            mamba_n_groups=1,
            mamba_d_state=8,
        ),
        "hybrid: such a layer keeps a recurrent state",
    ),
    "lfm2": (
        lambda: hf.Lfm2Config(**SIZES, layer_types=["conv", "full_attention"]),
        "conv: such a layer keeps a recurrent state",
    ),
    "qwen3-next": (
        lambda: hf.Qwen3NextConfig(
            **SIZES,
            **EXPERTS,
            head_dim=8,
            shared_expert_intermediate_size=16,
            linear_num_key_heads=2,
            linear_num_value_heads=2,
            linear_key_head_dim=8,
            linear_value_head_dim=8,
        ),
        "linear_attention",
    ),
    "rwkv": (
        lambda: hf.RwkvConfig(
            vocab_size=120, hidden_size=32, num_hidden_layers=2, context_length=256
        ),
        "RwkvBlock",
    ),
    "recurrent-gemma": (
        lambda: hf.RecurrentGemmaConfig(
            **{**SIZES, "num_hidden_layers": 3}, lru_width=32, logits_soft_cap=1e9
        ),
        r"RecurrentGemma\w+",
    ),
    "doge": (lambda: hf.DogeConfig(**SIZES), "attention mask"),
    "stablelm": (lambda: hf.StableLmConfig(**SIZES), "layout"),
    "openai-gpt": (
        lambda: hf.OpenAIGPTConfig(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=256),
        "AttentionInterface",
    ),
}


def score_packed(model, rows, branches):
    """Return log-probs of all next tokens of rows and branches in one packed pass, as in
    training.
    """
    packed = pack_rows(rows, branches)
    targets = []
    for tokens, first in zip(rows, packed.offsets, strict=True):
        path = packed.row_positions[first : first + len(tokens)]
        targets.append(Targets(path[:-1], tokens[1:]))
    for row, paths in zip(branches, packed.branch_positions, strict=True):
        for branch, path in zip(row, paths, strict=True):
            targets.append(Targets(path[branch.start : -1], torch.tensor(branch.token_ids)[1:]))
    with torch.no_grad():
        scores = PolicyModel(model)(packed.input_ids, packed.position_ids, packed.layout, targets)
    return [score.log_probs for score in scores]


def score_one_by_one(model, rows, branches):
    """Return the log-probs of ``score_packed`` from plain forwards with transformers' attention."""
    plain = hf.AutoModelForCausalLM.from_config(
        copy.deepcopy(model.config), attn_implementation="eager"
    )
    plain.float().eval().load_state_dict(model.state_dict())
    sequences = [(row, 0) for row in rows]
    for row, branch_tokens in zip(branches, naive_sequences(rows, branches), strict=True):
        sequences += [
            (tokens, branch.start) for branch, tokens in zip(row, branch_tokens, strict=True)
        ]
    scores = []
    with torch.no_grad():
        for tokens, start in sequences:
            log_probs = plain(tokens[None]).logits[0].log_softmax(-1)
            scores.append(log_probs[start:-1].gather(-1, tokens[start + 1 :, None])[:, 0])
    return scores


def random_rows_and_branches():
    draw = torch.Generator().manual_seed(3)
    rows = [torch.randint(3, 120, (n,), generator=draw) for n in (20, 13, 17)]
    branch_tokens = torch.randint(3, 120, (22,), generator=draw).tolist()
    return rows, [
        [BranchRequest(18, branch_tokens[:12])],
        [],
        [BranchRequest(5, branch_tokens[12:18]), BranchRequest(5, branch_tokens[18:])],
    ]


@pytest.mark.parametrize("name", SUPPORTED)
def test_supported_model_scores_packed_rows_correctly(name):
    model = prepare_for_training(build_model(SUPPORTED[name]()))
    rows, branches = random_rows_and_branches()
    actual = score_packed(model, rows, branches)
    for packed, plain in zip(actual, score_one_by_one(model, rows, branches), strict=True):
        torch.testing.assert_close(packed, plain, atol=5e-5, rtol=0)


def mean_log_prob(model, rows, packed):
    """Return the mean log-prob of all next tokens of ``rows`` in the packed passes."""
    log_probs = []
    for pack, members in packed:
        targets = [
            Targets(pack.row_positions[first : first + len(rows[row]) - 1], rows[row][1:])
            for row, first in zip(members, pack.offsets, strict=True)
        ]
        scores = PolicyModel(model)(pack.input_ids, pack.position_ids, pack.layout, targets)
        log_probs += [score.log_probs for score in scores]
    return torch.cat(log_probs).mean()


@pytest.mark.parametrize("name", SUPPORTED)
def test_rows_that_share_prefixes_have_the_gradient_of_separate_rows(name):
    model = prepare_for_training(build_model(SUPPORTED[name]())).double()
    if name in ("qwen3-moe", "mixtral", "deepseek-v2"):
        model.set_experts_implementation("eager")  # torch has no grouped products in float64
    draw = torch.Generator().manual_seed(1)
    prompt, turn, *ends = (
        torch.randint(3, 120, (n,), generator=draw) for n in (9, 8, 4, 12, 20, 3)
    )
    rows = [torch.cat([prompt, turn, end]) for end in ends[:2]] + [torch.cat([prompt, ends[2]])]
    rows += [torch.cat([prompt, turn[:5], ends[3]]), prompt]
    merged = pack_rows(rows, prefix_tree=True)
    assert len(merged.input_ids) == 9 + 8 + 4 + 12 + 20 + 3
    loss = mean_log_prob(model, rows, [(merged, range(len(rows)))])
    expected = mean_log_prob(model, rows, [(pack_rows([row]), [i]) for i, row in enumerate(rows)])
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    names, parameters = zip(*model.named_parameters(), strict=True)
    gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
    expected_gradients = torch.autograd.grad(expected, parameters, allow_unused=True)
    for parameter, gradient, reference in zip(names, gradients, expected_gradients, strict=True):
        torch.testing.assert_close(gradient, reference, atol=1e-6, rtol=0, msg=parameter)


@pytest.mark.parametrize("name", ROW_WISE)
def test_model_that_cannot_be_packed_has_row_wise_passes_for_a_reason(name):
    config, reason = ROW_WISE[name]
    model = prepare_for_training(build_model(config()))
    forward_kind = PolicyModel(model).forward_kind
    assert isinstance(forward_kind, RowWiseForward)
    assert re.search(reason, forward_kind.not_packed_reason)
    rows, branches = random_rows_and_branches()
    actual = score_packed(model, rows, branches)
    for scores, plain in zip(actual, score_one_by_one(model, rows, branches), strict=True):
        torch.testing.assert_close(scores, plain, atol=5e-5, rtol=0)


def test_model_that_attends_to_later_tokens_is_refused():
    with pytest.raises(UnsupportedArchitectureError, check=mentions("bert")) as caught:
        prepare_for_training(build_model(hf.BertConfig(**SIZES)))
    message = str(caught.value)
    assert "allowed:" in message and "fix:" in message and "docs/models.md" in message


@pytest.mark.parametrize("name", ["falcon-h1", "lfm2"])
def test_models_unpacked_by_name_have_a_packing_gap(name):
    """The decision by name agrees with the measurement."""
    assert (
        measure_packed_log_prob_gap(build_model(ROW_WISE[name][0]()))
        > 10 * architecture.TOLERANCES[torch.float32]
    )


@pytest.mark.parametrize("name", ["mamba", "rwkv", "bloom", "qwen3-next"])
def test_models_without_packed_attention_are_detected(name):
    """They are detected even if their weights are too small for a measurable packing gap."""
    with pytest.raises(UnsupportedAttentionError, check=mentions("AttentionInterface")):
        measure_packed_log_prob_gap(build_model(ROW_WISE[name][0](), std=1e-4))


@pytest.mark.parametrize(
    ("name", "layer"), [("falcon-h1", "Conv1d"), ("lfm2", "Lfm2ShortConv"), ("mamba", r"Mamba\w+")]
)
def test_layers_with_a_state_are_found_without_the_config(monkeypatch, name, layer):
    monkeypatch.setattr(architecture, "find_packing_problems", lambda config: [])
    forward_kind = choose_forward_kind(build_model(ROW_WISE[name][0]()))
    assert isinstance(forward_kind, RowWiseForward) and re.search(
        layer, forward_kind.not_packed_reason
    )


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ({"softcap": 50.0}, "softcap"),
        ({"position_bias": torch.zeros(1)}, "position_bias"),
        ({"is_causal": False}, "is_causal"),
        ({"block_indices": [1]}, "block_indices"),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, "mask"),
    ],
)
def test_attention_refuses_unsupported_arguments(argument, message):
    heads = torch.ones(1, 2, 3, 4)
    layout = layout_of_rows([3])
    layout = replace(layout, calls=AttentionCalls(layout))
    arguments = {"attention_mask": None, "layout": layout, "position_ids": heads}
    out, _ = packed_attention(nn.Module(), heads, heads, heads, **arguments, is_causal=True)
    assert out.shape == (1, 3, 2, 4)
    with pytest.raises(UnsupportedAttentionError, check=mentions(message)):
        packed_attention(nn.Module(), heads, heads, heads, **{**arguments, **argument})


# ---------------------------------------------------------------------- windows


def build_windowed_model():
    return prepare_for_training(build_model(hf.MistralConfig(**SIZES, sliding_window=24)))


def test_window_counts_a_branch_with_its_prefix():
    model = build_windowed_model()
    forward_kind = PolicyModel(model).forward_kind
    rows, _ = random_rows_and_branches()
    fits = [BranchRequest(18, list(range(6)))]  # 24 tokens: the last one still attends to the first
    too_long = [BranchRequest(18, list(range(7)))]
    assert forward_kind.count_tokens(20, fits) == 26, "packed: the prefix is shared"
    assert forward_kind.count_tokens(20, too_long) == 45, "a forward of 25 tokens for the branch"
    for branch in (fits, too_long):
        branches = [branch, [], []]
        for packed, plain in zip(
            score_packed(model, rows, branches),
            score_one_by_one(model, rows, branches),
            strict=True,
        ):
            torch.testing.assert_close(packed, plain, atol=5e-5, rtol=0)


def test_packed_attention_refuses_a_row_longer_than_the_window():
    packed = pack_rows([torch.arange(25), torch.arange(4)])
    inputs = (packed.input_ids, packed.position_ids, packed.layout)
    with pytest.raises(UnsupportedAttentionError, check=mentions(25, 24)):
        compute_packed_hidden(build_windowed_model().base_model, *inputs, window=24)


@pytest.mark.parametrize(
    ("config", "window"),
    [
        (lambda: hf.MistralConfig(**SIZES, sliding_window=24), 24),
        (lambda: hf.LlamaConfig(**SIZES), None),
        (lambda: hf.Qwen2Config(**SIZES, sliding_window=24), None),
        (
            lambda: hf.Qwen2Config(
                **SIZES, use_sliding_window=True, sliding_window=24, max_window_layers=1
            ),
            24,
        ),
        # The config gives this window to the mask only, not to the attention.
        (lambda: hf.Llama4TextConfig(**SIZES, attention_chunk_size=16), 16),
        (
            lambda: hf.Gemma3TextConfig(
                **SIZES, sliding_window=24, layer_types=["full_attention"] * 2
            ),
            None,
        ),
    ],
)
def test_attention_window_is_read_from_the_config(config, window):
    assert attention_window(config()) == window


def test_explicit_window_is_enforced():
    model = prepare_for_training(build_model(SUPPORTED["llama"]()))
    packed = pack_rows([torch.arange(9)])
    inputs = (model.base_model, packed.input_ids, packed.position_ids, packed.layout)
    assert compute_packed_hidden(*inputs, window=9).shape == (9, 32)
    with pytest.raises(UnsupportedAttentionError, check=mentions(8)):
        compute_packed_hidden(*inputs, window=8)


# ---------------------------------------------------------------------- side effects of the check


def test_check_has_no_side_effects():
    """Random state, mode, gradients, attention and weights stay as before."""
    model = build_model(
        hf.GPT2Config(vocab_size=120, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    )
    model.train()  # with dropout, which the check must disable
    weights = copy.deepcopy(model.state_dict())
    torch.manual_seed(5)
    state = torch.get_rng_state()
    choose_forward_kind(model)
    assert torch.equal(torch.get_rng_state(), state)
    assert model.training and all(module.training for module in model.modules())
    assert all(p.grad is None and p.requires_grad for p in model.parameters())
    assert model.config._attn_implementation == PACKED_ATTENTION
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name


def test_check_does_not_change_the_start_of_adapters(tmp_path, monkeypatch):
    build_model(SUPPORTED["qwen3"]()).save_pretrained(tmp_path)

    def load_adapters():
        torch.manual_seed(7)
        lm = load_causal_lm(tmp_path, lora_rank=2)
        return {name: p for name, p in lm.named_parameters() if "lora_" in name}

    checked = load_adapters()
    monkeypatch.setattr(
        "verl.models.loader.choose_forward_kind", lambda lm: PackedForward(PACKED_ATTENTION)
    )
    assert checked
    for name, parameter in load_adapters().items():
        assert torch.equal(parameter, checked[name]), name


def test_vocabulary_of_two_can_be_measured():
    assert (
        measure_packed_log_prob_gap(build_model(hf.LlamaConfig(**{**SIZES, "vocab_size": 2})))
        < 1e-4
    )


def test_model_without_weights_is_not_measured():
    with torch.device("meta"):
        supported = hf.AutoModelForCausalLM.from_config(
            SUPPORTED["llama"](), attn_implementation=PACKED_ATTENTION
        )
        unsupported = hf.AutoModelForCausalLM.from_config(
            ROW_WISE["rwkv"][0](), attn_implementation=PACKED_ATTENTION
        )
    assert isinstance(choose_forward_kind(supported), PackedForward)
    assert isinstance(choose_forward_kind(unsupported), RowWiseForward)


def test_bfloat16_has_its_own_tolerance():
    forward_kind = choose_forward_kind(build_model(SUPPORTED["llama"]()).bfloat16())
    assert isinstance(forward_kind, PackedForward)
    forward_kind = choose_forward_kind(build_model(ROW_WISE["qwen3-next"][0]()).bfloat16())
    assert isinstance(forward_kind, RowWiseForward)
    with pytest.raises(UnsupportedArchitectureError):
        choose_forward_kind(build_model(hf.BertConfig(**SIZES)).bfloat16())


def test_nan_weights_are_refused():
    model = build_model(SUPPORTED["llama"]())
    output_head(model).get_parameter("weight").data.fill_(float("nan"))
    with pytest.raises(UnsupportedArchitectureError, check=mentions("inf nats")):
        choose_forward_kind(model)


def test_smallest_gap_of_several_draws_counts(monkeypatch):
    """Rounding may change the choice between nearly tied experts in some draws of a correct
    model.
    """
    model = build_model(SUPPORTED["qwen3-moe"]())
    monkeypatch.setattr(
        architecture, "_measure_log_prob_gap", lambda lm, forward_kind, draw: [0.3, 1e-6, 0.4][draw]
    )
    assert measure_packed_log_prob_gap(model) == 1e-6
    monkeypatch.setattr(
        architecture, "_measure_log_prob_gap", lambda lm, forward_kind, draw: [0.3, 0.2, 0.4][draw]
    )
    with pytest.raises(UnsupportedArchitectureError, check=mentions("0.2 nats")):
        choose_forward_kind(model)


# ---------------------------------------------------------------------- loading


def test_attention_outside_the_interface_is_loaded_for_row_wise_passes(tmp_path):
    config = hf.GPTJConfig(
        vocab_size=120, n_embd=32, n_layer=1, n_head=4, n_positions=64, rotary_dim=4
    )
    hf.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    forward_kind = PolicyModel(load_causal_lm(tmp_path)).forward_kind
    assert (
        isinstance(forward_kind, RowWiseForward)
        and "AttentionInterface" in forward_kind.not_packed_reason
    )


def test_refusal_names_the_directory(tmp_path):
    build_model(hf.BertConfig(**SIZES)).save_pretrained(tmp_path)
    with pytest.raises(UnsupportedArchitectureError, check=mentions(tmp_path, "bert")):
        load_causal_lm(tmp_path)


def test_docs_list_all_tested_models():
    page = (Path(__file__).parents[4] / "docs" / "models.md").read_text()
    configs = [config() for config in SUPPORTED.values()]
    configs += [config() for config, _ in ROW_WISE.values()]
    configs += [
        config() for config in {**model_families.ROW_WISE, **model_families.WINDOWED}.values()
    ]
    assert {config.model_type for config in configs} <= set(re.findall(r"`(\w[\w-]*)`", page))
