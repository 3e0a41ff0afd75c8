"""Directories of models, as far as a look at their files tells."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from verl.config.problems import Context, Problems, problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import lookup
from verl.config.settings.hints import nearest_name

POLICY = "actor_rollout_ref.model.path"
MAKE_ONE = "have this config make one there: cold_start.enable=true"
ALLOWED = "a directory in Hugging Face format, or a hub name"
CHECKSUMS = "SHA256SUMS"  # in a policy of the package; `sha256sum --check` reads it as well


def is_local(path: str) -> bool:
    """Whether ``path`` can only be a directory: a hub name is ``name`` or ``owner/name``, with
    ``@revision`` or without.
    """
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path) or path.startswith((".", "/"))


def check_directory(
    cfg: PPOConfig | SFTConfig, key: str, ctx: Context, made: bool = False
) -> Problems:
    """What stands at ``key`` is a hub name, or a directory with a model in it; where it is ``made``
    first, it may be missing.
    """
    path = lookup(cfg, key)
    if path is None or not ctx.check_files:
        return
    directory = Path(path)
    altered = _altered_file(directory)
    if altered:
        why = f"{altered} is missing or altered: its SHA-256 is not the one in {CHECKSUMS}"
        fix = "restore the file: install the package again, or `git checkout` it"
        if key == POLICY:
            fix += f"; or train a new policy: {key}=data/models/NEW cold_start.enable=true"
        yield problem(cfg, key, why, f"the files that {CHECKSUMS} names", fix)
    elif directory.is_dir():
        for why in _missing(directory):
            fix = "name the directory that holds the model"
            fix = "remove it, and the cold start makes a policy there" if made else fix
            yield problem(cfg, key, why, ALLOWED, fix)
    elif made and not is_local(path):
        # The directory would be taken for the hub's model by every later job that starts here.
        why = "a cold start would make a small policy under the name of a hub model"
        allowed = "a directory, written from . or from /"
        fix = f"cold_start.enable=false, and the hub's model is trained; or {key}=./{path}"
        yield problem(cfg, key, why, allowed, fix)
    elif is_local(path) and not made:
        yield problem(cfg, key, "no such directory", ALLOWED, fix_for_missing(cfg, key))


def fix_for_missing(cfg: PPOConfig | SFTConfig, key: str) -> str:
    """The fix where the model that ``key`` names is neither on this machine nor given by the
    hub.
    """
    path = str(lookup(cfg, key))
    if is_local(path):
        fixes = [_neighbour(Path(path)) or "mend the path"]
        # Only a config that has a recipe for its policy makes the one that was meant.
        if key == POLICY and isinstance(cfg, PPOConfig) and cfg.cold_start.config_name:
            fixes.append(MAKE_ONE)
        return "; or ".join(fixes)
    # By call: importing it takes a moment that a sound config need not wait for.
    from huggingface_hub.constants import is_offline_mode

    directory = f"a directory is written ./{path}"
    if is_offline_mode():
        name, _, revision = path.partition("@")
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        return f"HF_HUB_OFFLINE=0, or `{command}` where the hub can be reached; {directory}"
    return f"mend the name, or HF_TOKEN of an account that may read it; {directory}"


def _missing(directory: Path) -> Iterator[str]:
    """What the directory lacks, the first thing alone."""
    if not any(directory.iterdir()):
        yield "the directory is empty"
    elif not (directory / "config.json").is_file():
        yield "there is no config.json in it, so it holds no model"
    elif not any(any(directory.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin")):
        yield "there are no weights in it (*.safetensors)"


def _altered_file(directory: Path) -> str:
    """Return the first file whose content is not the one that the checksums of ``directory`` name;
    empty if there is none, or no checksums.
    """
    checksums = directory / CHECKSUMS
    if not checksums.is_file():
        return ""
    for line in checksums.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (directory / name).is_file():
            return name
        with (directory / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                return name
    return ""


def _neighbour(directory: Path) -> str:
    """The directory beside it with nearly the same name; empty where there is none."""
    if not directory.parent.is_dir():
        return ""
    beside = [entry.name for entry in directory.parent.iterdir() if entry.is_dir()]
    guess = nearest_name(directory.name, beside)
    return f"did you mean {str(directory.parent / guess)!r}?" if guess else ""
