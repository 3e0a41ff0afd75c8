"""Checks of the models' files before a run starts: configs, tokenizers, templates and weights.

For a model on the hub only the small files are downloaded here. Its weights are checked after
their download, before Ray starts.
"""

import contextlib
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from agent_system.environments.env import TemplateToolPrompts
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.multi_turn_rollout.rollout_settings import should_request_levels
from agent_system.tokens.bridge import ChatBridge, is_chat_tokenizer
from agent_system.tokens.replies import ReplyReader
from agent_system.tokens.template_support import check_template_support
from rlvcr.levels import LevelCodec
from rlvcr.settings import get_rlvcr_settings
from verl.config.checks.models import ALLOWED_MODELS, suggest_fix_for_missing_model
from verl.config.cold_start import build_cold_start_config
from verl.config.derive import is_policy_missing
from verl.config.memory import read_policy_size
from verl.config.problems import build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.schema.model import ModelConfig, TrainedModelConfig
from verl.config.settings import Problem, value_at_path
from verl.models.architecture import UnsupportedArchitectureError
from verl.models.auto_class import choose_auto_class
from verl.models.hub import resolve_directory_without_weights
from verl.models.loader import (
    build_meta_model,
    override_config_values,
    predict_packing_support,
    read_config,
)
from verl.models.lora import add_lora
from verl.models.weights import WeightPurpose, first_line
from verl.trainer.launch.preflight_lora import find_lora_problems, resolve_lora_sync
from verl.trainer.launch.preflight_weights import (
    TOKENIZER_ERRORS,
    TOKENIZER_FIX,
    find_override_config_problems,
    find_tokenizer_problems,
    find_weight_problems,
    load_tokenizer,
    summarize_error,
)
from verl.utils.chat_template import UnsupportedTemplateError

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

POLICY_SECTION = "actor_rollout_ref.model"
PATH_KEY = f"{POLICY_SECTION}.path"
REWARD_PATH_KEY = "reward_model.model.path"


