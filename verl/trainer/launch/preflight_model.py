"""What is refused with the files of the models at hand: their configs, tokenizers, templates and
weights.

Of a model that is named by its hub name only the small files are fetched here; its weights are
checked when they are there, before Ray starts.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from agent_system.multi_turn_rollout.collector_worker import PolicyTokenizer
from agent_system.multi_turn_rollout.play_settings import asks_for_levels
from agent_system.tokens.probe import probe_template
from agent_system.tokens.template import TemplateUnsupported
from rlvcr.levels import LevelCodec
from verl.config.checks.models import ALLOWED as ALLOWED_MODEL
from verl.config.checks.models import fix_for_missing
from verl.config.cold_start import cold_start_config
from verl.config.policy_size import policy_size
from verl.config.problems import problem
from verl.config.schema import PPOConfig
from verl.config.schema.model import CriticModelConfig, ModelConfig
from verl.config.settings.hints import did_you_mean, nearest_name
from verl.models.architecture import ALLOWED, FIX, config_reasons
from verl.models.backbone import attention_window
from verl.models.hub import description_directory
from verl.models.loader import read_config
from verl.models.lora import add_lora, linear_names, target_problems
from verl.models.weights import Use
from verl.trainer.launch.preflight_reward import reward_model_problems
from verl.trainer.launch.preflight_weights import (
    NO_TOKENIZER,
    tie_problems,
    tokenizer_problems,
    vocabulary_of,
    weight_problems,
)

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig, PreTrainedModel

POLICY = "actor_rollout_ref.model"
PATH = f"{POLICY}.path"


def model_problems(cfg: PPOConfig) -> Iterator[str]:
    """Messages of all checks of policy, critic and reward model."""
    models: dict[str, ModelConfig | CriticModelConfig] = {POLICY: cfg.actor_rollout_ref.model}
    if cfg.critic.enable and cfg.critic.model.path != cfg.actor_rollout_ref.model.path:
        models["critic.model"] = cfg.critic.model
    fits = True
    for section, model in models.items():
        if model.path is None:
            continue
        path = model.path
        if section == POLICY and cfg.cold_start.enable and not Path(path).is_dir():
            continue  # what a cold start makes suits
        try:
            directory = Path(description_directory(path))
        except FileNotFoundError as error:
            key = f"{section}.path"
            yield problem(cfg, key, str(error), ALLOWED_MODEL, fix_for_missing(cfg, key))
            fits = False
            continue
        found = list(_config_problems(cfg, section, model, directory))
        fits = fits and not found
        yield from found
    yield from _tokenizer_problems(cfg, fits)
    yield from reward_model_problems(cfg)


# ---- configs ---------------------------------------------------------------------------------


def _config_problems(
    cfg: PPOConfig, section: str, model: ModelConfig | CriticModelConfig, directory: Path
) -> Iterator[str]:
    """Packed rows can score the model, as far as its config tells, and the weights are its own."""
    said = f"{section}.path={model.path!r}"
    try:
        config = read_config(directory, model.trust_remote_code)
    except (OSError, ValueError) as error:
        allowed = "a model that transformers knows"
        yield f"{said}: {error}; allowed: {allowed}; fix: mend the directory"
        return
    unknown = [key for key in model.override_config if not hasattr(config, key)]
    for key in unknown:
        yield _unknown_override(section, key, model.override_config, config)
    tied = list(tie_problems(f"{section}.override_config", model.override_config, config))
    yield from tied
    for key in set(model.override_config) - set(unknown):
        setattr(config, key, model.override_config[key])
    found = [
        f"{said}: {config.model_type}: {reason}; allowed: {ALLOWED}; fix: {FIX}"
        for reason in config_reasons(config)
    ]
    found += _window_problems(cfg, said, attention_window(config))
    if isinstance(model, ModelConfig) and model.lora_rank:
        found += _lora_problems(cfg, model, config)
    yield from found
    # With another config than theirs, weights are wrong as well, and no news.
    if Path(str(model.path)).is_dir() and not (unknown or tied or found):
        use: Use = "policy" if isinstance(model, ModelConfig) else "value"
        yield from weight_problems(said, directory, model.trust_remote_code, use, config)


def _unknown_override(
    section: str, key: str, values: Mapping[str, object], config: "PreTrainedConfig"
) -> str:
    known = sorted(name for name in config.to_dict() if not name.startswith("_"))
    guess = nearest_name(key, known)
    where = f"{section}.override_config"
    fix = f"{where}.{guess}={values[key]}" if guess else "leave it out"
    return (
        f"{where}.{key}={values[key]!r}: {type(config).__name__} has no such value"
        f"{did_you_mean(key, known)}; allowed: {', '.join(known)}; fix: {fix}"
    )


def _window_problems(cfg: PPOConfig, said: str, window: int | None) -> Iterator[str]:
    """No row, and no other thought about the prefix of a row, is longer than the ``window``."""
    rows = cfg.data.max_prompt_length + cfg.data.max_response_length
    keys = "data.max_prompt_length + data.max_response_length"
    if cfg.algorithm.rlvcr.enable:
        rows += cfg.algorithm.rlvcr.max_alternative_tokens
        keys += " + algorithm.rlvcr.max_alternative_tokens"
    if window is not None and rows > window:
        yield (
            f"{said}: some layers see {window} tokens only, and rows with their branches may have "
            f"{rows} ({keys}); allowed: rows within the window; fix: lower these, or choose a "
            "model without a window (docs/models.md)"
        )


def _lora_problems(cfg: PPOConfig, model: ModelConfig, config: "PreTrainedConfig") -> Iterator[str]:
    """The modules that adapters are asked for exist."""
    if find_spec("peft") is None:
        key = f"{POLICY}.lora_rank"
        yield problem(cfg, key, "adapters need peft", "0", f"pip install peft, or {key}=0")
        return
    lm = _without_weights(model, config)
    key = f"{POLICY}.target_modules"
    known = linear_names(lm)
    for found in target_problems(lm, model.target_modules):
        near = did_you_mean(str(found.unknown), known).removeprefix("; ") if found.unknown else ""
        allowed = f"all-linear, or some of {', '.join(known)}"
        yield problem(cfg, key, str(found), allowed, near or f"{key}=all-linear")


def _without_weights(model: ModelConfig, config: "PreTrainedConfig") -> "PreTrainedModel":
    """The modules of a model, on no device."""
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=model.trust_remote_code)


def model_facts(cfg: PPOConfig) -> dict[str, int]:
    """What the plan says of a policy that is there: its size, and that of its adapters."""
    model = cfg.actor_rollout_ref.model
    if model.path is None or (cfg.cold_start.enable and not Path(model.path).exists()):
        return {}
    directory = Path(description_directory(model.path))
    found = dataclasses.asdict(policy_size(directory))
    if found["parameters"] is not None and not model.lora_rank:
        return {name: value for name, value in found.items() if value is not None}
    config = read_config(directory, model.trust_remote_code)
    for key, value in model.override_config.items():
        setattr(config, key, value)
    lm = _without_weights(model, config)
    found["parameters"] = sum(parameter.numel() for parameter in lm.parameters())
    if model.lora_rank:
        asked = model.target_modules
        add_lora(lm, rank=model.lora_rank, alpha=model.lora_alpha, target_modules=asked)
        found["trained_parameters"] = sum(
            parameter.numel() for parameter in lm.parameters() if parameter.requires_grad
        )
    return {name: value for name, value in found.items() if value is not None}


# ---- tokenizers ------------------------------------------------------------------------------


def _tokenizer_problems(cfg: PPOConfig, fits: bool) -> Iterator[str]:
    """Conversations can be rendered, and levels told apart in tokens; a policy built from nothing
    brings a tokenizer that suits. ``fits``: nothing is wrong with its config and weights.
    """
    path = tokenizer_directory(cfg)
    if path is None:
        return
    said = f"{PATH}={str(cfg.actor_rollout_ref.model.path)!r}"
    if cfg.actor_rollout_ref.model.path != path:
        said = f"{PATH}={path!r}"
    try:
        tokenizer = load_tokenizer(cfg, path)
    except NO_TOKENIZER as error:
        why = str(error).strip().splitlines()[0] if str(error) else repr(error)
        fix = "put the tokenizer's files beside the weights"
        yield f"{said}: its tokenizer does not load: {why}; allowed: a tokenizer; fix: {fix}"
        return
    vocabulary = _vocabulary(cfg, path) if fits else None
    found = list(tokenizer_problems(said, tokenizer, path, vocabulary))
    if found:
        yield from found
        return
    try:
        probe_template(tokenizer, cfg.data.apply_chat_template_kwargs).require(cfg.env.history)
    except TemplateUnsupported as error:
        yield (
            f"{said}: {error}; allowed: a chat template that suits env.history={cfg.env.history}; "
            "fix: an instruct model, or a chat_template.jinja in its directory"
        )
        return
    if asks_for_levels(cfg):
        yield from _level_problems(said, tokenizer)


def _vocabulary(cfg: PPOConfig, path: str) -> int | None:
    """Rows of the policy's embedding; None for a policy that is not there yet."""
    model = cfg.actor_rollout_ref.model
    if cfg.cold_start.enable and model.path != path:
        return None
    return vocabulary_of(Path(path), model.trust_remote_code)


