"""Resolve Hugging Face Hub names to local directories in the cache of ``huggingface_hub``.

``owner/name@REVISION`` is one revision of a model. A run passes the commit hash to its workers, so
all nodes load the same revision from their local cache or download it.
"""

from pathlib import Path

# Repositories often also hold weights for other frameworks, which are not downloaded.
WEIGHT_FILES = ["*.safetensors", "pytorch_model*.bin"]
DESCRIPTION_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
MODEL_FILES = [*DESCRIPTION_FILES, *WEIGHT_FILES]


def model_directory(path: str) -> str:
    """Return ``path`` if it is a directory, else the cached directory of the hub model ``path``.

    The hub name may be ``name@revision``. Missing files are downloaded. ``HF_HOME``,
    ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` have their usual meaning. Raises
    ``FileNotFoundError`` if ``path`` is not a directory and the hub does not provide it.
    """
    return _resolve_directory(path, MODEL_FILES)


def pin_revision(path: str) -> str:
    """Return ``path`` in a form that is valid on every node.

    This is an absolute directory, or a hub name with the commit of the cached copy
    (``owner/name@COMMIT``). Raises ``FileNotFoundError`` as ``model_directory`` does.
    """
    directory = Path(model_directory(path))
    if Path(path).is_dir():
        return str(directory.absolute())
    return f"{path.partition('@')[0]}@{directory.name}"


def resolve_directory_without_weights(path: str) -> str:
    """Return the directory of a model as ``model_directory`` does, but download no weights."""
    return _resolve_directory(path, DESCRIPTION_FILES)


def _resolve_directory(path: str, patterns: list[str]) -> str:
    if Path(path).is_dir():
        return path
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    name, _, revision = path.partition("@")
    try:
        return str(
            Path(snapshot_download(name, revision=revision or None, allow_patterns=patterns))
        )
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        # OSError is raised without a connection if the model is not in the cache.
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{path!r} is neither a directory nor a model that the hub provides: {reason}"
        ) from error