def find_model_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield the problems of policy, critic and reward model."""
    model_by_section: dict[str, TrainedModelConfig] = {POLICY_SECTION: cfg.actor_rollout_ref.model}
    critic_model = cfg.critic.model
    if cfg.critic.enable and (
        critic_model.path != cfg.actor_rollout_ref.model.path or critic_model.lora_rank
    ):
        model_by_section["critic.model"] = critic_model
    is_model_valid = True
    for section, model in model_by_section.items():
        if model.path is None:
            continue
        path = model.path
        if section == POLICY_SECTION and cfg.cold_start.enable and not Path(path).is_dir():
            # Supervised training (cold start) creates this policy.
            with contextlib.suppress(OSError, ValueError):  # the cold start reports them
                config = _read_initial_model_config(build_cold_start_config(cfg))
                setting = f"{section}.path={path!r}"
                yield from _find_sequence_parallel_problems(cfg, section, setting, config)
            continue
        try:
            directory = Path(resolve_directory_without_weights(path))
        except FileNotFoundError as error:
            key = f"{section}.path"
            fix = suggest_fix_for_missing_model(cfg, key)
            yield build_problem(cfg, key, str(error), ALLOWED_MODELS, fix, "missing_file")
            is_model_valid = False
            continue
        problems = list(_find_config_problems(cfg, section, model, directory))
        is_model_valid = is_model_valid and not problems
        yield from problems
    yield from _find_tokenizer_problems(cfg, is_model_valid)
    yield from find_reward_model_problems(cfg)


# ---- configs ---------------------------------------------------------------------------------


def _find_config_problems(
    cfg: PPOConfig, section: str, model: TrainedModelConfig, directory: Path
) -> Iterator[Problem]:
    """Yield problems of one model: its config, ``override_config``, LoRA adapters and weights."""
    setting = f"{section}.path={model.path!r}"
    try:
        config = read_config(directory, model.trust_remote_code)
    except (OSError, ValueError) as error:
        allowed = "a model that transformers supports"
        message = f"{setting}: {error}; allowed: {allowed}; fix: correct the files of the directory"
        yield Problem(message, "unreadable_file")
        return
    try:
        choose_auto_class(config)
    except UnsupportedArchitectureError as error:
        yield Problem(f"{setting}: {error}", "unsupported_model")
        return
    override_config = model.override_config
    problems = list(find_override_config_problems(section, override_config, config, directory))
    if problems:
        yield from problems
        return
    if override_config:
        config = override_config_values(config, directory, override_config)
    problems = list(_find_sequence_parallel_problems(cfg, section, setting, config))
    if section == POLICY_SECTION:
        problems += _find_context_problems(cfg, config)
    if model.lora_rank or getattr(model, "lora_adapter_path", None):
        problems += find_lora_problems(cfg, section, model, config)
    yield from problems
    # An invalid config would make the check of the weights fail too.
    if Path(str(model.path)).is_dir() and not problems:
        weight_purpose: WeightPurpose = "policy" if isinstance(model, ModelConfig) else "value"
        yield from find_weight_problems(
            setting, directory, model.trust_remote_code, weight_purpose, config
        )


def _find_context_problems(cfg: PPOConfig, config: "PreTrainedConfig") -> Iterator[Problem]:
    """Yield a problem if vLLM would refuse rows that are longer than the context of the model."""
    rollout = cfg.actor_rollout_ref.rollout
    text_config = config.get_text_config()
    context_length = getattr(text_config, "max_position_embeddings", None)
    # vLLM multiplies the length by a RoPE factor, and accepts rows up to model_max_length.
    rope_text = str(getattr(text_config, "rope_parameters", None))
    has_longer_context = "'factor'" in rope_text or hasattr(text_config, "model_max_length")
    if (
        rollout.name == "vllm"
        and context_length
        and rollout.max_model_len > context_length
        and not has_longer_context
        and os.environ.get("VLLM_ALLOW_LONG_MAX_MODEL_LEN", "").strip().lower() not in ("1", "true")
    ):
        key = "actor_rollout_ref.rollout.max_model_len"
        why = f"the context of the model has {context_length} tokens, and vLLM refuses longer rows"
        fix = "lower data.max_prompt_length or data.max_response_length, which sum to this value"
        yield build_problem(cfg, key, why, f"{context_length} or less", fix, "does_not_fit")


def _find_sequence_parallel_problems(
    cfg: PPOConfig, section: str, setting: str, config: "PreTrainedConfig"
) -> Iterator[Problem]:
    """Yield a problem if sequence parallelism is set but some rows cannot be packed."""
    trained_section = "actor_rollout_ref.actor" if section == POLICY_SECTION else "critic"
    key = f"{trained_section}.ulysses_sequence_parallel_size"
    sequence_parallel_size = value_at_path(cfg, key)
    if sequence_parallel_size == 1:
        return
    row_wise_reason, max_packed_tokens = predict_packing_support(
        config, value_at_path(cfg, f"{section}.trust_remote_code")
    )
    max_row_tokens = cfg.data.max_row_tokens
    rlvcr_settings = get_rlvcr_settings(cfg.algorithm)
    if rlvcr_settings.enable:
        max_row_tokens += rlvcr_settings.max_alternative_tokens
    if not row_wise_reason and max_packed_tokens is not None and max_row_tokens > max_packed_tokens:
        row_wise_reason = (
            f"rows may have {max_row_tokens} tokens, and rows are packed up to {max_packed_tokens}"
        )
    if row_wise_reason:
        yield Problem(
            f"{key}={sequence_parallel_size}: {setting} has row-wise forward passes, which one "
            f"rank computes ({config.model_type}: {row_wise_reason}); allowed: 1; fix: {key}=1",
            "unsupported_model",
        )


def collect_model_facts(cfg: PPOConfig) -> dict[str, Any]:
    """Return facts for the printed plan: policy size, row packing, a note on the chat template."""
    return {**_collect_policy_facts(cfg), **_make_chat_template_note(cfg)}


def _make_chat_template_note(cfg: PPOConfig) -> dict[str, str]:
    tokenizer_directory = find_tokenizer_directory(cfg)
    if tokenizer_directory is None:
        return {}
    tokenizer = load_tokenizer(tokenizer_directory, cfg.actor_rollout_ref.model.trust_remote_code)
    template_arguments = cfg.data.apply_chat_template_kwargs
    note = check_template_support(tokenizer, template_arguments).describe_history_support(
        cfg.env.history
    )
    package = get_package(cfg.env.env_name)
    has_tools = isinstance(package.prompts(read_env_settings(cfg.env)), TemplateToolPrompts)
    if has_tools and cfg.env.history == "chat" and not should_request_levels(cfg):
        tool_call_format = ReplyReader(ChatBridge(tokenizer, template_arguments)).tool_format
        if tool_call_format:
            note += f"; it renders the tools, with calls in the format {tool_call_format}"
        else:
            note += "; it renders no tools in a known format, so the system message describes them"
    return {"history_note": note}


def _collect_policy_facts(cfg: PPOConfig) -> dict[str, int | str]:
    """Return numbers of parameters, limits of packing, and the kind of LoRA weight sync."""
    model = cfg.actor_rollout_ref.model
    if model.path is None:
        return {}
    if is_policy_missing(cfg):
        return collect_initial_policy_facts(build_cold_start_config(cfg))
    directory = Path(resolve_directory_without_weights(model.path))
    facts: dict[str, Any] = dataclasses.asdict(read_policy_size(directory))
    config = read_config(directory, model.trust_remote_code, model.override_config)
    facts |= _collect_packing_facts(config, model.trust_remote_code)
    uses_hf_engine = cfg.actor_rollout_ref.rollout.name == "hf"
    is_size_known = facts["parameters"] is not None and not model.lora_rank
    if is_size_known and not uses_hf_engine:
        return {name: value for name, value in facts.items() if value is not None}
    meta_model = build_meta_model(config, model.trust_remote_code)
    if uses_hf_engine:
        # Import here: only runs with this engine need its module.
        from verl.workers.rollout.hf import describe_missing_cache

        facts["engine_note"] = describe_missing_cache(meta_model)
    if not is_size_known:
        facts["parameters"] = sum(parameter.numel() for parameter in meta_model.parameters())
    if model.lora_rank:
        target_modules = model.target_modules
        add_lora(
            meta_model, rank=model.lora_rank, alpha=model.lora_alpha, target_modules=target_modules
        )
        facts["trained_parameters"] = sum(
            parameter.numel() for parameter in meta_model.parameters() if parameter.requires_grad
        )
        facts["lora_sync"], facts["merged_reason"] = resolve_lora_sync(cfg)
    return {name: value for name, value in facts.items() if value is not None}


def collect_initial_policy_facts(cfg: SFTConfig) -> dict[str, Any]:
    """Return facts on row packing for the plan of a supervised run.

    Return {} if the files of the model cannot be read. The preflight checks report that.
    """
    with contextlib.suppress(OSError, ValueError):
        return _collect_packing_facts(_read_initial_model_config(cfg), cfg.model.trust_remote_code)
    return {}


def _collect_packing_facts(config: "PreTrainedConfig", trust_remote_code: bool) -> dict[str, Any]:
    row_wise_reason, max_packed_tokens = predict_packing_support(config, trust_remote_code)
    return {"row_wise_reason": row_wise_reason, "max_packed_tokens": max_packed_tokens}


def _read_initial_model_config(cfg: SFTConfig) -> "PreTrainedConfig":
    """Return the config of the policy that a supervised run starts from or creates.

    Raises ``OSError`` or ``ValueError`` if the files of the policy cannot be read.
    """
    model = cfg.model
    if model.path is None:
        # Import here: the classes of new policies take seconds to import.
        from verl.models.new_policy import make_policy_config

        return make_policy_config(model.new, model.vocab_size)
    directory = resolve_directory_without_weights(model.path)
    return read_config(directory, model.trust_remote_code, model.override_config)


# ---- tokenizers ------------------------------------------------------------------------------


def _find_tokenizer_problems(cfg: PPOConfig, is_model_valid: bool) -> Iterator[Problem]:
    """Yield problems of the policy's tokenizer: files, vocabulary, chat template, level digits."""
    tokenizer_directory = find_tokenizer_directory(cfg)
    if tokenizer_directory is None:
        return
    setting = f"{PATH_KEY}={tokenizer_directory!r}"
    try:
        tokenizer = load_tokenizer(
            tokenizer_directory, cfg.actor_rollout_ref.model.trust_remote_code
        )
    except TOKENIZER_ERRORS as error:
        why = f"cannot load its tokenizer: {first_line(error)}"
        yield Problem(f"{setting}: {why}; allowed: a tokenizer; {TOKENIZER_FIX}", "no_model")
        return
    vocab_size = None
    is_created_by_cold_start = (
        cfg.cold_start.enable and cfg.actor_rollout_ref.model.path != tokenizer_directory
    )
    if is_model_valid and not is_created_by_cold_start:
        config = read_config(
            Path(tokenizer_directory), cfg.actor_rollout_ref.model.trust_remote_code
        )
        vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    problems = list(find_tokenizer_problems(setting, tokenizer, tokenizer_directory, vocab_size))
    if problems:
        yield from problems
        return
    try:
        template_support = check_template_support(tokenizer, cfg.data.apply_chat_template_kwargs)
        template_support.check_history_support(cfg.env.history)
    except UnsupportedTemplateError as error:
        yield Problem(
            f"{setting}: {error}; allowed: a chat template that supports env.history="
            f"{cfg.env.history}; fix: use an instruct model, or put a chat_template.jinja into its "
            "directory",
            "unsupported_template",
        )
        return
    if should_request_levels(cfg):
        try:
            LevelCodec(tokenizer)
        except ValueError as error:
            yield Problem(
                f"{setting}: {error}; allowed: a tokenizer in which each of the digits "
                "1, 2, 3, 4 between <level> and </level> is a separate token; "
                "fix: add these tokens to the tokenizer and train the policy with them",
                "unsupported_template",
            )


