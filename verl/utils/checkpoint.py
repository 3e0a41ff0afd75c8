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

In the background a save goes on beside the run from where the state is copied::

    run      save 20: copy ─▶ iteration 21 ... 30 ─▶ save 30: raise what save 20 raised ─▶ copy ─▶
    thread                └─▶ writes end ─▶ digests ─▶ manifest ─▶ rename
"""

import functools
import json
import logging
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.records import WrittenFiles
from verl.utils.background import BackgroundCall
from verl.utils.files import current_umask, finish_files, flush_to_disk, put_aside
from verl.utils.manifest import (
    STATE,
    CheckpointError,
    looks_whole,
    verify_checkpoint,
    write_state_and_manifest,
)

__all__ = ["CheckpointError", "CheckpointManager", "verify_checkpoint"]

PARTIAL = ".partial-"
PARTIAL_AGE_S = 24 * 3600  # what is unfinished for longer is taken for abandoned, whoever owns it
# For a file of another node to be seen here: network file systems remember for up to a minute that
# there was none.
SEEN_WITHIN_S = 90.0
LOOK_AGAIN_S = 0.5
CLOSE_S = 60.0  # for a save under way when the run ends early

logger = logging.getLogger(__name__)
_STEP_DIR = re.compile(r"global_step_(\d+)")


class CheckpointManager:
    """Saves, finds and retires the checkpoints under ``root``; ``max_to_keep`` None keeps all of
    them.

    ``seen_within_s``: how long a save waits for what other nodes wrote to be seen here.
    ``background``: ``save`` returns when the state is copied; ``wait`` for the last one.
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
        self._under_way: tuple[int, BackgroundCall[None]] | None = None
        self._mode = 0o777 & ~current_umask()

    def save(self, step: int, writer: Callable[[Path], object], state: dict[str, Any]) -> Path:
        """Make ``root/global_step_<step>`` and retire old checkpoints; returns that directory.

        ``writer(directory)`` writes the tensors, or copies them and returns a function that waits
        until they are written; either may return a list that says which process wrote which files.
        ``state`` must be JSON. A checkpoint of the same step is replaced. Raises
        ``CheckpointError`` where a file that was written is not seen here. When anything raises,
        nothing is left behind and the other checkpoints are as they were.

        In the background, what the writer's function and everything after it raises is raised by
        the next call of ``save`` or ``wait``.
        """
        if step < 0:
            raise ValueError(f"step must not be negative, got {step}")
        # Before the writer: a state that is no JSON should cost no time.
        encoded = json.dumps(state, indent=1)
        self.wait()
        self.root.mkdir(parents=True, exist_ok=True)
        self._remove_stale_partials()
        partial = self._new_partial()
        try:
            answer = writer(partial)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
        finish = functools.partial(self._finish, step, partial, encoded, answer)
        if self.background:
            self._under_way = step, BackgroundCall(finish, f"save-{step}")
        else:
            finish()
        return self._place(step)

    def wait(self, timeout_s: float | None = None) -> None:
        """Return when no save is under way; at once where none was begun.

        Raises ``CheckpointError`` where the last one failed or goes on after ``timeout_s``.
        """
        if self._under_way is None:
            return
        step, call = self._under_way
        try:
            call.result(timeout_s)
        except Exception as error:
            self._under_way = None
            raise CheckpointError(f"the save of step {step} failed: {error}") from error
        self._under_way = None

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Give the save under way ``timeout_s`` to end. What goes wrong is logged: who closes has
        an error of his own to raise, or has waited.
        """
        try:
            self.wait(timeout_s)
        except CheckpointError as error:
            logger.warning("%s", error)

    def _place(self, step: int) -> Path:
        return self.root / f"global_step_{step}"

    def _finish(self, step: int, partial: Path, encoded: str, answer: object) -> None:
        """Make a checkpoint of ``partial`` once it is written."""
        final = self._place(step)
        try:
            if callable(answer):
                answer = answer()
            written = answer if isinstance(answer, list) else []
            self._see(partial, written)
            finish_files(partial)
            write_state_and_manifest(partial, step, encoded, written)
            replaced = self._set_aside(final) if final.exists() else None
            os.rename(partial, final)
        except Exception as error:
            # At once: in the background it is raised only when somebody asks.
            logger.error("the save of step %d failed: %s", step, error)
            raise
        finally:
            shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename
        flush_to_disk(self.root)
        if replaced is not None:
            shutil.rmtree(replaced)
        self._retire(step)

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

    def put_aside_after(self, step: int) -> None:
        """Move whole checkpoints of later steps out of the way: the run that wrote them is given
        up, and the newest one is what ``latest_valid`` finds and ``max_to_keep`` keeps.
        """
        later = [path for n, path in self.steps().items() if n > step and looks_whole(path)]
        if not later:
            return
        aside = self.root / "given_up"
        aside.mkdir(exist_ok=True)
        for path in later:
            place = aside / path.name
            if place.exists():
                put_aside(place)
            os.rename(path, place)
        flush_to_disk(self.root)
        names = ", ".join(path.name for path in later)
        logger.warning("of a run that is given up, and now in %s: %s", aside, names)

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
        # mkdtemp makes it private; a checkpoint is as readable as its siblings.
        path.chmod(self._mode)
        return path

    def _retire(self, saved_step: int) -> None:
        """Keep the newest ``max_to_keep`` whole checkpoints and, whatever their number, the newest
        valid one and the one just saved.
        """
        if self.max_to_keep is None:
            return
        steps = self.steps()
        whole = [step for step, path in steps.items() if looks_whole(path)]
        newest = self._newest_valid_step(steps, saved_step)  # another run's, where it is later
        keep = {*whole[-self.max_to_keep :], newest, saved_step}
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
