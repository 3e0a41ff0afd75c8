"""What a checkpoint says of itself: ``manifest.json``, with size and SHA-256 of every other file,
which process wrote which, and a digest of all that; and ``state.json``.
"""

import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from verl.names import CHECKPOINT_MANIFEST as MANIFEST
from verl.records import WrittenFiles
from verl.utils.files import flush_to_disk, naming

STATE = "state.json"
FORMAT = 2
OWN_DIGEST = "sha256"  # of the manifest's other entries


class CheckpointError(RuntimeError):
    """A checkpoint is missing, torn or altered; the message says which file and how."""


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """The manifest of a valid checkpoint.

    Raises ``CheckpointError`` for the first file that is missing or differs. Files the manifest
    does not name are left unread.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        if _digest(path / name) != entry["sha256"]:
            raise CheckpointError(
                f"{path / name}: the content is not what {MANIFEST} names (SHA-256 differs)"
            )
    return manifest


def write_state_and_manifest(
    directory: Path, step: int, encoded_state: str, written: Sequence[WrittenFiles]
) -> None:
    """Make a checkpoint of what lies in ``directory``, and return when it is on disk.

    Raises ``CheckpointError`` where a file lacks that a process wrote, or one is no plain file.
    """
    for reserved in (STATE, MANIFEST):
        if (directory / reserved).exists():
            raise CheckpointError(
                f"the writer made {reserved}, a name the checkpoint needs for itself"
            )
    with naming(directory / STATE):
        (directory / STATE).write_text(encoded_state, encoding="utf-8")
    files = {}
    for path in sorted(directory.rglob("*")):
        # What a link leads to can change after its digest was taken.
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(f"{path}: a checkpoint holds plain files and directories only")
        flush_to_disk(path)
        if path.is_file():
            entry = {"sha256": _digest(path), "size": path.stat().st_size}
            files[path.relative_to(directory).as_posix()] = entry
    writers = {part.writer: _inside(directory, part.sizes) for part in written}
    manifest = {"format": FORMAT, "step": step, "files": files, "writers": writers}
    _check_writers(directory, files, writers)
    with naming(directory / MANIFEST):
        (directory / MANIFEST).write_text(_encoded(manifest), encoding="utf-8")
    flush_to_disk(directory / MANIFEST)
    flush_to_disk(directory)


def _encoded(manifest: Mapping[str, Any]) -> str:
    """What is written: ``manifest`` and, as its last entry, the digest of the others."""
    others = {name: entry for name, entry in manifest.items() if name != OWN_DIGEST}
    digest = hashlib.sha256(json.dumps(others).encode()).hexdigest()
    return json.dumps({**others, OWN_DIGEST: digest}, indent=1)


def _inside(directory: Path, paths: Iterable[str]) -> list[str]:
    """``paths`` as the manifest names them."""
    return sorted(Path(path).relative_to(directory).as_posix() for path in paths)


def _check_writers(
    path: Path, files: Mapping[str, object], writers: Mapping[str, Sequence[str]]
) -> None:
    """Raise ``CheckpointError`` unless ``files`` has what every process wrote."""
    for writer, names in writers.items():
        lost = [name for name in names if name not in files]
        if lost:
            raise CheckpointError(
                f"{path / MANIFEST}: {lost[0]}, which {writer} wrote, is not among its files"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    """The manifest, with presence and size of its files checked (their content is not)."""
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{path / MANIFEST}: not a manifest")
    for name, entry in files.items():
        _check_entry(path, name, entry)
    _check_writers(path, files, manifest.get("writers", {}))
    # Those of format 1 have no digest of their own.
    if (manifest.get("format") != 1 or OWN_DIGEST in manifest) and text != _encoded(manifest):
        raise CheckpointError(f"{path / MANIFEST}: altered since it was written")
    return manifest


def _check_entry(path: Path, name: str, entry: object) -> None:
    relative = PurePosixPath(name)
    inside = not relative.is_absolute() and ".." not in relative.parts
    if not inside or not isinstance(entry, dict) or {"sha256", "size"} - set(entry):
        raise CheckpointError(f"{path / MANIFEST}: the entry {name!r} is not one a save writes")
    file = path / name
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{file}: missing")
    if file.stat().st_size != entry["size"]:
        raise CheckpointError(
            f"{file}: {file.stat().st_size} bytes, {MANIFEST} names {entry['size']}"
        )


def looks_whole(path: Path) -> bool:
    """Whether every file is there with its size; the content is not read."""
    try:
        _read_manifest(path)
    except CheckpointError:
        return False
    return True


def _digest(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