def _level_problems(said: str, tokenizer: PolicyTokenizer) -> Iterator[str]:
    try:
        LevelCodec(tokenizer)
    except ValueError as error:
        yield (
            f"{said}: {error}; allowed: a tokenizer in which each of the digits "
            "1, 2, 3, 4 between <level> and </level> is a token of its own; "
            "fix: add them to the tokenizer and train the policy with them"
        )


def load_tokenizer(cfg: PPOConfig, path: str) -> PolicyTokenizer:
    """The tokenizer in the directory ``path``."""
    # By call: its import takes seconds, which checks of the config alone do not need.
    from transformers import AutoTokenizer

    trust = cfg.actor_rollout_ref.model.trust_remote_code
    return AutoTokenizer.from_pretrained(path, trust_remote_code=trust)


def tokenizer_directory(cfg: PPOConfig) -> str | None:
    """The directory of the policy's tokenizer, or of the one it will be made with; None where there
    is none yet.
    """
    path = cfg.actor_rollout_ref.model.path
    if path is None:
        return None
    if not cfg.cold_start.enable or Path(path).is_dir():
        try:
            return description_directory(path)
        except FileNotFoundError:
            return None  # said where the model is looked up
    model = cold_start_config(cfg).model
    places = [place for place in (model.tokenizer_path, model.path) if place]
    return next((place for place in places if Path(place).is_dir()), None)
