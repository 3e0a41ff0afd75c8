"""Checks of LoRA before a run starts: target modules, further adapters, and what a sync sends."""

from collections.abc import Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.schema.model import CriticModelConfig, ModelConfig, TrainedModelConfig
from verl.config.settings.hints import did_you_mean
from verl.models.adapters import read_adapter, require_fit
from verl.models.architecture import expected_path
from verl.models.hub import description_directory
from verl.models.loader import build_meta_model, read_config
from verl.models.lora import linear_names, target_problems
from verl.names import LoraSync

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

SYNC_KEY = "actor_rollout_ref.rollout.lora_sync"
MAX_VLLM_RANK = 512
# Model types whose classes in vLLM 0.32 take no adapters.
VLLM_TYPES_WITHOUT_LORA = ("bloom", "cohere2_moe", "dbrx", "falcon", "gpt2", "gptj", "stablelm")


def find_lora_problems(
    cfg: PPOConfig,
    section: str,
    model: TrainedModelConfig,
    config: "PreTrainedConfig",
) -> Iterator[str]:
    """Yield problems of the LoRA keys of ``section``, whose model has ``config``."""
    if find_spec("peft") is None:
        key = f"{section}.lora_rank"
        why = "LoRA adapters need the package peft"
        yield build_problem(cfg, key, why, "0", f"run pip install peft, or set {key}=0")
        return
    meta_model: Any = build_meta_model(config, model.trust_remote_code)
    if isinstance(model, CriticModelConfig):
        meta_model = meta_model.base_model  # a critic has no output head of a language model
    key = f"{section}.target_modules"
    module_names = linear_names(meta_model)
    target_errors = list(target_problems(meta_model, model.target_modules))
    for problem in target_errors:
        suggestion = ""
        if problem.unknown_target:
            suggestion = did_you_mean(str(problem.unknown_target), module_names).removeprefix("; ")
        allowed = f"all-linear, or some of {', '.join(module_names)}"
        yield build_problem(cfg, key, str(problem), allowed, suggestion or f"set {key}=all-linear")
    if isinstance(model, ModelConfig) and not target_errors:
        yield from _find_adapter_problems(model, meta_model)
        reason = explain_merged_sync(cfg, config)
        if reason and (model.adapters or cfg.actor_rollout_ref.rollout.lora_sync == "adapter"):
            fix = f"{SYNC_KEY}=merged, and no {section}.adapters"
            yield build_problem(cfg, SYNC_KEY, reason, "merged", fix)


def _find_adapter_problems(model: ModelConfig, meta_model: "PreTrainedModel") -> Iterator[str]:
    """Yield problems of the adapters that are not trained: files, kind and shapes."""
    for name, directory in model.adapters.items():
        try:
            require_fit(read_adapter(directory), meta_model)
        except ValueError as error:
            yield (
                f"actor_rollout_ref.model.adapters.{name}={directory!r}: {error}; allowed: a LoRA "
                "adapter that peft saved for this model; fix: name the directory that "
                "main_export lora=adapters wrote"
            )


def explain_merged_sync(cfg: PPOConfig, config: "PreTrainedConfig") -> str:
    """Return why weight syncs must send merged weights; "" if the engine can get the adapter."""
    engine = cfg.actor_rollout_ref.rollout.name
    if engine == "hf":
        return ""
    if engine != "vllm":
        return f"the engine {engine} is not known to take adapters"
    if cfg.actor_rollout_ref.model.lora_rank > MAX_VLLM_RANK:
        return f"vLLM takes adapters up to rank {MAX_VLLM_RANK}"
    if config.model_type in VLLM_TYPES_WITHOUT_LORA:
        return f"vLLM takes no adapters for {config.model_type}"
    has_plain_layers = not expected_path(config)[0]
    return "" if has_plain_layers else f"adapters of {config.model_type} in vLLM are not verified"


def resolve_lora_sync(cfg: PPOConfig) -> tuple[LoraSync, str]:
    """Return what a weight sync sends, ``adapter`` or ``merged``, and the reason for ``merged``."""
    model, sync = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.lora_sync
    if not model.lora_rank:
        return "merged", ""
    if sync != "auto":
        return sync, f"{SYNC_KEY}={sync}"
    directory = description_directory(str(model.path))
    reason = explain_merged_sync(
        cfg, read_config(directory, model.trust_remote_code, model.override_config)
    )
    return ("merged", reason) if reason else ("adapter", "")
