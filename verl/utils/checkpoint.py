"""Checkpoint directories that appear only when they are complete.

::

    root/global_step_20/          renamed into place when every byte is on disk
        manifest.json             size, SHA-256 and writing process of every other file; it is
                                  written last
        state.json                the ``state`` argument of ``save``
        ...                       files of the writer (safetensors for tensors, JSON for state)
    root/.partial-<host>-<pid>-*  directory of a running save or removal; after a crash the next
                                  save removes it

A checkpoint is valid if its manifest lists the files of every process that wrote into it. All files
must have the listed size and digest. Only one driver at a time may save into a root. Any number of
processes may read.

With ``background``, a save continues in a thread after the state is copied::

    run      save 20: copy ─▶ steps 21 ... 30 ─▶ save 30: raise the error if save 20 failed ─▶ copy
    thread                └─▶ write files ─▶ digests ─▶ manifest ─▶ rename
"""

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import socket
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from verl.config.checkpoint_paths import find_step_directories
from verl.config.settings import ConfigError
from verl.names import CHECKPOINT_MANIFEST as MANIFEST
from verl.names import ResumeMode
from verl.records import WrittenFiles
from verl.utils.files import (
    add_path_to_errors,
    flush_to_disk,
    make_partial_directory,
    remove_abandoned_directories,
    rename_with_number,
    set_permissions_and_flush,
)
from verl.utils.saved_state import InvalidStateError
from verl.utils.waits import BackgroundCall

STATE_FILE = "state.json"
MANIFEST_FORMAT = 2  # version of the manifest's format
MANIFEST_DIGEST = "sha256"  # key of the digest of all other entries of the manifest
PARTIAL_PREFIX = ".partial-"
VISIBILITY_TIMEOUT_S = 90.0  # until files of other nodes are visible (file systems cache 60 s)
POLL_S = 0.5  # time between two checks if files are visible
CLOSE_TIMEOUT_S = 60.0  # maximum time to wait for a running save when the run ends early

logger = logging.getLogger(__name__)


