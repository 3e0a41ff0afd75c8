"""Files and directories that are there whole or not at all."""

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import IO


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """A block whose ``OSError`` names ``path`` where it names no file: a full disk is noticed by
    calls that know a number only.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def put_aside(path: Path) -> Path:
    """Rename ``path`` to the first of ``<stem>.1<suffix>``, ``.2`` ... that is free, and return
    that.
    """
    number = 1
    while (aside := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(aside)


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[str]]:
    """A UTF-8 file to write into; ``path`` holds all of it afterwards, or what it held before if
    this raises.

    Folders above ``path`` are made. Several processes may write the same path: the last one to
    finish wins.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Beside the target: a rename is one step only within a file system.
    partial = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with naming(path), partial.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)  # gone already after the rename


@contextlib.contextmanager
def publish_directory(target: str | Path) -> Iterator[Path]:
    """An empty directory to fill; afterwards it is ``target``, an older one is replaced.

    If this raises, nothing changes.
    """
    target = Path(target)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name}.partial-", dir=target.parent))
    partial.chmod(0o755)
    try:
        yield partial
        _sync_files(partial)
        # Two renames: nothing on POSIX replaces a directory that is not empty in one.
        old = partial.with_name(f"{partial.name}.old")
        if target.exists():
            target.rename(old)
        partial.rename(target)
        shutil.rmtree(old, ignore_errors=True)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # gone already after the rename


def _sync_files(directory: Path) -> None:
    """Make every file of ``directory`` readable by others and hand it to the disk."""
    for file in directory.rglob("*"):
        if file.is_file():
            file.chmod(0o644)
            flush_to_disk(file)


def flush_to_disk(path: Path) -> None:
    """Return when a file's content, or a directory's entries, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
