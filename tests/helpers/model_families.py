"""Configs of tiny causal LMs of many families, by name."""

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf

VOCABULARY = 320
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "pad_token_id": 0,
}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT: dict[str, Any] = {
    "num_key_value_heads": 4,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
    "kv_lora_rank": 8,
    "q_lora_rank": 8,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}
INDEX: dict[str, Any] = {"index_topk": 4, "index_n_heads": 16, "index_head_dim": 16}
DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
MAMBA: dict[str, Any] = {
    "mamba_n_heads": 4,
    "mamba_d_head": 16,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_expand": 2,
}
LINEAR_THEN_FULL = ["linear_attention", "full_attention"]
WINDOW_THEN_FULL = ["sliding_attention", "full_attention"]
WINDOW = 10  # tokens; shorter than the rows of the tests


def sizes(*groups: dict[str, Any], **values: Any) -> dict[str, Any]:
    merged: dict[str, Any] = dict(SIZES)
    for group in groups:
        merged |= group
    return merged | values


# Families that compute rows separately.
ROW_WISE: dict[str, Callable[[], Any]] = {
    "qwen3.5": lambda: hf.Qwen3_5TextConfig(
        **sizes(DELTA), head_dim=8, layer_types=LINEAR_THEN_FULL
    ),
    "qwen3.5-moe": lambda: hf.Qwen3_5MoeTextConfig(
        **sizes(DELTA, EXPERTS),
        head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=LINEAR_THEN_FULL,
    ),
    "qwen3-next": lambda: hf.Qwen3NextConfig(
        **sizes(DELTA, EXPERTS),
        head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=LINEAR_THEN_FULL,
    ),
    "qwen4-exp": lambda: hf.Qwen4ExpTextConfig(
        **sizes(DELTA, EXPERTS),
        head_dim=8,
        shared_expert_intermediate_size=16,
        layer_types=["linear_attention", "indexed_attention"],
        hc_lowrank=8,
        indexer_n_heads=2,
        indexer_kv_heads=1,
        indexer_head_dim=8,
        indexer_budget=4,
        indexer_compress_ratio=2,
        ple_layer_ids=[1],
        ngram_vocab_size_base=64,
        make_ngram_vocab_size_divisible_by=8,
        split_ngram_parts=1,
        eos_token_id=1,
    ),
    "nemotron-3": lambda: hf.NemotronHConfig(
        **sizes(),
        head_dim=8,
        layers_block_type=["mamba", "moe", "attention", "moe"],
        mamba_num_heads=4,
        mamba_head_dim=16,
        ssm_state_size=8,
        n_groups=1,
        n_routed_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=16,
        moe_shared_expert_intermediate_size=16,
    ),
    "glm-5": lambda: hf.GlmMoeDsaConfig(**sizes(LATENT, INDEX)),
    "deepseek-v3.2": lambda: hf.DeepseekV32Config(**sizes(LATENT, INDEX)),
    "deepseek-v4": lambda: hf.DeepseekV4Config(
        **sizes(LATENT, INDEX, num_local_experts=4), head_dim=16
    ),
    "kimi-linear": lambda: hf.KimiLinearConfig(
        **sizes(LATENT, EXPERTS),
        linear_head_dim=8,
        linear_num_heads=2,
        layer_types=LINEAR_THEN_FULL,
    ),
    "granite-4-hybrid": lambda: hf.GraniteMoeHybridConfig(
        **sizes(MAMBA),
        num_local_experts=4,
        num_experts_per_tok=2,
        shared_intermediate_size=32,
        layer_types=["mamba", "attention"],
        logits_scaling=4.0,
    ),
    "olmo-hybrid": lambda: hf.OlmoHybridConfig(**sizes(DELTA), layer_types=LINEAR_THEN_FULL),
    "falcon-h1": lambda: hf.FalconH1Config(**sizes(MAMBA), mamba_d_ssm=64, lm_head_multiplier=0.5),
    "gpt-oss": lambda: hf.GptOssConfig(
        **sizes(),
        head_dim=8,
        sliding_window=WINDOW,
        num_local_experts=4,
        num_experts_per_tok=2,
        layer_types=WINDOW_THEN_FULL,
    ),
    "mimo-v2-flash": lambda: hf.MiMoV2FlashConfig(
        **sizes(LATENT, num_key_value_heads=2),
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=WINDOW_THEN_FULL,
    ),
    "gemma2": lambda: hf.Gemma2Config(
        **sizes(), head_dim=8, sliding_window=WINDOW, final_logit_softcapping=3.0
    ),
    "bloom": lambda: hf.BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4),
    "falcon-alibi": lambda: hf.FalconConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        alibi=True,
    ),
    "mpt": lambda: hf.MptConfig(vocab_size=VOCABULARY, d_model=32, n_heads=4, n_layers=2),
    "mamba": lambda: hf.MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, state_size=8, pad_token_id=0
    ),
    "mamba2": lambda: hf.Mamba2Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        state_size=8,
        num_heads=8,
        head_dim=8,
        expand=2,
        n_groups=1,
    ),
    "lfm2": lambda: hf.Lfm2Config(**sizes(), layer_types=["conv", "full_attention"]),
    "jamba": lambda: hf.JambaConfig(
        **sizes(),
        attn_layer_period=2,
        attn_layer_offset=1,
        num_experts=4,
        mamba_d_state=8,
        mamba_dt_rank=4,
        use_mamba_kernels=False,
    ),
    "bamba": lambda: hf.BambaConfig(**sizes(MAMBA), attn_layer_indices=[1]),
    "rwkv": lambda: hf.RwkvConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, context_length=256
    ),
    "recurrent-gemma": lambda: hf.RecurrentGemmaConfig(
        **sizes(num_hidden_layers=3), lru_width=32, logits_soft_cap=3.0
    ),
    "minimax": lambda: hf.MiniMaxConfig(
        **sizes(), head_dim=8, num_local_experts=4, layer_types=LINEAR_THEN_FULL, block_size=8
    ),
    "doge": lambda: hf.DogeConfig(**sizes()),
    "stablelm": lambda: hf.StableLmConfig(**sizes()),
    "openai-gpt": lambda: hf.OpenAIGPTConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256
    ),
    "gptj": lambda: hf.GPTJConfig(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=256, rotary_dim=4
    ),
}
# Families that are packed, and compute micro-batches with longer rows than the window separately.
WINDOWED: dict[str, Callable[[], Any]] = {
    "gemma3": lambda: hf.Gemma3TextConfig(
        **sizes(),
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=WINDOW_THEN_FULL,
        final_logit_softcapping=5.0,
    ),
    "gemma4": lambda: hf.Gemma4TextConfig(
        **sizes(global_head_dim=8),
        head_dim=8,
        sliding_window=WINDOW,
        layer_types=WINDOW_THEN_FULL,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCABULARY,
        final_logit_softcapping=5.0,
    ),
    "olmo3": lambda: hf.Olmo3Config(**sizes(), sliding_window=WINDOW, layer_types=WINDOW_THEN_FULL),
    "exaone4": lambda: hf.Exaone4Config(
        **sizes(), sliding_window=WINDOW, layer_types=WINDOW_THEN_FULL
    ),
    "mistral": lambda: hf.MistralConfig(**sizes(), sliding_window=WINDOW),
    "llama4": lambda: hf.Llama4TextConfig(
        **sizes(), head_dim=8, num_local_experts=2, attention_chunk_size=WINDOW
    ),
    "phi3-longrope": lambda: hf.Phi3Config(
        **sizes(),
        original_max_position_embeddings=WINDOW,
        rope_parameters={
            "rope_type": "longrope",
            "rope_theta": 10000.0,
            "short_factor": [1.0] * 4,
            "long_factor": [4.0] * 4,
            "original_max_position_embeddings": WINDOW,
            "partial_rotary_factor": 1.0,
        },
    ),
}
# Families that are packed, with logits that change after the output head.
SCALED: dict[str, Callable[[], Any]] = {
    "cohere": lambda: hf.CohereConfig(**sizes()),
    "granite": lambda: hf.GraniteConfig(**sizes(), logits_scaling=8.0),
    "gemma2-uncapped-attention": lambda: hf.Gemma2Config(
        **sizes(), head_dim=8, sliding_window=64, attn_logit_softcapping=None
    ),
    "nanochat": lambda: hf.NanoChatConfig(**sizes()),
    "minicpm3": lambda: hf.MiniCPM3Config(**sizes(LATENT)),
    "deepseek-v3": lambda: hf.DeepseekV3Config(**sizes(LATENT)),
    "qwen3": lambda: hf.Qwen3Config(**sizes(), head_dim=8),
}
# Models for images and text. transformers has a class of the text model only for qwen3.5.
VISION: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "patch_size": 4,
    "image_size": 16,
}
QWEN_VISION: dict[str, Any] = {
    "depth": 1,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_heads": 4,
    "out_hidden_size": 32,
    "patch_size": 4,
}
MULTIMODAL_ROPE: dict[str, Any] = {
    "rope_type": "default",
    "rope_theta": 10000.0,
    "mrope_section": [2, 1, 1],
}
IMAGE_TEXT: dict[str, Callable[[], Any]] = {
    "qwen3.5": lambda: hf.Qwen3_5Config(
        text_config=ROW_WISE["qwen3.5"]().to_dict(),
        vision_config=QWEN_VISION | {"num_position_embeddings": 16},
    ),
    "gemma3": lambda: hf.Gemma3Config(
        text_config=WINDOWED["gemma3"]().to_dict(), vision_config=VISION, mm_tokens_per_image=4
    ),
    "gemma4": lambda: hf.Gemma4Config(
        text_config=WINDOWED["gemma4"]().to_dict(),
        vision_config=VISION | {"num_key_value_heads": 4, "head_dim": 8},
        audio_config=None,
    ),
    "qwen2.5-vl": lambda: hf.Qwen2_5_VLConfig(
        text_config=sizes(rope_parameters=MULTIMODAL_ROPE),
        vision_config=QWEN_VISION | {"fullatt_block_indexes": [0]},
    ),
    "qwen3-vl": lambda: hf.Qwen3VLConfig(
        text_config=sizes(head_dim=8, rope_parameters=MULTIMODAL_ROPE),
        vision_config=QWEN_VISION
        | {"num_position_embeddings": 16, "deepstack_visual_indexes": [0]},
    ),
    "glm-4v": lambda: hf.Glm4vConfig(
        text_config=sizes(rope_parameters=MULTIMODAL_ROPE | {"partial_rotary_factor": 1.0}),
        vision_config=QWEN_VISION | {"image_size": 16},
    ),
    "mistral3": lambda: hf.Mistral3Config(
        text_config=sizes(model_type="mistral", head_dim=8),
        vision_config=VISION | {"model_type": "pixtral", "head_dim": 8},
    ),
    "internvl": lambda: hf.InternVLConfig(
        text_config=sizes(model_type="qwen2"),
        vision_config=VISION | {"image_size": [16, 16], "patch_size": [4, 4]},
    ),
    "lfm2-vl": lambda: hf.Lfm2VlConfig(
        text_config=sizes(model_type="lfm2", layer_types=["conv", "full_attention"]),
        vision_config=VISION | {"model_type": "siglip2_vision_model", "num_patches": 16},
        projector_hidden_size=32,
    ),
    "muse-glimmer": lambda: hf.MuseGlimmerConfig(
        text_config=sizes(head_dim=8), vision_config=VISION, projector_hidden_size=32
    ),
}


def build_image_text_family(config: Any) -> Any:
    """Return a random float32 model of ``config``, a config of a model for images and text."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForImageTextToText.from_config(config)
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the weights of norms stay 1
                parameter.data.normal_(std=0.1)
    return model.float().eval()


def build_family(config: Any, std: float = 0.1, attention: str | None = None) -> Any:
    """Return a random float32 model of ``config``; attention sinks are random too."""
    config.initializer_range = std  # the usual 0.02 leaves the attention nearly uniform
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model = hf.AutoModelForCausalLM.from_config(config, attn_implementation=attention)
        for name, parameter in model.named_parameters():
            if "sinks" in name:
                parameter.data.normal_()
    return model.float().eval()