def find_tokenizer_directory(cfg: PPOConfig) -> str | None:
    """Return the directory of the policy's tokenizer, or that of its cold start, or None."""
    path = cfg.actor_rollout_ref.model.path
    if path is None:
        return None
    if not cfg.cold_start.enable or Path(path).is_dir():
        try:
            return resolve_directory_without_weights(path)
        except FileNotFoundError:
            return None  # find_model_problems reports it
    model = build_cold_start_config(cfg).model
    candidate_directories = [path for path in (model.tokenizer_path, model.path) if path]
    return next((path for path in candidate_directories if Path(path).is_dir()), None)


def find_reward_model_problems(cfg: PPOConfig) -> Iterator[Problem]:
    """Yield problems of the reward model: it must exist, have one label and a chat template."""
    model = cfg.reward_model.model
    if not cfg.reward_model.enable or model.path is None:
        return
    key = REWARD_PATH_KEY
    try:
        directory = Path(resolve_directory_without_weights(model.path))
    except FileNotFoundError as error:
        fix = suggest_fix_for_missing_model(cfg, key)
        yield build_problem(cfg, key, str(error), ALLOWED_MODELS, fix, "missing_file")
        return
    try:
        config = read_config(directory, model.trust_remote_code)
        tokenizer = load_tokenizer(directory, model.trust_remote_code)
    except TOKENIZER_ERRORS as error:
        allowed = "a model and a tokenizer that transformers can load"
        fix = "correct the files of the directory"
        yield build_problem(cfg, key, summarize_error(error), allowed, fix, "unreadable_file")
        return
    architectures = config.architectures or []
    why = ""
    if not any(name.endswith("ForSequenceClassification") for name in architectures):
        why = f"it is a {', '.join(architectures) or config.model_type}"
    elif config.num_labels != 1:
        why = f"it has {config.num_labels} labels"
    elif Path(model.path).is_dir():
        setting = f"{key}={model.path!r}"
        trust_code = model.trust_remote_code
        yield from find_weight_problems(setting, directory, trust_code, "reward", config)
    if why:
        allowed = "a model for sequence classification with one label"
        fix = f"set {key} to such a model"
        yield build_problem(cfg, key, why, allowed, fix, "unsupported_model")
    if not is_chat_tokenizer(tokenizer):
        why = "its tokenizer has no chat template to render conversations"
        fix = "put a chat_template.jinja into its directory"
        yield build_problem(cfg, key, why, "a chat template", fix, "unsupported_template")
