"""Checkpoint directories that appear only when they are complete.

::

    root/global_step_20/          renamed into place when every byte is on disk
        manifest.json             size and SHA-256 of every other file, and the process that wrote
                                  it; written last
        state.json                the ``state`` argument of ``save``
        ...                       files of the writer (safetensors for tensors, JSON for state)
    root/.partial-<host>-<pid>-*  a running save or removal; after a crash it stays until the next
                                  save removes it

A checkpoint is valid if its manifest lists the files of every process that wrote into it. All files
must have the listed size and digest. Only one driver at a time may save into a root. Any number of
processes may read.

With ``background``, a save continues in a thread after the state is copied::

    run      save 20: copy ─▶ steps 21 ... 30 ─▶ save 30: raise the error of save 20 ─▶ copy ─▶
    thread                └─▶ writes end ─▶ digests ─▶ manifest ─▶ rename
"""

import functools
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import psutil

from verl.names import CHECKPOINT_MANIFEST as MANIFEST
from verl.records import WrittenFiles
from verl.utils.background import BackgroundCall
from verl.utils.files import (
    add_path_to_errors,
    finish_files,
    flush_to_disk,
    read_umask,
    rename_aside,
)

STATE = "state.json"
FORMAT = 2  # of the manifest
MANIFEST_DIGEST = "sha256"  # key of the digest of the manifest's other entries
PARTIAL = ".partial-"
PARTIAL_AGE_S = 24 * 3600  # an unfinished directory of any process is abandoned after this time
# Time until a file of another node is visible here: network file systems cache the absence of a
# file for up to a minute.
SEEN_WITHIN_S = 90.0
POLL_S = 0.5
CLOSE_TIMEOUT_S = 60.0  # time for a running save when the run ends early

logger = logging.getLogger(__name__)
_STEP_DIR = re.compile(r"global_step_(\d+)")


