"""What is refused with the environment, the tokenizer and the engine at hand, before anything is
started.

``verl.trainer.config.validate`` reads the config alone; these checks import what the config names.
"""

from collections.abc import Iterator
from pathlib import Path

from agent_system.environments.env_registry import (
    MissingExtra,
    UnknownEnvironment,
    env_settings,
    get_package,
)
from agent_system.multi_turn_rollout.play_settings import check_prompts
from agent_system.reward_manager import load_reward_manager
from rlvcr.levels import LevelCodec
from verl.models.architecture import ALLOWED, FIX, config_reasons
from verl.models.backbone import attention_window
from verl.models.loader import read_config
from verl.trainer.config.cold_start import cold_start_config
from verl.trainer.config.schema import PPOConfig
from verl.utils.settings import ConfigError
from verl.workers.rollout.engine_registry import ENGINES, engine_class
from verl.workers.sections import LoadSection

PATH = "actor_rollout_ref.model.path"
ENGINE = "actor_rollout_ref.rollout.name"


def start_problems(cfg: PPOConfig) -> list[str]:
    """Messages of all checks on a config that has no other problem: key, value, why, allowed,
    fix.
    """
    return [
        *_environment_problems(cfg),
        *_tokenizer_problems(cfg),
        *_architecture_problems(cfg),
        *_engine_problems(cfg),
        *_reward_problems(cfg),
    ]


def _environment_problems(cfg: PPOConfig) -> Iterator[str]:
    """The environment is there, and its prompts say what is asked of them."""
    name = cfg.env.env_name
    try:
        package = get_package(name)
        package.prompts(env_settings(cfg.env))
    except ConfigError as error:
        yield from error.problems
        return
    except (UnknownEnvironment, MissingExtra, AttributeError, TypeError, ValueError) as error:
        yield (
            f"env.env_name={name!r}: {error}; allowed: an environment that is installed; "
            "fix: docs/environments.md"
        )
        return
    try:
        check_prompts(cfg, package)
    except ValueError as error:
        yield str(error)


def _tokenizer_problems(cfg: PPOConfig) -> Iterator[str]:
    """Levels can be told apart in tokens; a policy built from nothing brings a tokenizer that
    suits.
    """
    path = _tokenizer_path(cfg)
    if not cfg.env.levels or path is None:
        return
    # By call: its import takes seconds, which only runs with levels need here.
    from transformers import AutoTokenizer

    try:
        LevelCodec(
            AutoTokenizer.from_pretrained(
                path, trust_remote_code=cfg.actor_rollout_ref.model.trust_remote_code
            )
        )
    except ValueError as error:
        yield (
            f"{PATH}={str(path)!r}: {error}; allowed: a tokenizer in which each of the digits "
            "1, 2, 3, 4 between <level> and </level> is a token of its own; "
            "fix: add them to the tokenizer and train the policy with them"
        )


def _tokenizer_path(cfg: PPOConfig) -> Path | None:
    """The directory of the policy's tokenizer, or of the one it will be made with; None where there
    is none yet.
    """
    places = [cfg.actor_rollout_ref.model.path]
    if cfg.cold_start.enable:
        model = cold_start_config(cfg).model
        places += [model.tokenizer_path, model.path]
    # Directories only: nothing is fetched from the hub for a check.
    found = (
        Path(place)
        for place in places
        if place and (Path(place) / "tokenizer_config.json").is_file()
    )
    return next(found, None)


def _architecture_problems(cfg: PPOConfig) -> Iterator[str]:
    """Packed rows can score the policy and the critic, as far as their configs tell.

    What only shows with the weights is found where they are loaded.
    """
    models: dict[str, LoadSection] = {"actor_rollout_ref.model": cfg.actor_rollout_ref.model}
    if cfg.critic.enable and cfg.critic.model.path != cfg.actor_rollout_ref.model.path:
        models["critic.model"] = cfg.critic.model
    for section, model in models.items():
        # As for tokenizers: nothing is fetched, and what a cold start makes suits.
        if model.path is None or not (Path(model.path) / "config.json").is_file():
            continue
        said = f"{section}.path={model.path!r}"
        try:
            config = read_config(model.path, model.trust_remote_code, model.override_config)
        except (OSError, ValueError) as error:
            allowed = "a model that transformers knows, with keys of its own config"
            yield f"{said}: {error}; allowed: {allowed}; fix: mend the directory or override_config"
            continue
        for reason in config_reasons(config):
            yield f"{said}: {config.model_type}: {reason}; allowed: {ALLOWED}; fix: {FIX}"
        yield from _window_problems(cfg, said, attention_window(config))


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


def _engine_problems(cfg: PPOConfig) -> Iterator[str]:
    """The engine says with which log-probs it sampled: PPO's ratio and the token ledger need
    them.
    """
    name = cfg.actor_rollout_ref.rollout.name
    allowed = f"{', '.join(ENGINES)}, or module:Class of an engine that gives them"
    try:
        cls = engine_class(name)
    except (ImportError, AttributeError, ValueError) as error:
        yield f"{ENGINE}={name!r}: {error}; allowed: {allowed}; fix: mend the name"
        return
    if not getattr(cls, "gives_logprobs", False):
        why = "it does not give the log-probs of the tokens it samples (attribute gives_logprobs)"
        yield f"{ENGINE}={name!r}: {why}; allowed: {allowed}; fix: {ENGINE}=vllm"


def _reward_problems(cfg: PPOConfig) -> Iterator[str]:
    """The reward manager takes what it is given; a function of the user's own is there."""
    try:
        load_reward_manager(cfg)
    except (OSError, ImportError, AttributeError, TypeError, ValueError) as error:
        yield str(error)
