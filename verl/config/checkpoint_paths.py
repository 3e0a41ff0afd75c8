"""Directories of the checkpoints of a run."""

import contextlib
import re
from pathlib import Path

from verl.config.schema.trainer import RunConfig
from verl.names import CHECKPOINT_MANIFEST

_STEP_DIRECTORY = re.compile(r"global_step_(\d+)")


def find_step_directories(root: Path) -> dict[int, Path]:
    """Return a dict n -> directory ``root/global_step_<n>``, in ascending order of n.

    The checkpoints may be incomplete.
    """
    directories: dict[int, Path] = {}
    for entry in root.iterdir() if root.is_dir() else ():
        match = _STEP_DIRECTORY.fullmatch(entry.name)
        if match and entry.is_dir():
            directories[int(match[1])] = entry
    return dict(sorted(directories.items()))


def get_step_of_checkpoint(checkpoint: Path) -> int:
    """Return n of a directory ``global_step_<n>``, 0 for a directory of another name."""
    match = _STEP_DIRECTORY.fullmatch(checkpoint.name)
    return int(match[1]) if match else 0


def find_checkpoint_to_resume(trainer: RunConfig) -> Path | None:
    """Return the checkpoint from which a run is to continue; None for a new run.

    The files are not verified here, so the run may continue from an earlier checkpoint.
    """
    checkpoints: list[Path] = []
    if trainer.resume_mode == "resume_path" and trainer.resume_from_path:
        checkpoints = [Path(trainer.resume_from_path).expanduser()]
    if trainer.resume_mode == "auto":
        root = Path(trainer.default_local_dir).expanduser() / "checkpoints"
        with contextlib.suppress(PermissionError):  # checks of the run directory report it
            checkpoints = list(filter(_has_manifest, find_step_directories(root).values()))
    return checkpoints[-1] if checkpoints else None


def _has_manifest(directory: Path) -> bool:
    return (directory / CHECKPOINT_MANIFEST).is_file()


def find_related_checkpoint(directory: Path) -> Path | None:
    """Return the checkpoint that ``directory`` is or belongs to, or the newest one of its run.

    ``directory`` may be a run, its directory ``checkpoints``, a checkpoint, or a role in one
    (``actor``), even if it is missing. Return None for other directories.
    """
    candidates = [
        path for path in (directory, directory.parent) if _STEP_DIRECTORY.match(path.name)
    ]
    for root in (directory, directory / "checkpoints", directory.parent):
        candidates += reversed(find_step_directories(root).values())
    return next(filter(_has_manifest, candidates), None)


def suggest_export(directory: Path, key: str, fix: str) -> str:
    """Return the suggested fix of ``key``, whose value ``directory`` is not a valid model.

    For a run or a checkpoint, the fix is to export a model from it. Otherwise it is ``fix``.
    """
    checkpoint = find_related_checkpoint(directory)
    if checkpoint is None:
        return fix
    command = f"python -m verl.trainer.main_export checkpoint={checkpoint} target=DIR"
    return f"export the checkpoint with `{command}`, and set {key}=DIR"
