"""Checks of one model directory for all entry points: its weights, and a tokenizer that fits."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.checkpoint_paths import suggest_export
from verl.config.settings import ConfigError, Problem
from verl.config.settings.hints import did_you_mean, nearest_name
from verl.models.architecture import UnsupportedArchitectureError
from verl.models.loader import find_unknown_overrides, override_config_values, read_config
from verl.models.weights import (
    UnusableWeightsError,
    WeightPurpose,
    check_weight_files,
    check_weights,
    first_line,
    has_comparable_weight_names,
)
from verl.utils.limits import describe_error

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

TOKENIZER_ERRORS = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
TIE_KEY = "tie_word_embeddings"
TOKENIZER_FIX = "fix: put the tokenizer's files next to the weights"


def find_weight_problems(
    setting: str,
    directory: Path,
    trust_remote_code: bool,
    purpose: WeightPurpose = "policy",
    config: "PreTrainedConfig | None" = None,
) -> Iterator[Problem]:
    """Yield a problem if the weights in ``directory`` do not fit the model.

    ``setting`` is the ``key=value`` that names the directory, for the message.
    """
    try:
        config = config or read_config(directory, trust_remote_code)
        check_weights(
            directory,
            config,
            setting=setting,
            purpose=purpose,
            trust_remote_code=trust_remote_code,
        )
    except UnsupportedArchitectureError as error:
        yield Problem(f"{setting}: {error}", "unsupported_model")
    except (UnusableWeightsError, OSError) as error:
        text = str(error) if isinstance(error, UnusableWeightsError) else f"{setting}: {error}"
        yield Problem(text, "wrong_weights")


def find_override_config_problems(
    section: str, override: Mapping[str, object], config: "PreTrainedConfig", directory: Path
) -> Iterator[Problem]:
    """Yield problems of ``override``, the values of ``<section>.override_config``.

    Each must replace a value that ``config`` has, which is the config of the model in
    ``directory``. ``tie_word_embeddings`` must not differ from config.json. The rollout engine
    reads that file, and the weights were saved with its value.
    """
    key = f"{section}.override_config"
    is_tied = bool(getattr(config.get_text_config(), TIE_KEY, False))
    if bool(override.get(TIE_KEY, is_tied)) != is_tied:
        yield Problem(
            f"{key}.{TIE_KEY}={override[TIE_KEY]!r}: the model's config.json has "
            f"{str(is_tied).lower()}, with which the weights were saved and which the rollout "
            f"engine reads; allowed: {str(is_tied).lower()}; fix: remove the key, or save the "
            "model again with another config.json",
            "conflicting_keys",
        )
    config_names = sorted(name for name in config.to_dict() if not name.startswith("_"))
    unknown_names = find_unknown_overrides(config, directory, override)
    for name in unknown_names:
        value = override[name]
        similar_name = nearest_name(name, config_names)
        fix = f"set {key}.{similar_name}={value}" if similar_name else "remove it"
        yield Problem(
            f"{key}.{name}={value!r}: {type(config).__name__} has no such value"
            f"{did_you_mean(name, config_names)}; allowed: {', '.join(config_names)}; fix: {fix}",
            "unknown_key",
        )
    if not unknown_names:
        try:
            override_config_values(config, directory, override)
        except ValueError as error:
            yield Problem(
                f"{section}.{error}; allowed: values of the model's config; fix: remove it",
                "wrong_type",
            )


def find_tokenizer_problems(
    setting: str, tokenizer: Any, directory: str | Path, vocab_size: int | None
) -> Iterator[Problem]:
    """Yield a problem if ``directory`` has no tokenizer files, or if an id is too large.

    Ids must be below ``vocab_size``, the number of embeddings. None skips this check.
    """
    # Without files transformers creates an empty tokenizer for many classes, without an error.
    tokenizer_file_names = {*getattr(tokenizer, "vocab_files_names", {}).values(), "tokenizer.json"}
    needs_files = len(tokenizer_file_names) > 1 or getattr(tokenizer, "is_fast", False)
    if needs_files and not any((Path(directory) / name).is_file() for name in tokenizer_file_names):
        why = f"the directory contains no tokenizer ({', '.join(sorted(tokenizer_file_names))})"
        yield Problem(f"{setting}: {why}; allowed: a tokenizer; {TOKENIZER_FIX}", "no_model")
        return
    max_id = max(tokenizer.get_vocab().values(), default=-1)
    if vocab_size is not None and max_id >= vocab_size:
        yield Problem(
            f"{setting}: its tokenizer has ids up to {max_id}, but the model has embeddings only "
            f"for ids below {vocab_size}; allowed: a tokenizer within the model's vocabulary; fix: "
            "use the tokenizer of this model, or call resize_token_embeddings and save both",
            "conflicting_keys",
        )


def find_policy_problems(
    setting: str,
    directory: Path,
    trust_remote_code: bool,
    tokenizer_directory: Path | None = None,
    tokenizer_setting: str = "",
    needs_transformers: bool = False,
    override_config: Mapping[str, object] | None = None,
) -> Iterator[Problem]:
    """Yield problems of the weights and the tokenizer of the policy in ``directory``.

    With ``needs_transformers``, transformers must be able to load the model; else vLLM suffices.
    """
    allowed = "a model that transformers supports"
    if not (directory / "config.json").is_file():
        why = "there is no config.json in it, so it is not a model"
        fix = suggest_export(directory, setting.partition("=")[0], "name the directory of a model")
        yield Problem(f"{setting}: {why}; allowed: {allowed}; fix: {fix}", "no_model")
        return
    try:
        config = read_config(directory, trust_remote_code, override_config)
    except (OSError, ValueError) as error:
        yield Problem(
            f"{setting}: {first_line(error)}; allowed: {allowed}; fix: restore its config.json",
            "unreadable_file",
        )
        return
    if needs_transformers or has_comparable_weight_names(config):
        yield from find_weight_problems(setting, directory, trust_remote_code, config=config)
    else:  # transformers cannot check the weights, but vLLM may support the model
        try:
            check_weight_files(directory, setting)
        except UnusableWeightsError as error:
            yield Problem(str(error), "wrong_weights")
    tokenizer_directory = tokenizer_directory or directory
    setting = tokenizer_setting or setting
    try:
        tokenizer = load_tokenizer(tokenizer_directory, trust_remote_code)
    except TOKENIZER_ERRORS as error:
        why = f"cannot load its tokenizer: {first_line(error)}"
        yield Problem(f"{setting}: {why}; allowed: a tokenizer; {TOKENIZER_FIX}", "no_model")
        return
    vocab_size = getattr(config.get_text_config(), "vocab_size", None)
    yield from find_tokenizer_problems(setting, tokenizer, tokenizer_directory, vocab_size)


def load_checked_tokenizer(setting: str, directory: Path, trust_remote_code: bool) -> Any:
    """Return the tokenizer of a policy, or raise ``ConfigError`` with its problems."""
    problems = list(find_policy_problems(setting, directory, trust_remote_code))
    if problems:
        raise ConfigError(problems)
    return load_tokenizer(directory, trust_remote_code)


def load_tokenizer(directory: str | Path, trust_remote_code: bool) -> Any:
    """Load the tokenizer in ``directory``; raise one of ``TOKENIZER_ERRORS`` if that fails."""
    # Import in the function, because the import takes seconds.
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)
    except TOKENIZER_ERRORS:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise ValueError(f"tokenizer.json: {error}") from error


def summarize_error(error: BaseException) -> str:
    """Return the type and the first line of the message of ``error``."""
    return f"{type(error).__name__}: {describe_error(error, str).strip()}".splitlines()[0]
