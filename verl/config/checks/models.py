"""Checks of model directories by their files, without loading a model."""

import hashlib
import re
from collections.abc import Iterator
from pathlib import Path

from verl.config.compose import POLICIES_DIR
from verl.config.problems import CheckContext, Problems, build_problem
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import value_at_path
from verl.config.settings.hints import nearest_name

POLICY = "actor_rollout_ref.model.path"
COLD_START_FIX = "train one there with a cold start: cold_start.enable=true"
ALLOWED = "a directory in Hugging Face format, or a hub name"
CHECKSUMS = "SHA256SUMS"  # file of a policy shipped with the package, for `sha256sum --check`


def is_local(path: str) -> bool:
    """Return True if ``path`` is a directory: it cannot be a hub name (owner/name@revision)."""
    return not re.fullmatch(r"[\w.-]+(/[\w.-]+)?(@[\w./-]+)?", path) or path.startswith((".", "/"))


def check_directory(
    cfg: PPOConfig | SFTConfig, key: str, ctx: CheckContext, is_created_by_cold_start: bool = False
) -> Problems:
    """Check that ``key`` names a model directory, which a cold start may create, or a hub name."""
    path = value_at_path(cfg, key)
    if path is None or not ctx.check_files:
        return
    directory = Path(path)
    altered_file = _altered_file(directory)
    if altered_file:
        why = f"{altered_file} is missing or altered: its SHA-256 is not the one in {CHECKSUMS}"
        fix = "restore the file: install the package again, or `git checkout` it"
        if key == POLICY:
            fix += f"; or train a new policy: {key}=data/models/NEW cold_start.enable=true"
        yield build_problem(cfg, key, why, f"the files that {CHECKSUMS} names", fix, "altered_file")
    elif directory.is_dir():
        fix = "name the directory that holds the model"
        if is_created_by_cold_start:
            fix = "remove it, so that the cold start trains a policy there"
        for code, why in _missing_model_file(directory):
            yield build_problem(cfg, key, why, ALLOWED, fix, code)
    elif is_created_by_cold_start and not is_local(path):
        # A relative path that looks like a hub name: later jobs in this working directory would
        # load the trained policy instead of the model on the hub.
        why = "a cold start would write a small policy under the name of a hub model"
        allowed = "a directory that starts with . or /"
        fix = f"cold_start.enable=false to train the hub's model, or {key}=./{path}"
        yield build_problem(cfg, key, why, allowed, fix)
    elif is_local(path) and not is_created_by_cold_start:
        fix = fix_for_missing(cfg, key)
        yield build_problem(cfg, key, "no such directory", ALLOWED, fix, "missing_directory")


def fix_for_missing(cfg: PPOConfig | SFTConfig, key: str) -> str:
    """Return the fix for a model that is neither on this machine nor provided by the hub."""
    path = str(value_at_path(cfg, key))
    if is_local(path):
        fixes = [_suggest_sibling(Path(path)) or "correct the path"]
        # Only a config whose cold start trains this policy can create it.
        if key == POLICY and isinstance(cfg, PPOConfig) and cfg.cold_start.config_name:
            fixes.append(COLD_START_FIX)
        return "; or ".join(fixes)
    # Imported here, because the import is slow and a valid config does not need it.
    from huggingface_hub.constants import is_offline_mode

    directory = f"for a directory, write ./{path}"
    if is_offline_mode():
        name, _, revision = path.partition("@")
        command = f"hf download {name}" + (f" --revision {revision}" if revision else "")
        return f"HF_HUB_OFFLINE=0, or `{command}` on a machine with access to the hub; {directory}"
    return f"correct the name, or set HF_TOKEN of an account with access; {directory}"


def _missing_model_file(directory: Path) -> Iterator[tuple[str, str]]:
    """Yield code and reason of the first file that the directory lacks, if any."""
    if not any(directory.iterdir()):
        yield "empty_directory", "the directory is empty"
    elif not (directory / "config.json").is_file():
        yield "missing_config", "there is no config.json in it, so it is not a model"
    elif not any(any(directory.glob(name)) for name in ("*.safetensors", "pytorch_model*.bin")):
        yield "missing_weights", "there are no weights in it (*.safetensors)"


def _altered_file(directory: Path) -> str:
    """Return the first file whose SHA-256 differs from the checksums of ``directory``, or "".

    Only the policies that are shipped with the package must have checksums.
    """
    checksums = directory / CHECKSUMS
    if not checksums.is_file():
        return CHECKSUMS if directory.parent == POLICIES_DIR else ""
    for line in checksums.read_text(encoding="utf-8", errors="replace").splitlines():
        digest, _, name = line.partition("  ")
        if not (directory / name).is_file():
            return name
        with (directory / name).open("rb") as stream:
            if hashlib.file_digest(stream, "sha256").hexdigest() != digest:
                return name
    return ""


def _suggest_sibling(directory: Path) -> str:
    """Return a suggestion of a directory with a similar name in the same place, or ""."""
    if not directory.parent.is_dir():
        return ""
    siblings = [entry.name for entry in directory.parent.iterdir() if entry.is_dir()]
    similar_name = nearest_name(directory.name, siblings)
    return f"did you mean {str(directory.parent / similar_name)!r}?" if similar_name else ""
