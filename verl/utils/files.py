"""Files and directories that are there whole or not at all."""

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

MARKER = ".published.json"  # in a published directory: its files, as they were written
WRITTEN_HERE = "<!-- written by rlvcr, which may replace this file -->"  # ends a page
HASHED = 16 * 2**20  # bytes up to which a file's content is compared; above, its size alone
AT_FDCWD, RENAME_EXCHANGE = -100, 2


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


def write_page(path: Path, text: str, key: str) -> None:
    """Write HTML or SVG ``text`` to ``path``, which the option ``key`` names.

    Raises ``ConfigError`` if ``path`` holds anything that was not written here.
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
            f"file, or one that it wrote; fix: {key} FILE, or remove the file"
        )
    with atomic_write(path) as file:
        file.write(f"{text.rstrip()}\n{WRITTEN_HERE}\n")


def require_replaceable(target: Path, key: str, overwrite: bool, keep: Iterable[Path] = ()) -> None:
    """Raise ``ConfigError`` unless the directory ``target``, which ``key`` names, may be replaced.

    It may where it is missing, empty or as ``publish_directory`` left it, or with ``overwrite``.
    ``keep``: directories that are never replaced; home and the working directory are two more.
    """
    with _alone_in(target.parent):
        _require_replaceable(target, key, overwrite, keep)


@contextlib.contextmanager
def _alone_in(directory: Path) -> Iterator[None]:
    """A block during which no other process puts a published directory into ``directory``."""
    if not directory.is_dir():
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # a disk without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_replaceable(target: Path, key: str, overwrite: bool, keep: Iterable[Path]) -> None:
    said = f"{key}={str(target)!r}"
    allowed = "allowed: a new or empty directory, or one that this command wrote"
    if target.is_symlink():
        raise ConfigError(f"{said}: is a symbolic link; {allowed}; fix: {key}={target.resolve()!s}")
    if target.exists() and not target.is_dir():
        raise ConfigError(f"{said}: is a file; {allowed}; fix: {key}=DIR")
    place = target.expanduser().resolve()
    for kept in (Path.home(), Path.cwd(), *keep):
        if kept.resolve().is_relative_to(place):
            raise ConfigError(f"{said}: holds {kept}, which must stay; {allowed}; fix: {key}=DIR")
    foreign = "" if overwrite or not target.is_dir() else _foreign_file(target)
    if foreign:
        raise ConfigError(
            f"{said}: holds {foreign}, which this command did not write; {allowed}; "
            f"fix: {key}=DIR, or overwrite=true to delete what is there"
        )


def require_new_file(target: Path, key: str, overwrite: bool, fix: str = "overwrite=true") -> None:
    """Raise ``ConfigError`` where the file ``target``, which ``key`` names, would replace another
    and ``overwrite`` is false, or is no plain file.
    """
    try:
        status = target.stat()
    except OSError:  # it is not there, or no file can be: said where it is made
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


def _foreign_file(directory: Path) -> str:
    """Name of a file of ``directory`` that is not as ``publish_directory`` wrote it, or empty."""
    try:
        written = json.loads((directory / MARKER).read_text(encoding="utf-8"))["files"]
    except (OSError, ValueError, KeyError, TypeError):
        written = {}
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name == MARKER or (path.is_dir() and not path.is_symlink()):
            continue
        if not isinstance(written, dict) or written.get(name) != _fingerprint(path):
            return name
    return ""


def _fingerprint(path: Path) -> str:
    """Size of a file and, where it is small, its digest: someone may have edited it."""
    if path.is_symlink() or not path.is_file():
        return ""
    try:
        size = path.stat().st_size
        digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= HASHED else ""
    except OSError:
        return ""
    return f"{size} {digest}"


@contextlib.contextmanager
def publish_directory(target: str | Path, overwrite: bool = False) -> Iterator[Path]:
    """Yield an empty directory to fill; afterwards it is ``target``, an older one is replaced.

    If this raises, nothing changes. Raises ``ConfigError`` for a ``target`` with files that were
    not published here, unless ``overwrite``. A reader beside several writers always finds one
    whole version (on Linux; elsewhere ``target`` is missing for a moment while it is replaced).
    """
    target = Path(target)
    require_replaceable(target, "target", overwrite)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{target.name[:200]}.partial-", dir=target.parent))
    partial.chmod(0o777 & ~current_umask())
    try:
        yield partial
        finish_files(partial)
        files = [path for path in sorted(partial.rglob("*")) if path.is_file()]
        written = {path.relative_to(partial).as_posix(): _fingerprint(path) for path in files}
        (partial / MARKER).write_text(json.dumps({"files": written}, indent=1), encoding="utf-8")
        flush_to_disk(partial / MARKER)
        _put_in_place(partial, target, overwrite)
        flush_to_disk(target.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # the older version, after the exchange


def _put_in_place(partial: Path, target: Path, overwrite: bool) -> None:
    """Rename ``partial`` to ``target``; what was there is at ``partial`` afterwards."""
    with _alone_in(target.parent):
        # Again: files may have been added while this was written.
        _require_replaceable(target, "target", overwrite, ())
        if not target.exists() or not any(target.iterdir()):
            partial.rename(target)  # takes the place of an empty directory
        elif not _exchange(partial, target):
            old = partial.with_name(f"{partial.name}.old")
            target.rename(old)
            partial.rename(target)
            old.rename(partial)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two directories in one step; false where the system or its disk cannot."""
    call = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if call is None:
        return False
    if call(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(code, os.strerror(code), str(other))


def current_umask() -> int:
    """Return the umask of this process."""
    with contextlib.suppress(OSError, StopIteration, ValueError):
        lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in lines if line.startswith("Umask:")).split()[1], 8)
    # Elsewhere it is read by setting it, which another thread may notice.
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def finish_files(directory: Path) -> None:
    """Give every file of ``directory`` the user's usual permissions and flush it to the disk: some
    libraries write through private temporary files.
    """
    umask = current_umask()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)
            flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Return when a file's content, or a directory's entries, would survive a loss of power."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
