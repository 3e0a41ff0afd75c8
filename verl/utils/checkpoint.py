"""Checkpoint directories that are either whole or not there.

::

    root/global_step_20/          renamed into place when every byte is on disk
        manifest.json             size and SHA-256 of every other file, and which process wrote
                                  which; written last
        state.json                what the caller passed as ``state``
        ...                       what the writer wrote (safetensors for tensors, JSON for state)
    root/.partial-<host>-<pid>-*  a save or a removal under way; left behind only by a crash,
                                  removed by the next save

A checkpoint counts as valid when its manifest names the files of every process that wrote into it,
and all of them are there with the size and the digest it names. One driver saves into a root at a
time; any number of processes may read.
"""

import hashlib
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from verl.names import CHECKPOINT_MANIFEST as MANIFEST
from verl.records import WrittenFiles
from verl.utils.files import flush_to_disk

__all__ = ["CheckpointError", "CheckpointManager", "verify_checkpoint"]

STATE = "state.json"
PARTIAL = ".partial-"
PARTIAL_AGE_S = 24 * 3600  # what is unfinished for longer is taken for abandoned, whoever owns it
# For a file of another node to be seen here: network file systems remember for up to a minute that
# there was none.
SEEN_WITHIN_S = 90.0
LOOK_AGAIN_S = 0.5

logger = logging.getLogger(__name__)
_STEP_DIR = re.compile(r"global_step_(\d+)")


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