class CheckpointManager:
    """Manager of the checkpoints in the directory ``root``: saves, finds and removes them.

    The newest ``max_to_keep`` checkpoints are kept (None: all). With ``background``, ``save``
    returns when the state is copied, and ``wait`` waits until the save has ended.
    """

    def __init__(
        self, root: str | Path, max_to_keep: int | None = None, background: bool = False
    ) -> None:
        self.root = Path(root)
        self.max_to_keep = max_to_keep
        self.background = background
        self._running_save: tuple[int, BackgroundCall[None]] | None = None

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        """Write ``root/global_step_<step>``, remove old checkpoints and return the directory.

        ``writer(directory)`` writes the tensors. It may instead copy them, write them in the
        background and return a function that waits until they are written. The writer or this
        function may return a list of ``WrittenFiles`` (paths and sizes), one per process. ``state``
        must be JSON. A checkpoint of the same step is replaced.

        Raises ``CheckpointError`` if a listed file is not visible to this process in time. After an
        error no new checkpoint exists, and other checkpoints are unchanged. With ``background``,
        errors after the copy are raised by the next call of ``save`` or ``wait``.
        """
        # Encode the state first: if it is not JSON, fail before the tensors are written.
        encoded_state = json.dumps(state, indent=1)
        self.wait()
        self.root.mkdir(parents=True, exist_ok=True)
        remove_abandoned_directories(self.root, PARTIAL_PREFIX)
        partial_dir = make_partial_directory(self.root, PARTIAL_PREFIX)
        try:
            files_or_wait_function = writer(partial_dir)
        except BaseException:
            shutil.rmtree(partial_dir, ignore_errors=True)
            raise
        finish_save = functools.partial(
            self._finish_save, step, partial_dir, encoded_state, files_or_wait_function
        )
        if self.background:
            self._running_save = step, BackgroundCall(finish_save, f"save-{step}")
        else:
            finish_save()
        return self._get_step_directory(step)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the running save. Raise ``CheckpointError`` if it failed or takes too long."""
        if self._running_save is None:
            return
        step, background_call = self._running_save
        try:
            background_call.get_result(timeout_s)
        except Exception as error:
            self._running_save = None
            raise CheckpointError(f"the save of step {step} failed: {error}") from error
        self._running_save = None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait up to ``timeout_s`` for a running save. Log an error instead of raising it."""
        try:
            self.wait(timeout_s)
        except CheckpointError as error:
            logger.warning("%s", error)

    def _get_step_directory(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def _finish_save(
        self, step: int, partial_dir: Path, encoded_state: str, files_or_wait_function: object
    ) -> None:
        """Wait until all files are written, then rename ``partial_dir`` to the checkpoint name."""
        checkpoint_dir = self._get_step_directory(step)
        try:
            if callable(files_or_wait_function):
                files_or_wait_function = files_or_wait_function()
            written_files = (
                files_or_wait_function if isinstance(files_or_wait_function, list) else []
            )
            self._wait_until_visible(partial_dir, written_files)
            set_permissions_and_flush(partial_dir)
            write_state_and_manifest(partial_dir, step, encoded_state, written_files)
            replaced_dir = (
                self._move_to_partial_dir(checkpoint_dir) if checkpoint_dir.exists() else None
            )
            os.rename(partial_dir, checkpoint_dir)
        except Exception as error:
            # Log the error now: a background save raises it only in the next ``save`` or ``wait``.
            logger.error("the save of step %d failed: %s", step, error)
            raise
        finally:
            shutil.rmtree(partial_dir, ignore_errors=True)  # no effect if it has been renamed
        flush_to_disk(self.root)
        if replaced_dir is not None:
            shutil.rmtree(replaced_dir)
        self._remove_old_checkpoints(step)

    def find_checkpoints(self) -> dict[int, Path]:
        """Return a dict n -> directory ``global_step_<n>``, by n. Checkpoints may be incomplete."""
        return find_step_directories(self.root)

    def find_latest_valid(self, after_step: int = -1) -> Path | None:
        """Return the newest valid checkpoint after ``after_step``. Log newer invalid ones."""
        for step, path in reversed(self.find_checkpoints().items()):
            if step <= after_step:
                return None
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                logger.warning("checkpoint skipped because it is not valid: %s", error)
            else:
                return path
        return None

    def set_aside_later_checkpoints(self, step: int) -> None:
        """Move the complete checkpoints of steps after ``step`` to ``root/given_up``.

        A run that resumes at ``step`` calls this method. Otherwise ``find_latest_valid`` and
        ``max_to_keep`` would include later checkpoints.
        """
        later_paths = [
            path
            for later_step, path in self.find_checkpoints().items()
            if later_step > step and is_complete_checkpoint(path)
        ]
        if not later_paths:
            return
        given_up_dir = self.root / "given_up"
        given_up_dir.mkdir(exist_ok=True)
        for path in later_paths:
            new_path = given_up_dir / path.name
            if new_path.exists():
                rename_with_number(new_path)
            os.rename(path, new_path)
        flush_to_disk(self.root)
        checkpoint_names = ", ".join(path.name for path in later_paths)
        logger.warning(
            "checkpoints of an abandoned run were moved to %s: %s", given_up_dir, checkpoint_names
        )

    def load_state(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the ``state`` of the checkpoint ``path``, or of the newest valid checkpoint.

        Raises ``CheckpointError`` if ``path`` is not a valid checkpoint, or if there is no valid
        checkpoint. Raises it too if the file of the state does not contain a JSON object.
        """
        if path is None:
            path = self.find_latest_valid()
            if path is None:
                raise CheckpointError(f"no valid checkpoint under {self.root}")
        else:
            verify_checkpoint(path)
        file = Path(path) / STATE_FILE
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}; allowed: JSON") from error
        if not isinstance(state, dict):
            why = f"it holds a JSON value of type {type(state).__name__}"
            raise CheckpointError(f"{file}: {why}; allowed: an object")
        return state

    def _wait_until_visible(self, directory: Path, written_files: Sequence[WrittenFiles]) -> None:
        """Wait until this process sees all files of ``written_files`` with their full sizes."""
        deadline = time.monotonic() + VISIBILITY_TIMEOUT_S
        while invisible_files := list(_find_invisible_files(written_files)):
            if time.monotonic() > deadline:
                writer, path = invisible_files[0]
                raise CheckpointError(
                    f"{len(invisible_files)} files of the checkpoint are not visible to the driver "
                    f"on {socket.gethostname()} after {VISIBILITY_TIMEOUT_S:g} s, the first of "
                    f"them {path}, which {writer} wrote: {self.root} is not on storage that all "
                    "nodes of the run share; fix: trainer.default_local_dir=DIR, an absolute path "
                    "of a directory that all nodes share"
                )
            time.sleep(POLL_S)
            os.listdir(directory)  # makes a network file system refresh its cache

    def _remove_old_checkpoints(self, saved_step: int) -> None:
        """Remove complete checkpoints except the newest ``max_to_keep``.

        The checkpoint of ``saved_step`` and the newest valid checkpoint are never removed.
        """
        if self.max_to_keep is None:
            return
        path_by_step = self.find_checkpoints()
        complete_steps = [
            step
            for step, checkpoint_dir in path_by_step.items()
            if is_complete_checkpoint(checkpoint_dir)
        ]
        kept_steps = {*complete_steps[-self.max_to_keep :], saved_step}
        # A newer checkpoint belongs to another run that used ``root``.
        newer_checkpoint = self.find_latest_valid(after_step=saved_step)
        kept_steps |= {
            step
            for step, checkpoint_dir in path_by_step.items()
            if checkpoint_dir == newer_checkpoint
        }
        for step, checkpoint_dir in path_by_step.items():
            # Remove incomplete checkpoints only if they are older than all kept ones. The user may
            # want to inspect newer ones.
            if step not in kept_steps and (step in complete_steps or step < min(kept_steps)):
                shutil.rmtree(self._move_to_partial_dir(checkpoint_dir))

    def _move_to_partial_dir(self, path: Path) -> Path:
        # Rename the directory before removing it: if the removal is interrupted, no incomplete
        # directory may have the name of a checkpoint.
        partial_dir = make_partial_directory(self.root, PARTIAL_PREFIX)
        os.rename(path, partial_dir / path.name)
        flush_to_disk(self.root)
        return partial_dir


@contextlib.contextmanager
def convert_state_errors(checkpoint: Path) -> Iterator[None]:
    """Raise ``ConfigError`` if the ``with`` block finds that ``checkpoint`` is not usable."""
    fix = "fix: set trainer.resume_mode=resume_path and trainer.resume_from_path=OTHER_CHECKPOINT"
    try:
        yield
    except InvalidStateError as error:
        raise ConfigError(f"{checkpoint / STATE_FILE}: {error}; {fix}", "altered_file") from error
    except CheckpointError as error:
        raise ConfigError(f"{error}; {fix}", "altered_file") from error


def choose_checkpoint(
    checkpoints: CheckpointManager, resume_mode: ResumeMode, resume_from_path: str | None
) -> Path | None:
    """Return the checkpoint to resume from; None to start without one.

    ``resume_mode=resume_path`` means ``resume_from_path``, ``auto`` means the newest valid
    checkpoint if there is one, and ``disable`` means None. Raises ``ConfigError`` in mode ``auto``
    if all checkpoints are invalid: the run would lose its progress without notice.
    """
    if resume_mode == "resume_path" and resume_from_path is not None:
        return Path(resume_from_path)
    if resume_mode != "auto":
        return None
    checkpoint = checkpoints.find_latest_valid()
    if checkpoint is None and (invalid_checkpoints := checkpoints.find_checkpoints()):
        names_text = ", ".join(path.name for path in invalid_checkpoints.values())
        raise ConfigError(
            f"{checkpoints.root}: no checkpoint is valid ({names_text}; the log names their "
            "faults), so the run would start again from step 0; allowed with "
            "trainer.resume_mode=auto: a valid checkpoint, or none; fix: restore the files, or set "
            "trainer.resume_mode=disable to start from step 0",
            "no_checkpoint",
        )
    return checkpoint


def _find_invisible_files(written_files: Sequence[WrittenFiles]) -> Iterator[tuple[str, str]]:
    """Yield (writer, path) of every file that this process does not see with its full size."""
    for rank_files in written_files:
        for path, full_size in rank_files.sizes.items():
            try:
                is_visible = os.stat(path).st_size == full_size
            except OSError:  # also a stale handle of a network file system
                is_visible = False
            if not is_visible:
                yield rank_files.writer, path


# ---- manifest ----------------------------------------------------------------------------------


class CheckpointError(RuntimeError):
    """Error: a checkpoint is missing, incomplete or altered. The message names file and fault."""


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Return the manifest. Raise ``CheckpointError`` if a file differs in size or digest."""
    path = Path(path)
    manifest = _read_manifest(path)
    for name, entry in manifest["files"].items():
        if _compute_sha256(path / name) != entry["sha256"]:
            raise CheckpointError(
                f"{path / name}: the content does not match {MANIFEST} (SHA-256 differs)"
            )
    return manifest


def write_state_and_manifest(
    directory: Path, step: int, encoded_state: str, written_files: Sequence[WrittenFiles]
) -> None:
    """Write ``state.json`` and the manifest of ``directory``, and flush all files to the disk.

    Raises ``CheckpointError`` if a written file is missing, and for links and special files.
    """
    with add_path_to_errors(directory / STATE_FILE):
        (directory / STATE_FILE).write_text(encoded_state, encoding="utf-8")
    entry_by_name = {}
    for path in sorted(directory.rglob("*")):
        # Refuse links: the target of a link can change after its digest was computed.
        if path.is_symlink() or not (path.is_file() or path.is_dir()):
            raise CheckpointError(
                f"{path}: not a plain file; allowed in a checkpoint: plain files and directories"
            )
        flush_to_disk(path)
        if path.is_file():
            entry = {"sha256": _compute_sha256(path), "size": path.stat().st_size}
            entry_by_name[path.relative_to(directory).as_posix()] = entry
    names_by_writer = {
        rank_files.writer: sorted(
            Path(path).relative_to(directory).as_posix() for path in rank_files.sizes
        )
        for rank_files in written_files
    }
    manifest = {
        "format": MANIFEST_FORMAT,
        "step": step,
        "files": entry_by_name,
        "writers": names_by_writer,
    }
    _require_listed_files(directory, entry_by_name, names_by_writer)
    with add_path_to_errors(directory / MANIFEST):
        (directory / MANIFEST).write_text(_encode_manifest(manifest), encoding="utf-8")
    flush_to_disk(directory / MANIFEST)
    flush_to_disk(directory)


def _encode_manifest(manifest: Mapping[str, Any]) -> str:
    """Encode ``manifest`` as JSON. Add the digest of all entries as the last entry."""
    other_entries = {name: entry for name, entry in manifest.items() if name != MANIFEST_DIGEST}
    digest = hashlib.sha256(json.dumps(other_entries).encode()).hexdigest()
    return json.dumps({**other_entries, MANIFEST_DIGEST: digest}, indent=1)


def _require_listed_files(
    path: Path, listed_files: Mapping[str, object], names_by_writer: Mapping[str, Sequence[str]]
) -> None:
    """Raise ``CheckpointError`` if the manifest of the checkpoint ``path`` lacks a file.

    ``listed_files`` are the listed files by name. ``names_by_writer`` maps each process that wrote
    into the checkpoint to the names of its files.
    """
    for writer, names in names_by_writer.items():
        missing_names = [name for name in names if str(name) not in listed_files]
        if missing_names:
            raise CheckpointError(
                f"{path / MANIFEST}: {missing_names[0]}, which {writer} wrote, is not in the list "
                "of files"
            )


def _read_manifest(path: Path) -> dict[str, Any]:
    """Return the manifest of the checkpoint ``path``. Check the sizes of its files."""
    try:
        manifest_text = (path / MANIFEST).read_text(encoding="utf-8")
        manifest = json.loads(manifest_text)
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    entry_by_name = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(entry_by_name, dict) or STATE_FILE not in entry_by_name:
        raise CheckpointError(f"{path / MANIFEST}: not a manifest of a checkpoint")
    for name, entry in entry_by_name.items():
        _check_manifest_entry(path, name, entry)
    names_by_writer = manifest.get("writers", {})
    if not isinstance(names_by_writer, dict) or not all(
        isinstance(w, list) for w in names_by_writer.values()
    ):
        raise CheckpointError(f"{path / MANIFEST}: writers must map names to lists of file names")
    _require_listed_files(path, entry_by_name, names_by_writer)
    # A manifest of format 1 has no digest of its entries.
    if (
        manifest.get("format") != 1 or MANIFEST_DIGEST in manifest
    ) and manifest_text != _encode_manifest(manifest):
        raise CheckpointError(f"{path / MANIFEST}: altered since it was written")
    return manifest


def _check_manifest_entry(path: Path, name: str, entry: object) -> None:
    relative_path = PurePosixPath(name)
    is_inside_checkpoint = not relative_path.is_absolute() and ".." not in relative_path.parts
    if not is_inside_checkpoint or not isinstance(entry, dict) or {"sha256", "size"} - set(entry):
        raise CheckpointError(
            f"{path / MANIFEST}: the entry {name!r} is not valid; allowed: a relative path inside "
            "the checkpoint, with sha256 and size"
        )
    file_path = path / name
    if file_path.is_symlink() or not file_path.is_file():
        raise CheckpointError(f"{file_path}: the file is missing or not a plain file")
    if file_path.stat().st_size != entry["size"]:
        raise CheckpointError(
            f"{file_path}: the file has {file_path.stat().st_size} bytes, but {entry['size']} in "
            f"{MANIFEST}"
        )


def is_complete_checkpoint(path: Path) -> bool:
    """Return True if the manifest is valid and all its files exist with the listed sizes.

    The content of the files is not read.
    """
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
