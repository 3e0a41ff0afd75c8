"""Checks of one model directory that all entry points share: its weights, and a tokenizer that fits
them.
"""

import contextlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.settings import ConfigError
from verl.models.loader import read_config
from verl.models.weights import UnusableWeights, Use, check_files, check_weights, is_comparable

if TYPE_CHECKING:  # transformers takes seconds to import
    from transformers import PreTrainedConfig

NO_TOKENIZER = (OSError, ValueError, KeyError, TypeError, AttributeError, ImportError)
TIE = "tie_word_embeddings"
PUT_TOKENIZER = "put the tokenizer's files beside the weights"


def weight_problems(
    said: str,
    directory: Path,
    trust_remote_code: bool,
    use: Use = "policy",
    config: "PreTrainedConfig | None" = None,
) -> Iterator[str]:
    """The weights in ``directory`` are those of the model that its config describes; ``said`` names
    the setting.
    """
    try:
        config = config or read_config(directory, trust_remote_code)
        check_weights(directory, config, said=said, use=use, trust_remote_code=trust_remote_code)
    except (UnusableWeights, OSError) as error:
        yield str(error) if isinstance(error, UnusableWeights) else f"{said}: {error}"


def tie_problems(
    where: str, override: Mapping[str, object], config: "PreTrainedConfig"
) -> Iterator[str]:
    """Yield a message if ``override``, the setting ``where``, ties an output head that ``config``
    does not tie, or the other way round: the rollout engine reads config.json alone.
    """
    tied = bool(getattr(config.get_text_config(), TIE, False))
    if bool(override.get(TIE, tied)) != tied:
        yield (
            f"{where}.{TIE}={override[TIE]!r}: its config.json says {str(tied).lower()}, which the "
            f"weights were saved with and the rollout engine reads; allowed: {str(tied).lower()}; "
            "fix: leave it out, or save the model anew with another config.json"
        )


def vocabulary_of(directory: Path, trust_remote_code: bool) -> int | None:
    """Rows of the embedding of the model in ``directory``; None where its config does not tell."""
    with contextlib.suppress(OSError, ValueError):  # said where the config is read
        config = read_config(directory, trust_remote_code)
        return getattr(config.get_text_config(), "vocab_size", None)
    return None


def tokenizer_problems(
    said: str, tokenizer: Any, directory: str | Path, vocabulary: int | None
) -> Iterator[str]:
    """The tokenizer was made from files, and the model has an embedding of each of its ids."""
    # Without files transformers makes an empty tokenizer of many kinds, and no error.
    names = {*getattr(tokenizer, "vocab_files_names", {}).values(), "tokenizer.json"}
    needs_files = len(names) > 1 or getattr(tokenizer, "is_fast", False)
    if needs_files and not any((Path(directory) / name).is_file() for name in names):
        why = f"there is no tokenizer in it ({', '.join(sorted(names))})"
        yield f"{said}: {why}; allowed: a tokenizer; fix: {PUT_TOKENIZER}"
        return
    largest = max(tokenizer.get_vocab().values(), default=-1)
    if vocabulary is not None and largest >= vocabulary:
        yield (
            f"{said}: its tokenizer has ids up to {largest}, and the model embeddings of the ids "
            f"below {vocabulary}; allowed: a tokenizer within the model's vocabulary; fix: the "
            "tokenizer of this model, or resize_token_embeddings and save both"
        )


def policy_problems(
    said: str,
    directory: Path,
    trust_remote_code: bool,
    tokenizer_directory: Path | None = None,
    said_tokenizer: str = "",
) -> Iterator[str]:
    """The policy in ``directory`` has all weights, and a tokenizer (of ``tokenizer_directory``,
    where it has its own, which ``said_tokenizer`` names) that fits them.
    """
    try:
        config = read_config(directory, trust_remote_code)
    except (OSError, ValueError) as error:
        allowed = "a model that transformers knows"
        yield f"{said}: {_first_line(error)}; allowed: {allowed}; fix: restore its config.json"
        return
    if is_comparable(config):
        yield from weight_problems(said, directory, trust_remote_code, config=config)
    else:  # vLLM may know it
        try:
            check_files(directory, said)
        except UnusableWeights as error:
            yield str(error)
    place = tokenizer_directory or directory
    said = said_tokenizer or said
    try:
        tokenizer = _load_tokenizer(place, trust_remote_code)
    except NO_TOKENIZER as error:
        why = f"its tokenizer does not load: {_first_line(error)}"
        yield f"{said}: {why}; allowed: a tokenizer; fix: {PUT_TOKENIZER}"
        return
    vocabulary = getattr(config.get_text_config(), "vocab_size", None)
    yield from tokenizer_problems(said, tokenizer, place, vocabulary)


def checked_tokenizer(said: str, directory: Path, trust_remote_code: bool) -> Any:
    """The tokenizer of the policy in ``directory``; raises ``ConfigError`` with its
    ``policy_problems``.
    """
    problems = list(policy_problems(said, directory, trust_remote_code))
    if problems:
        raise ConfigError(problems)
    return _load_tokenizer(directory, trust_remote_code)


def _load_tokenizer(directory: Path, trust_remote_code: bool) -> Any:
    # By call: its import takes seconds, which checks of the config alone do not need.
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else repr(error)