class CheckpointManager:
    """Saves, finds and retires the checkpoints under ``root``; ``max_to_keep`` None keeps all of
    them.

    ``seen_within_s``: how long a save waits for what other nodes wrote to be seen here.
    """

    def __init__(
        self,
        root: str | Path,
        max_to_keep: int | None = None,
        seen_within_s: float = SEEN_WITHIN_S,
    ) -> None:
        if max_to_keep is not None and max_to_keep < 1:
            raise ValueError(f"max_to_keep must be at least 1 or None, got {max_to_keep}")
        self.root = Path(root)
        self.max_to_keep = max_to_keep
        self.seen_within_s = seen_within_s

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        """Make ``root/global_step_<step>`` and retire old checkpoints; returns the new directory.

        ``writer(directory)`` writes the tensors, and may return a list that says which process
        wrote which files; ``state`` must be JSON. A checkpoint of the same step is replaced. Raises
        ``CheckpointError`` where a file that was written is not seen here. When anything raises,
        nothing is left behind and the other checkpoints are as they were.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        # Before the writer: a state that is no JSON should cost no time.
        encoded = json.dumps(state, indent=1)
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_stale_partials()
        final = self.root / f"global_step_{step}"
        partial = self._new_partial()
        try:
            answer = writer(partial)
            written = answer if isinstance(answer, list) else []
            self._see(partial, written)
            _write_state_and_manifest(partial, step, encoded, written)
            replaced = self._set_aside(final) if final.exists() else None
            os.rename(partial, final)
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename
        flush_to_disk(self.root)
        if replaced is not None:
            shutil.rmtree(replaced)
        self._retire(step)
        return final

    def steps(self) -> dict[int, Path]:
        """Step → directory of everything that bears a checkpoint's name, valid or not, in ascending
        order.
        """
        if not self.root.is_dir():
            return {}
        found: dict[int, Path] = {}
        for entry in self.root.iterdir():
            match = _STEP_DIR.fullmatch(entry.name)
            if match and entry.is_dir():
                found[int(match[1])] = entry
        return dict(sorted(found.items()))

    def latest_valid(self) -> Path | None:
        """The newest checkpoint that verifies, or None; a warning names each one passed over."""
        for path in reversed(self.steps().values()):
            try:
                verify_checkpoint(path)
            except CheckpointError as error:
                logger.warning("checkpoint passed over: %s", error)
            else:
                return path
        return None

    def load_state(self, path: str | Path | None = None) -> dict[str, Any]:
        """The ``state`` saved in ``path`` (verified first), or in the newest valid checkpoint.

        Raises ``CheckpointError`` when ``path`` does not verify or there is no valid checkpoint.
        """
        if path is None:
            path = self.latest_valid()
            if path is None:
                raise CheckpointError(f"no valid checkpoint under {self.root}")
        else:
            verify_checkpoint(path)
        return json.loads((Path(path) / STATE).read_text(encoding="utf-8"))

    def _see(self, directory: Path, written: Sequence[WrittenFiles]) -> None:
        """Wait until all that was ``written`` is seen here, whole; raise where it is not."""
        deadline = time.monotonic() + self.seen_within_s
        while unseen := list(_unseen(written)):
            if time.monotonic() > deadline:
                writer, path = unseen[0]
                raise CheckpointError(
                    f"{len(unseen)} files of the checkpoint are not seen by the driver on "
                    f"{socket.gethostname()} after {self.seen_within_s:g} s, the first of them "
                    f"{path}, which {writer} wrote: {self.root} is not on storage that all nodes "
                    "of the run share; fix: trainer.default_local_dir=DIR, an absolute path that "
                    "leads to the same directory on every node"
                )
            time.sleep(min(LOOK_AGAIN_S, self.seen_within_s))
            os.listdir(directory)  # a network file system asks its server again

    def _new_partial(self) -> Path:
        owner = f"{socket.gethostname()}-{os.getpid()}"
        path = Path(tempfile.mkdtemp(prefix=f"{PARTIAL}{owner}-", dir=self.root))
        # mkdtemp makes it private; a checkpoint is as readable as its siblings. The umask can only
        # be read by setting it.
        umask = os.umask(0)
        os.umask(umask)
        path.chmod(0o777 & ~umask)
        return path

    def _retire(self, saved_step: int) -> None:
        """Keep the newest ``max_to_keep`` whole checkpoints and, whatever their number, the newest
        valid one.
        """
        if self.max_to_keep is None:
            return
        steps = self.steps()
        whole = [step for step, path in steps.items() if _looks_whole(path)]
        keep = {*whole[-self.max_to_keep :], self._newest_valid_step(steps, saved_step)}
        for step, path in steps.items():
            # a torn one newer than all that is kept stays for inspection
            if step not in keep and (step in whole or step < min(keep)):
                shutil.rmtree(self._set_aside(path))

    def _newest_valid_step(self, steps: dict[int, Path], saved_step: int) -> int:
        for step in sorted((s for s in steps if s > saved_step), reverse=True):
            try:
                verify_checkpoint(steps[step])
            except CheckpointError as error:
                logger.warning("checkpoint newer than step %d is not valid: %s", saved_step, error)
            else:
                return step
        return saved_step

    def _set_aside(self, path: Path) -> Path:
        # before its removal: one that is cut short must not leave a torn directory under a
        # checkpoint's name
        aside = self._new_partial()
        os.rename(path, aside / path.name)
        flush_to_disk(self.root)
        return aside

    def _remove_stale_partials(self) -> None:
        for path in self.root.glob(f"{PARTIAL}*"):
            if _is_abandoned(path):
                logger.info("removing %s, left by a save that did not finish", path)
                shutil.rmtree(path, ignore_errors=True)


def _unseen(written: Sequence[WrittenFiles]) -> Iterator[tuple[str, str]]:
    """Writer and path of every file that is not here with the size it was written with."""
    for part in written:
        for path, size in part.sizes.items():
            try:
                here = os.stat(path).st_size
            except OSError:
                here = None
            if here != size:
                yield part.writer, path


def _write_state_and_manifest(
    directory: Path, step: int, encoded_state: str, written: Sequence[WrittenFiles]
) -> None:
    for reserved in (STATE, MANIFEST):
        if (directory / reserved).exists():
            raise CheckpointError(
                f"the writer made {reserved}, a name the checkpoint needs for itself"
            )
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
    manifest = {"format": 1, "step": step, "files": files, "writers": writers}
    _check_writers(directory, files, writers)
    (directory / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    flush_to_disk(directory / MANIFEST)
    flush_to_disk(directory)


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
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path / MANIFEST}: cannot be read: {error}") from error
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or STATE not in files:
        raise CheckpointError(f"{path / MANIFEST}: not a manifest")
    for name, entry in files.items():
        _check_entry(path, name, entry)
    _check_writers(path, files, manifest.get("writers", {}))
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


def _looks_whole(path: Path) -> bool:
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


def _is_abandoned(path: Path) -> bool:
    owner = re.fullmatch(rf"{re.escape(PARTIAL)}(.+)-(\d+)-[^-]+", path.name)
    if time.time() - path.stat().st_mtime > PARTIAL_AGE_S:
        return True
    if owner is None or owner[1] != socket.gethostname():
        return False
    pid = int(owner[2])
    if pid == os.getpid():
        return True  # saves do not overlap, so an earlier one of this process left it
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    # There is such a process; it belongs to somebody else.
    except PermissionError:
        return False
    return False
