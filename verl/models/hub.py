"""Models by their hub name: a local directory in the cache of ``huggingface_hub``."""

from pathlib import Path

# Without the weights for other frameworks, which repositories often hold as well.
WEIGHTS = ["*.safetensors", "pytorch_model*.bin"]
DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
FILES = [*DESCRIPTION, *WEIGHTS]


def model_directory(path: str) -> str:
    """``path`` where it is a directory, else the cached copy of the hub model of that name, fetched
    if need be.

    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they mean to
    ``huggingface_hub``. Raises ``FileNotFoundError`` for what is neither a directory nor to be had
    from the hub.
    """
    return _directory(path, FILES)


def description_directory(path: str) -> str:
    """As ``model_directory``, without the weights: config, tokenizer and template, which are small.

    Raises ``FileNotFoundError``.
    """
    return _directory(path, DESCRIPTION)


def _directory(path: str, files: list[str]) -> str:
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    try:
        return str(Path(snapshot_download(path, allow_patterns=files)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        # OSError: no connection, and nothing in the cache
        why = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{path!r} is neither a directory nor a model that the hub gives: {why}"
        ) from error
