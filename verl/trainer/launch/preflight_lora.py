"""Checks of LoRA before a run starts: target modules, adapters in files, and weight sync."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from verl.config.adapter_files import (
    ADAPTERS_KEY,
    START_KEY,
    SYNC_KEY,
    AdapterSettings,
    find_resumed_adapter,
    read_adapter_settings,
)
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.model import CriticModelConfig, ModelConfig, TrainedModelConfig
from verl.config.schema.sft import SFTModelConfig
from verl.config.settings import Problem
from verl.config.settings.hints import did_you_mean
from verl.models.adapters import read_adapter, require_adapter_fits
from verl.models.hub import resolve_directory_without_weights
from verl.models.loader import build_meta_model, predict_packing_support, read_config
from verl.models.lora import find_target_module_names, linear_names, target_problems
from verl.names import LoraSync

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

MAX_VLLM_RANK = 512  # largest adapter rank that vLLM accepts
# Model types whose classes in vLLM 0.32 take no adapters.
VLLM_TYPES_WITHOUT_LORA = ("bloom", "cohere2_moe", "dbrx", "falcon", "gpt2", "gptj", "stablelm")


def find_lora_problems(
    cfg: PPOConfig, section: str, model: TrainedModelConfig, config: "PreTrainedConfig"
) -> Iterator[Problem]:
    """Yield problems of the LoRA keys of one model, such as unknown target modules."""
    meta_model: Any = build_meta_model(config, model.trust_remote_code)
    if isinstance(model, CriticModelConfig):
        meta_model = meta_model.base_model  # a critic has no output head of a language model
    problems = list(find_target_problems(cfg, section, model, meta_model))
    if problems:
        yield from problems
        return
    if isinstance(model, ModelConfig):
        yield from _find_adapter_problems(cfg, meta_model)
        reason = find_adapter_sync_obstacle(cfg, config)
        if reason and (model.adapters or cfg.actor_rollout_ref.rollout.lora_sync == "adapter"):
            fix = f"{SYNC_KEY}=merged, and no {section}.adapters"
            yield build_problem(cfg, SYNC_KEY, reason, "merged", fix, "unsupported_model")


def find_target_problems(
    cfg: PPOConfig | SFTConfig,
    section: str,
    model: TrainedModelConfig | SFTModelConfig,
    meta_model: "PreTrainedModel",
) -> Iterator[Problem]:
    """Yield problems of the modules of ``meta_model`` that LoRA would adapt."""
    key = f"{section}.target_modules"
    module_names = linear_names(meta_model)
    for problem in target_problems(meta_model, model.target_modules):
        suggestion = ""
        if problem.unknown_target:
            suggestion = did_you_mean(str(problem.unknown_target), module_names).removeprefix("; ")
        allowed = f"all-linear, or some of {', '.join(module_names)}"
        fix = suggestion or f"set {key}=all-linear"
        yield build_problem(cfg, key, str(problem), allowed, fix, "unknown_name")


def _find_adapter_problems(cfg: PPOConfig, meta_model: "PreTrainedModel") -> Iterator[Problem]:
    """Yield problems of the LoRA adapters that the config names: wrong kind, or wrong shapes."""
    model = cfg.actor_rollout_ref.model
    directory_by_key = {f"{ADAPTERS_KEY}.{name}": path for name, path in model.adapters.items()}
    if model.lora_adapter_path and not find_resumed_adapter(cfg.trainer):
        directory_by_key[START_KEY] = model.lora_adapter_path
    for key, directory in directory_by_key.items():
        try:
            require_adapter_fits(read_adapter(directory), meta_model)
        except ValueError as error:
            yield Problem(
                f"{key}={directory!r}: {error}; allowed: a LoRA adapter that peft saved for this "
                "model; fix: name the directory that main_export lora=adapters wrote",
                "wrong_weights",
            )
        else:
            if key == START_KEY:
                adapter_settings = read_adapter_settings(directory)
                section = START_KEY.rpartition(".")[0]
                yield from find_adapter_mismatch_problems(
                    section, model, meta_model, adapter_settings, START_KEY
                )


def find_adapter_mismatch_problems(
    section: str,
    model: TrainedModelConfig | SFTModelConfig,
    meta_model: "PreTrainedModel",
    start_adapter: AdapterSettings,
    source: str,
) -> Iterator[Problem]:
    """Yield problems of LoRA keys that contradict the adapter from which training starts.

    The keys are those of ``model`` in the config section ``section``. ``start_adapter`` has rank,
    alpha and modules of the adapter. ``source`` is the key or checkpoint that names it.
    """
    why = f"the adapter of {source} has another value"
    new_run_fix = "" if source == START_KEY else ", or start a run with another experiment_name"
    for key, value in {"lora_rank": start_adapter.rank, "lora_alpha": start_adapter.alpha}.items():
        if getattr(model, key) != value:
            path = f"{section}.{key}"
            fix = f"{path}={value}{new_run_fix}"
            message = f"{path}={getattr(model, key)!r}: {why}; allowed: {value}; fix: {fix}"
            yield Problem(message, "conflicting_keys")
    configured_modules = find_target_module_names(meta_model, model.target_modules)
    adapter_modules = set(start_adapter.modules)
    if configured_modules != adapter_modules:
        path = f"{section}.target_modules"
        mismatch_text = (
            "only the adapter"
            if min(configured_modules ^ adapter_modules) in adapter_modules
            else "not the adapter"
        )
        module_names = start_adapter.target_modules
        if find_target_module_names(meta_model, module_names) != adapter_modules:
            module_names = list(start_adapter.modules)
        yield Problem(
            f"{path}={model.target_modules!r}: {mismatch_text} of {source} has "
            f"{min(configured_modules ^ adapter_modules)}; allowed: the {len(adapter_modules)} "
            f"modules of the adapter; fix: set {path}=[{','.join(module_names)}]{new_run_fix}",
            "conflicting_keys",
        )


def find_adapter_sync_obstacle(cfg: PPOConfig, config: "PreTrainedConfig") -> str:
    """Return why weight syncs must send merged weights; "" if the engine can get the adapter."""
    engine_name = cfg.actor_rollout_ref.rollout.name
    if engine_name == "hf":
        return ""
    if engine_name != "vllm":
        return f"the engine {engine_name} is not known to take adapters"
    if cfg.actor_rollout_ref.model.lora_rank > MAX_VLLM_RANK:
        return f"vLLM takes adapters up to rank {MAX_VLLM_RANK}"
    if config.model_type in VLLM_TYPES_WITHOUT_LORA:
        return f"vLLM takes no adapters for {config.model_type}"
    trust_remote_code = cfg.actor_rollout_ref.model.trust_remote_code
    has_plain_layers = not predict_packing_support(config, trust_remote_code)[0]
    return "" if has_plain_layers else f"adapters of {config.model_type} in vLLM are not verified"


def resolve_lora_sync(cfg: PPOConfig) -> tuple[LoraSync, str]:
    """Return what a weight sync sends, and the reason for this choice.

    ``adapter`` is the LoRA adapter alone, ``merged`` are the base weights with the adapter added.
    The reason is "" for a model without LoRA, and if ``lora_sync=auto`` chooses ``adapter``.
    """
    model, lora_sync = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout.lora_sync
    if not model.lora_rank:
        return "merged", ""
    if lora_sync != "auto":
        return lora_sync, f"{SYNC_KEY}={lora_sync}"
    directory = resolve_directory_without_weights(str(model.path))
    reason = find_adapter_sync_obstacle(
        cfg, read_config(directory, model.trust_remote_code, model.override_config)
    )
    return ("merged", reason) if reason else ("adapter", "")
