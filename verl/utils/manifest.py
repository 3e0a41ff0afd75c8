"""Manifest of a checkpoint, and its ``state.json``.

``manifest.json`` has the size and SHA-256 of every other file, and the files that each process
wrote. Its last entry is a digest of the other entries.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from verl.names import CHECKPOINT_MANIFEST as MANIFEST
from verl.records import WrittenFiles
from verl.utils.files import add_path_to_errors, flush_to_disk

STATE = "state.json"
FORMAT = 2
MANIFEST_DIGEST = "sha256"  # key of the digest of the manifest's other entries


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or altered; the message names the file and the fault."""


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Check all files of a checkpoint and return its manifest.

    Raises ``CheckpointError`` for the first file that is missing or differs. Files that the
    manifest does not list are not read.
    """
    path = Path(path)
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        if _compute_sha256(path / name) != entry["sha256"]:
            raise CheckpointError(
                f"{path / name}: the content does not match {MANIFEST} (SHA-256 differs)"
            )
    return manifest


def write_state_and_manifest(
    directory: Path, step: int, encoded_state: str, written: Sequence[WrittenFiles]
) -> None:
    """Write ``state.json`` and the manifest of ``directory``, and flush all files to the disk.

    Raises ``CheckpointError`` if a file of ``written`` is missing, or a file is not a plain file.
    """
    for reserved in (STATE, MANIFEST):
        if (directory / reserved).exists():
            raise CheckpointError(
                f"the writer created {reserved}, a name that is reserved for the checkpoint"
            )
    with add_path_to_errors(directory / STATE):
        (directory / STATE).write_text(encoded_state, encoding="utf-8")
    files = {}
    for path in sorted(directory.rglob("*")):
        # The target of a link can change after its digest was computed.
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path}: not a plain file; allowed in a checkpoint: plain files and directories"
            )
        flush_to_disk(path)
        if path.is_file():
            entry = {"sha256": _compute_sha256(path), "size": path.stat().st_size}
            files[path.relative_to(directory).as_posix()] = entry
    writers = {
        record.writer: sorted(Path(path).relative_to(directory).as_posix() for path in record.sizes)
        for record in written
    }
    manifest = {"format": FORMAT, "step": step, "files": files, "writers": writers}
    _check_writers(directory, files, writers)
    with add_path_to_errors(directory / MANIFEST):
        (directory / MANIFEST).write_text(_encode_manifest(manifest), encoding="utf-8")
    flush_to_disk(directory / MANIFEST)
    flush_to_disk(directory)


def _encode_manifest(manifest: Mapping[str, Any]) -> str:
    """Encode ``manifest`` as JSON, with the digest of the other entries as its last entry."""
    other_entries = {name: entry for name, entry in manifest.items() if name != MANIFEST_DIGEST}
    digest = hashlib.sha256(json.dumps(other_entries).encode()).hexdigest()
    return json.dumps({**other_entries, MANIFEST_DIGEST: digest}, indent=1)


def _check_writers(
    path: Path, files: Mapping[str, object], writers: Mapping[str, Sequence[str]]
) -> None:
    """Raise ``CheckpointError`` unless ``files`` has all files that ``writers`` lists.

    ``writers`` maps the name of a process to the files that it wrote.
    """
    for writer, names in writers.items():
        missing_names = [name for name in names if name not in files]
        if missing_names:
            raise CheckpointError(
                f"{path / MANIFEST}: {missing_names[0]}, which {writer} wrote, is not in the list "
                "of files"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest after a check of presence and size of its files, not their content."""
    try:
        text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(text)
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{path / MANIFEST}: not a manifest of a checkpoint")
    for name, entry in files.items():
        _check_entry(path, name, entry)
    _check_writers(path, files, manifest.get("writers", {}))
    # A manifest of format 1 has no digest of its entries.
    if (manifest.get("format") != 1 or MANIFEST_DIGEST in manifest) and text != _encode_manifest(
        manifest
    ):
        raise CheckpointError(f"{path / MANIFEST}: altered since it was written")
    return manifest


def _check_entry(path: Path, name: str, entry: object) -> None:
    relative = PurePosixPath(name)
    is_inside = not relative.is_absolute() and ".." not in relative.parts
    if not is_inside or not isinstance(entry, dict) or {"sha256", "size"} - set(entry):
        raise CheckpointError(
            f"{path / MANIFEST}: the entry {name!r} is not valid; allowed: a relative path inside "
            "the checkpoint, with sha256 and size"
        )
    file = path / name
    if file.is_symlink() or not file.is_file():
        raise CheckpointError(f"{file}: the file is missing or not a plain file")
    if file.stat().st_size != entry["size"]:
        raise CheckpointError(
            f"{file}: the file has {file.stat().st_size} bytes, but {entry['size']} in {MANIFEST}"
        )


def has_all_files(path: Path) -> bool:
    """Return true if every file is present with its size; the content is not read."""
    try:
        _read_manifest(path)
    except CheckpointError:
        return False
    return True


def _compute_sha256(path: Path) -> str:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error
