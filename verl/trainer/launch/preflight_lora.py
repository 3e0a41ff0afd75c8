"""Checks of LoRA before a run starts: target modules, further adapters, and what a sync sends."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

from verl.config.problems import build_problem
from verl.config.schema import PPOConfig
from verl.config.schema.model import CriticModelConfig, ModelConfig
from verl.config.settings import ConfigError
from verl.config.settings.hints import did_you_mean
from verl.models.adapters import find_misfits, read_adapter
from verl.models.architecture import expected_path
from verl.models.hub import description_directory
from verl.models.loader import build_meta_model, read_config
from verl.models.lora import adapted_module, linear_names, target_problems
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
    model: ModelConfig | CriticModelConfig,
    config: "PreTrainedConfig",
) -> Iterator[str]:
    """Yield problems of the LoRA keys of ``section``, whose model has ``config``."""
    if find_spec("peft") is None:
        key = f"{section}.lora_rank"
        why = "LoRA adapters need the package peft"
        yield build_problem(cfg, key, why, "0", f"run pip install peft, or set {key}=0")
        return
    meta_model = build_meta_model(config, model.trust_remote_code)
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
        if reason and cfg.actor_rollout_ref.rollout.lora_sync == "adapter":
            yield build_problem(cfg, SYNC_KEY, reason, "auto or merged", f"{SYNC_KEY}=auto")


def _find_adapter_problems(model: ModelConfig, meta_model: "PreTrainedModel") -> Iterator[str]:
    """Yield problems of the adapters that are not trained: files, kind and shapes."""
    allowed = "a directory of a LoRA adapter that peft saved for this model"
    for name, directory in model.adapters.items():
        setting = f"actor_rollout_ref.model.adapters.{name}={directory!r}"
        fix = "fix: name the directory that main_export lora=adapters wrote"
        try:
            adapter = read_adapter(directory)
        except ValueError as error:
            yield f"{setting}: {error}; allowed: {allowed}; {fix}"
            continue
        targets = list(dict.fromkeys(map(adapted_module, adapter)))
        problem = next(target_problems(meta_model, targets), None)
        if problem is None and (misfit := next(find_misfits(adapter, meta_model), None)):
            problem = f"{misfit} has not the shape of its layer"
        if problem is not None:
            yield f"{setting}: {problem}; allowed: {allowed}; {fix}"


def explain_merged_sync(cfg: PPOConfig, config: "PreTrainedConfig") -> str:
    """Return why weight syncs must send merged weights; "" if the engine can get the adapter."""
    policy = cfg.actor_rollout_ref
    if policy.rollout.name == "hf":
        return ""
    if policy.rollout.name != "vllm":
        return f"the engine {policy.rollout.name} is not known to take adapters"
    if policy.model.lora_rank > MAX_VLLM_RANK:
        return f"vLLM takes adapters up to rank {MAX_VLLM_RANK}"
    if config.model_type in VLLM_TYPES_WITHOUT_LORA:
        return f"vLLM takes no adapters for {config.model_type}"
    packing_problem, _ = expected_path(config)
    if packing_problem:
        return f"vLLM fuses the layers of {config.model_type} in ways that are not verified"
    return ""


def resolve_lora_sync(cfg: PPOConfig) -> tuple[LoraSync, str]:
    """Return what a weight sync sends, ``adapter`` or ``merged``, and the reason for ``merged``.

    Raises ``ConfigError`` if ``rollout.lora_sync=adapter`` is not possible.
    """
    model, rollout = cfg.actor_rollout_ref.model, cfg.actor_rollout_ref.rollout
    if not model.lora_rank:
        return "merged", ""
    if rollout.lora_sync == "merged":
        return "merged", f"{SYNC_KEY}=merged"
    directory = Path(description_directory(str(model.path)))
    config = read_config(directory, model.trust_remote_code, model.override_config)
    reason = explain_merged_sync(cfg, config)
    if reason and (rollout.lora_sync == "adapter" or model.adapters):
        key = SYNC_KEY if not model.adapters else "actor_rollout_ref.model.adapters"
        raise ConfigError(f"{key}: {reason}; allowed: engines that take adapters; fix: remove it")
    return ("merged", reason) if reason else ("adapter", "")