class CheckpointManager:
    """Saves, finds and removes the checkpoints under ``root``, of which the newest are kept.

    ``seen_within_s`` is the longest time (seconds) that a save waits for files of other nodes. With
    ``background``, ``save`` returns when the state is copied, and ``wait`` waits for the last save.
    """

    def __init__(
        self,
        root: str | Path,
        max_to_keep: int | None = None,
        seen_within_s: float = SEEN_WITHIN_S,
        background: bool = False,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1 or None, got {max_to_keep}")
        self.root = Path(root)
        self.max_to_keep = max_to_keep
        self.seen_within_s = seen_within_s
        self.background = background
        self._running_save: tuple[int, BackgroundCall[None]] | None = None
        self._mode = 0o777 & ~read_umask()

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        """Write ``root/global_step_<step>``, remove old checkpoints and return the directory.

        ``writer(directory)`` writes the tensors, or copies them and returns a function that waits
        until they are written. The writer or this function may return a list of ``WrittenFiles``,
        one per process. ``state`` must be JSON. A checkpoint of the same step is replaced. Raises
        ``CheckpointError`` if a written file does not become visible here. After an error no new
        checkpoint exists and the others are unchanged. In the background, errors after the copy are
        raised by the next call of ``save`` or ``wait``.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        # Encode before the writer runs: a state that is not JSON fails without a long write.
        encoded = json.dumps(state, indent=1)
        self.wait()
        self.root.mkdir(parents=True, exist_ok=True)
        for path in self.root.glob(f"{PARTIAL}*"):
            if _is_abandoned(path):
                logger.info("removing %s of a save that did not finish", path)
                shutil.rmtree(path, ignore_errors=True)
        partial_dir = self._make_partial()
        try:
            written_or_waiter = writer(partial_dir)
        except BaseException:
            shutil.rmtree(partial_dir, ignore_errors=True)
            raise
        finish = functools.partial(self._finish_save, step, partial_dir, encoded, written_or_waiter)
        if self.background:
            self._running_save = step, BackgroundCall(finish, f"save-{step}")
        else:
            finish()
        return self._get_step_directory(step)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until no save is running.

        Raises ``CheckpointError`` if the last save failed or is still running after ``timeout_s``.
        """
        if self._running_save is None:
            return
        step, call = self._running_save
        try:
            call.get_result(timeout_s)
        except Exception as error:
            self._running_save = None
            raise CheckpointError(f"the save of step {step} failed: {error}") from error
        self._running_save = None

    def close(self, timeout_s: float = CLOSE_TIMEOUT_S) -> None:
        """Wait up to ``timeout_s`` for a running save and only log its error."""
        try:
            self.wait(timeout_s)
        except CheckpointError as error:
            logger.warning("%s", error)

    def _get_step_directory(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def _finish_save(
        self, step: int, partial: Path, encoded: str, written_or_waiter: object
    ) -> None:
        """Turn ``partial`` into the checkpoint of ``step`` once all its files are written."""
        final = self._get_step_directory(step)
        try:
            if callable(written_or_waiter):
                written_or_waiter = written_or_waiter()
            written_files = written_or_waiter if isinstance(written_or_waiter, list) else []
            self._wait_until_visible(partial, written_files)
            finish_files(partial)
            write_state_and_manifest(partial, step, encoded, written_files)
            replaced = self._set_aside(final) if final.exists() else None
            os.rename(partial, final)
        except Exception as error:
            # Log it at once: a background save raises it only in the next save or wait.
            logger.error("the save of step %d failed: %s", step, error)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # does nothing after the rename
        flush_to_disk(self.root)
        if replaced is not None:
            shutil.rmtree(replaced)
        self._remove_old_checkpoints(step)

    def find_checkpoints(self) -> dict[int, Path]:
        """Return all directories named ``global_step_<n>`` by n, ascending, valid or not."""
        if not self.root.is_dir():
            return {}
        checkpoints: dict[int, Path] = {}
        for entry in self.root.iterdir():
            match = _STEP_DIR.fullmatch(entry.name)
            if match and entry.is_dir():
                checkpoints[int(match[1])] = entry
        return dict(sorted(checkpoints.items()))

    def find_latest_valid(self, after_step: int = -1) -> Path | None:
        """Return the newest valid checkpoint of a step after ``after_step``, or None.

        Logs a warning for each invalid one.
        """
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
        """Move the complete checkpoints of later steps, of an abandoned run, to ``root/given_up``.

        Else ``find_latest_valid`` would return one of them and ``max_to_keep`` would count them.
        """
        later_paths = [
            path for n, path in self.find_checkpoints().items() if n > step and has_all_files(path)
        ]
        if not later_paths:
            return
        aside = self.root / "given_up"
        aside.mkdir(exist_ok=True)
        for path in later_paths:
            new_path = aside / path.name
            if new_path.exists():
                rename_aside(new_path)
            os.rename(path, new_path)
        flush_to_disk(self.root)
        names = ", ".join(path.name for path in later_paths)
        logger.warning("checkpoints of an abandoned run were moved to %s: %s", aside, names)

    def load_state(self, path: str | Path | None = None) -> dict[str, Any]:
        """Return the ``state`` saved in ``path``, or in the newest valid checkpoint.

        Raises ``CheckpointError`` if there is none or ``path`` is not valid.
        """
        if path is None:
            path = self.find_latest_valid()
            if path is None:
                raise CheckpointError(f"no valid checkpoint under {self.root}")
        else:
            verify_checkpoint(path)
        return json.loads((Path(path) / STATE).read_text(encoding="utf-8"))

    def _wait_until_visible(self, directory: Path, written: Sequence[WrittenFiles]) -> None:
        """Wait until all ``written`` files are visible here with their sizes.

        Raises ``CheckpointError`` if one is not visible after ``seen_within_s``.
        """
        deadline = time.monotonic() + self.seen_within_s
        while unseen := list(_find_invisible_files(written)):
            if time.monotonic() > deadline:
                writer, path = unseen[0]
                raise CheckpointError(
                    f"{len(unseen)} files of the checkpoint are not visible to the driver on "
                    f"{socket.gethostname()} after {self.seen_within_s:g} s, the first of them "
                    f"{path}, which {writer} wrote: {self.root} is not on storage that all nodes "
                    "of the run share; fix: trainer.default_local_dir=DIR, an absolute path of a "
                    "directory that all nodes share"
                )
            time.sleep(min(POLL_S, self.seen_within_s))
            os.listdir(directory)  # makes a network file system refresh its cache

    def _make_partial(self) -> Path:
        owner = f"{socket.gethostname()}-{os.getpid()}"
        path = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{owner}-", dir=self.root))
        # mkdtemp creates a private directory. A checkpoint has the user's usual permissions.
        path.chmod(self._mode)
        return path

    def _remove_old_checkpoints(self, saved_step: int) -> None:
        """Remove all but the newest ``max_to_keep`` complete checkpoints.

        The newest valid checkpoint and the one just saved always stay.
        """
        if self.max_to_keep is None:
            return
        steps = self.find_checkpoints()
        complete_steps = [step for step, path in steps.items() if has_all_files(path)]
        keep = {*complete_steps[-self.max_to_keep :], saved_step}
        newer = self.find_latest_valid(after_step=saved_step)  # of another run
        keep |= {step for step, path in steps.items() if path == newer}
        for step, path in steps.items():
            # An incomplete checkpoint newer than all kept ones stays for inspection.
            if step not in keep and (step in complete_steps or step < min(keep)):
                shutil.rmtree(self._set_aside(path))

    def _set_aside(self, path: Path) -> Path:
        # Rename before removal: an interrupted removal must not leave an incomplete directory with
        # a checkpoint's name.
        aside = self._make_partial()
        os.rename(path, aside / path.name)
        flush_to_disk(self.root)
        return aside


def _find_invisible_files(written: Sequence[WrittenFiles]) -> Iterator[tuple[str, str]]:
    """Yield writer and path of every file that is not visible here with its written size."""
    for rank_files in written:
        for path, size in rank_files.sizes.items():
            try:
                visible_size = os.stat(path).st_size
            except OSError:
                visible_size = None
            if visible_size != size:
                yield rank_files.writer, path


def _is_abandoned(path: Path) -> bool:
    owner = re.fullmatch(rf"{re.escape(PARTIAL)}(.+)-(\d+)-[^-]+", path.name)
    if time.time() - path.stat().st_mtime > PARTIAL_AGE_S:
        return True
    if owner is None or owner[1] != socket.gethostname():
        return False
    pid = int(owner[2])
    if pid == os.getpid():
        return True  # saves do not overlap, so it is from an earlier save of this process
    return not psutil.pid_exists(pid)


# ---- manifest ----------------------------------------------------------------------------------


class CheckpointError(RuntimeError):
    """A checkpoint is missing, incomplete or altered; the message names the file and the fault."""


def verify_checkpoint(path: str | Path) -> dict[str, Any]:
    """Check all files of a checkpoint and return its manifest.

    Raises ``CheckpointError`` for the first listed file that is missing or differs.
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
    """Raise ``CheckpointError`` unless ``files`` has all files that ``writers`` lists."""
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
