"""Helpers for the tests of all rollout engines: config section, driver loop and reference log-
probs.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.helpers.model_families import build_family
from tests.helpers.tiny_model import make_tiny_policy
from verl.config.schema.actor_rollout_ref import RolloutConfig
from verl.config.schema.sft import NewPolicyConfig
from verl.utils.sampling import SamplingRequest, SamplingResult, StopReason
from verl.workers.rollout.base import RolloutEngine


def rollout_section(**changes: Any) -> RolloutConfig:
    """Return the section ``actor_rollout_ref.rollout``, sized for a tiny model."""
    values: dict[str, Any] = {
        "name": "hf",
        "dtype": "float32",
        "max_model_len": 256,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 64,  # small, so that prompts are prefilled in chunks
        "enable_chunked_prefill": True,
        "kv_cache_gb": 0.1,
        "enforce_eager": True,
        "gpu_memory_utilization": 0.2,
        "tensor_model_parallel_size": 1,
        "free_cache_engine": False,
        "engine_kwargs": {},
    }
    return RolloutConfig(**(values | changes))


def prompts(count: int, vocab: int = 390) -> list[list[int]]:
    """Return ``count`` prompts of 12 to 96 tokens."""
    return [
        [(7 * index + 3 * position) % (vocab - 10) + 5 for position in range(12 + 12 * (index % 8))]
        for index in range(count)
    ]


def ask(count: int, **fields: Any) -> list[SamplingRequest]:
    """Return ``count`` seeded requests."""
    options: dict[str, Any] = {"max_tokens": 12} | fields
    return [
        SamplingRequest(f"r{i}", ids, seed=100 + i, **options)
        for i, ids in enumerate(prompts(count))
    ]


def run_requests(
    engine: RolloutEngine, requests: list[SamplingRequest]
) -> dict[str, SamplingResult]:
    """Run ``requests`` to the end and return the results by id."""
    for request in requests:
        engine.add(request)
    results: dict[str, SamplingResult] = {}
    while engine.has_work():
        for result in engine.step():
            results[result.request_id] = result
    return results


def reference_logprobs(model, request: SamplingRequest, token_ids: list[int]):
    """Return log-probs [T] of ``token_ids`` from one full forward of ``model``.

    They follow temperature, top-k and top-p. Truncation is written out token by token, unlike in
    the engines.
    """
    import torch

    ids = torch.tensor([request.prompt_ids + token_ids])
    with torch.no_grad():
        logits = model(ids).logits[0, len(request.prompt_ids) - 1 : -1].double()
    rows = []
    for row, token in zip(logits / (request.temperature or 1.0), token_ids, strict=True):
        ranked = sorted(range(len(row)), key=lambda v: -row[v].item())
        if request.temperature and request.top_k > 0:
            ranked = ranked[: request.top_k]
        probs = row[ranked].softmax(dim=0).tolist()
        if request.temperature and request.top_p < 1:
            total, count = 0.0, 0
            while total < request.top_p:
                total, count = total + probs[count], count + 1
            ranked, probs = ranked[:count], [p / total for p in probs[:count]]
        assert token in ranked, "a token outside the truncated distribution was sampled"
        rows.append(probs[ranked.index(token)])
    return torch.tensor(rows).log()


def perturb(model, seed: int = 1, scale: float = 0.5):
    """Change every weight of ``model`` strongly; return the new weights as (name, float32 array).

    Names are those of a checkpoint. A tied weight is listed once.
    """
    import torch

    from verl.models.checkpoint_format import convert_to_checkpoint

    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            spread = parameter.std() if parameter.dim() > 1 else parameter.abs().mean()
            parameter.add_(scale * spread * torch.randn(parameter.shape, generator=generator))
    weights = {name: parameter.detach() for name, parameter in model.named_parameters()}
    return [
        (name, weight.numpy().copy())
        for name, weight in convert_to_checkpoint(model, weights).items()
    ]


def load(directory: Path):
    """Return the policy in ``directory`` as a float32 transformers model."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(directory, dtype="float32").eval()


# Template in the manner of GLM: the next role ends a turn, of an answer or of calls.
BASE_TEMPLATE = (
    "{%- for m in messages -%}"
    "{{- '<|observation|>' if m.role == 'tool' else '<|' + m.role + '|>' -}}{{- m.content -}}"
    "{%- for call in m.tool_calls or [] -%}"
    "{{- '<call>' + call.function.name + call.function.arguments.values() | join -}}"
    "{%- endfor -%}{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)
ROLE_MARKS = ["<|user|>", "<|observation|>", "<|assistant|>", "<|system|>"]


def make_base_policy(directory: Path) -> tuple[Path, set[int]]:
    """Write a random base model with a chat template; return the directory and its end tokens.

    The tokenizer ends a sequence with ``<|pad|>``, the generation config with ``<|im_start|>``, the
    template an answer with ``<|user|>`` and a turn of calls with ``<|observation|>``.
    """
    from transformers import AutoTokenizer, GenerationConfig

    make_tiny_policy(directory, vocab=400)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    tokenizer.add_special_tokens({"additional_special_tokens": ROLE_MARKS})
    tokenizer.eos_token = "<|pad|>"
    tokenizer.chat_template = BASE_TEMPLATE
    model = load(directory)
    model.resize_token_embeddings(len(tokenizer))
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    start_id = tokenizer.convert_tokens_to_ids("<|im_start|>")
    GenerationConfig(eos_token_id=[start_id]).save_pretrained(directory)
    marks = ["<|pad|>", "<|im_start|>", *ROLE_MARKS[:2]]
    return directory, {tokenizer.convert_tokens_to_ids(mark) for mark in marks}


def make_hybrid_policy(directory: Path) -> Path:
    """Write a random Qwen3.5 policy, whose first layer has linear attention; return the directory.

    Its heads are 64 wide, because vLLM on CPU computes linear attention only for some widths.
    """
    from transformers import AutoTokenizer

    from verl.models.new_policy import make_policy_config

    make_tiny_policy(directory)
    tokenizer = AutoTokenizer.from_pretrained(directory)
    shape = NewPolicyConfig(
        architecture="qwen3_5",
        hidden_size=64,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        intermediate_size=128,
    )
    end_ids = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    config = make_policy_config(shape, len(tokenizer), **end_ids)
    build_family(config).save_pretrained(directory)
    return directory


def make_expert_policy(directory: Path, width: int) -> Path:
    """Write a random Qwen3 policy with experts of ``width`` neurons; return the directory."""
    from transformers import Qwen3MoeConfig

    make_tiny_policy(directory)
    tiny = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config = Qwen3MoeConfig(
        vocab_size=tiny["vocab_size"],
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=width,
        tie_word_embeddings=False,
        eos_token_id=tiny["eos_token_id"],
        pad_token_id=tiny["pad_token_id"],
    )
    build_family(config).save_pretrained(directory)
    return directory


def assert_every_end_stops(
    results: Mapping[str, SamplingResult], end_ids: set[int], length: int
) -> None:
    """Check that turns end at a token of ``end_ids`` or at ``length``, and that each id ends one.

    A random policy samples each token about equally often.
    """
    last_ids = set()
    for result in results.values():
        assert end_ids.isdisjoint(result.token_ids[:-1])
        if result.stop_reason is StopReason.STOP:
            last_ids.add(result.token_ids[-1])
        else:
            assert len(result.token_ids) == length
    assert last_ids == end_ids
