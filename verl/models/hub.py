"""Models by their hub name: a local directory in the cache of ``huggingface_hub``.

``owner/name@REVISION`` is one revision of a model. A run names the commit to its workers: each of
them finds it in the cache of its own node, or fetches it, and all have the same one.
"""

from pathlib import Path

# Without the weights for other frameworks, which repositories often hold as well.
WEIGHTS = ["*.safetensors", "pytorch_model*.bin"]
DESCRIPTION = ["*.json", "*.jinja", "*.model", "*.txt", "*.py"]
FILES = [*DESCRIPTION, *WEIGHTS]


def model_directory(path: str) -> str:
    """``path`` where it is a directory, else the cached copy of the hub model of that name (or
    ``name@revision``), fetched if need be.

    ``HF_HOME``, ``HF_ENDPOINT``, ``HF_TOKEN`` and ``HF_HUB_OFFLINE`` mean what they mean to
    ``huggingface_hub``. Raises ``FileNotFoundError`` for what is neither a directory nor to be had
    from the hub.
    """
    return _directory(path, FILES)


def pinned(path: str) -> str:
    """``path`` as any node can be told of it: an absolute directory, or a hub name with the commit
    that its cached copy is of.

    Raises ``FileNotFoundError`` as ``model_directory``, which it calls.
    """
    directory = Path(model_directory(path))
    if Path(path).is_dir():
        return str(directory.absolute())
    return f"{path.partition('@')[0]}@{directory.name}"


def local_model(path: str | None) -> str | None:
    """``model_directory`` of a model where one is named: what a worker loads from."""
    return None if path is None else model_directory(path)


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

    name, _, revision = path.partition("@")
    try:
        return str(Path(snapshot_download(name, revision=revision or None, allow_patterns=files)))
    except (HfHubHTTPError, HFValidationError, OSError) as error:
        # OSError: no connection, and nothing in the cache
        why = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{path!r} is neither a directory nor a model that the hub gives: {why}"
        ) from error
