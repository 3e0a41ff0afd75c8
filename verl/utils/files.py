"""Atomic writing of files and directories, and rules for their replacement."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import os
import shutil
import stat
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import IO

from verl.config.settings.errors import ConfigError

MARKER = ".published.json"  # lists the files of a published directory with size and digest
WRITTEN_HERE = "<!-- written by rlvcr, which may replace this file -->"  # last line of a page
MAX_HASHED_BYTES = 16 * 2**20  # bytes; the content of larger files is not compared, only their size
AT_FDCWD, RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Set ``path`` in an ``OSError`` of the block without a file name, as of a full disk."""
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def rename_with_number(path: Path) -> Path:
    """Rename ``path`` to ``<stem>.<n><suffix>`` with the lowest free n from 1; return that path."""
    copy_number = 1
    while (aside := path.with_name(f"{path.stem}.{copy_number}{path.suffix}")).exists():
        copy_number += 1
    return path.rename(aside)


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[IO[str]]:
    """Yield a UTF-8 file to write into, which replaces ``path`` at the end of the block.

    If the block raises, ``path`` is unchanged. Parent directories are created.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    # In the directory of the target: a rename is atomic only within a file system.
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        with add_path_to_errors(path), partial_path.open("w", encoding="utf-8") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)  # does nothing after the rename


def write_page(path: Path, text: str, key: str) -> None:
    """Write HTML or SVG ``text`` to ``path``, the value of the option ``key``.

    Raises ``ConfigError`` if ``path`` has content that this function did not write.
    """
    try:
        is_foreign = path.stat().st_size > 0 and not path.read_bytes().rstrip().endswith(
            WRITTEN_HERE.encode()
        )
    except FileNotFoundError:
        is_foreign = False
    if is_foreign:
        raise ConfigError(
            f"{key}={str(path)!r}: exists and was not written by this command; allowed: a new "
            f"file, or a file that this command wrote; fix: {key} FILE, or remove the file"
        )
    with atomic_write(path) as file:
        file.write(f"{text.rstrip()}\n{WRITTEN_HERE}\n")


def require_replaceable(target: Path, key: str, overwrite: bool, keep: Iterable[Path] = ()) -> None:
    """Raise ``ConfigError`` unless the directory ``target``, the value of ``key``, is replaceable.

    It is if it is missing, empty or unchanged since ``publish_directory`` wrote it, or with
    ``overwrite``. ``keep``, the home directory and the working directory are never replaced.
    """
    with _lock_directory(target.parent):
        _require_replaceable(target, key, overwrite, keep)


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Hold a lock on ``directory``, so that other processes cannot publish there meanwhile."""
    if not directory.is_dir():
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_replaceable(target: Path, key: str, overwrite: bool, keep: Iterable[Path]) -> None:
    setting = f"{key}={str(target)!r}"
    allowed = "allowed: a new or empty directory, or one that this command wrote"
    if target.is_symlink():
        raise ConfigError(
            f"{setting}: is a symbolic link; {allowed}; fix: {key}={target.resolve()!s}"
        )
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{setting}: is a file; {allowed}; fix: {key}=DIR")
    resolved_target = target.expanduser().resolve()
    for folder in (Path.home(), Path.cwd(), *keep):
        if folder.resolve().is_relative_to(resolved_target):
            raise ConfigError(
                f"{setting}: contains {folder}, which is never replaced; {allowed}; fix: {key}=DIR"
            )
    foreign = "" if overwrite or not target.is_dir() else _find_foreign_file(target)
    if foreign:
        raise ConfigError(
            f"{setting}: contains {foreign}, which this command did not write; {allowed}; "
            f"fix: {key}=DIR, or overwrite=true to delete the content"
        )


def require_new_file(target: Path, key: str, overwrite: bool, fix: str = "overwrite=true") -> None:
    """Raise ``ConfigError`` if ``target`` is a directory, or has content without ``overwrite``."""
    try:
        status = target.stat()
    except OSError:  # it does not exist, or the later write will raise
        return
    if stat.S_ISDIR(status.st_mode):
        raise ConfigError(
            f"{key}={str(target)!r}: is a directory; allowed: a file; fix: {key}=FILE"
        )
    if status.st_size and not overwrite:
        raise ConfigError(
            f"{key}={str(target)!r}: exists already; allowed: a new file; "
            f"fix: {key}=FILE, or {fix} to replace it"
        )


def _find_foreign_file(directory: Path) -> str:
    """Return the name of a file that is new or changed since ``publish_directory``, "" if none."""
    try:
        known_files = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        known_files = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name == MARKER or (path.is_dir() and not path.is_symlink()):
            continue
        if not isinstance(known_files, dict) or known_files.get(name) != _compute_fingerprint(path):
            return name
    return ""


def _compute_fingerprint(path: Path) -> str:
    """Return size and, up to ``MAX_HASHED_BYTES``, digest of a file; empty if it is unreadable."""
    if path.is_symlink() or not path.is_file():
        return ""
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= MAX_HASHED_BYTES else ""
    except OSError:
        return ""
    return f"{size} {digest}"


@contextlib.contextmanager
def publish_directory(target: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory to fill, which replaces ``target`` at the end of the block.

    If the block raises, nothing changes. Raises ``ConfigError`` for a ``target`` with files that
    this function did not write, unless ``overwrite``. Readers always see one complete version, also
    with several writers. Without ``renameat2`` (Linux) ``target`` is missing for a moment.
    """
    target = Path(target)
    require_replaceable(target, "target", overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial_dir = Path(tempfile.mkdtemp(prefix=f".{target.name[:200]}.partial-", dir=target.parent))
    partial_dir.chmod(0o777 & ~read_umask())
    try:
        yield partial_dir
        set_permissions_and_flush(partial_dir)
        files = [path for path in sorted(partial_dir.rglob("*")) if path.is_file()]
        hashes = {
            path.relative_to(partial_dir).as_posix(): _compute_fingerprint(path) for path in files
        }
        (partial_dir / MARKER).write_text(json.dumps({"files": hashes}, indent=1), encoding="utf-8")
        flush_to_disk(partial_dir / MARKER)
        _put_in_place(partial_dir, target, overwrite)
        flush_to_disk(target.parent)
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)  # the older version, after the exchange


def _put_in_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename ``partial`` to ``target``, and an older ``target`` to ``partial``."""
    with _lock_directory(target.parent):
        # Check again: files may have been added in the meantime.
        _require_replaceable(target, "target", overwrite, ())
        if not target.exists() or not any(target.iterdir()):
            partial.rename(target)  # replaces an empty directory
        elif not _exchange_directories(partial, target):
            old_target = partial.with_name(f"{partial.name}.old")
            target.rename(old_target)
            partial.rename(target)
            old_target.rename(partial)


def _exchange_directories(one: Path, other: Path) -> bool:
    """Exchange two directories atomically; return false if the system does not support it."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def read_umask() -> int:
    """Return the umask of this process."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    # Without /proc it can only be read by setting it, which affects other threads for a moment.
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def set_permissions_and_flush(directory: Path) -> None:
    """Give all files in ``directory`` the user's usual permissions and flush them to the disk."""
    umask = read_umask()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)
            flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Flush a file's content, or a directory's entries, to the disk (``fsync``)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with add_path_to_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
