"""Directories of models, as far as a look at their files tells."""

import re
from collections.abc import Iterator
from pathlib import Path

from verl.trainer.config.problems import Context, Problems, problem
from verl.trainer.config.schema import PPOConfig, SFTConfig
from verl.utils.hints import nearest_name
from verl.utils.settings import lookup

MAKE_ONE = "have this config make one there: cold_start.enable=true"


def is_local(path: str) -> bool:
    """Whether ``path`` can only be a directory: a hub name is ``name`` or ``owner/name``, with
    ``@revision`` or without.
    """
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path) or path.startswith((".", "/"))


def check_directory(
    cfg: PPOConfig | SFTConfig, key: str, ctx: Context, otherwise: str = "", made: bool = False
) -> Problems:
    """What stands at ``key`` is a hub name, or a directory with a model in it; where it is ``made``
    first, it may be missing. ``otherwise`` is another fix than to mend the path.
    """
    path = lookup(cfg, key)
    if path is None or not ctx.check_files:
        return
    directory = Path(path)
    allowed = "a directory in Hugging Face format, or a hub name"
    if directory.is_dir():
        for why in _missing(directory):
            fix = "name the directory that holds the model"
            fix = "remove it, and the cold start makes a policy there" if made else fix
            yield problem(cfg, key, why, allowed, fix)
    elif is_local(path) and not made:
        fix = "; or ".join(filter(None, (_neighbour(directory) or "mend the path", otherwise)))
        yield problem(cfg, key, "no such directory", allowed, fix)


def _missing(directory: Path) -> Iterator[str]:
    """What the directory lacks, the first thing alone."""
    if not any(directory.iterdir()):
        yield "the directory is empty"
    elif not (directory / "config.json").is_file():
        yield "there is no config.json in it, so it holds no model"
    elif not any(any(directory.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin")):
        yield "there are no weights in it (*.safetensors)"


def _neighbour(directory: Path) -> str:
    """The directory beside it with nearly the same name; empty where there is none."""
    if not directory.parent.is_dir():
        return ""
    beside = [entry.name for entry in directory.parent.iterdir() if entry.is_dir()]
    guess = nearest_name(directory.name, beside)
    return f"did you mean {str(directory.parent / guess)!r}?" if guess else ""
