"""Atomic writing of files and directories, and rules for their replacement."""

import contextlib
import ctypes
import errno
import fcntl
import hashlib
import json
import logging
import os
import re
import shutil
import socket
import stat
import tempfile
import time
from collections.abc import Iterable, Iterator
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import psutil
import yaml

from verl.config.settings.errors import ConfigError

# File in each published directory that lists the other files with size and digest.
FILE_LIST_NAME = ".published.json"
# Last line of a page that ``write_html_or_svg`` wrote.
PAGE_SIGNATURE = "<!-- written by rlvcr, which may replace this file -->"
MAX_HASHED_BYTES = 16 * 2**20  # larger files are compared by size only, not by content
MAX_PARTIAL_AGE_S = 24 * 3600  # older unfinished directories of all hosts are removed
AT_FDCWD, RENAME_EXCHANGE = -100, 2  # constants of the system call renameat2

logger = logging.getLogger(__name__)


def read_yaml_table(module_file: str, name: str) -> Any:
    """Return the content of the YAML file ``name`` in the directory of ``module_file``."""
    return yaml.safe_load(Path(module_file).with_name(name).read_text(encoding="utf-8"))


@contextlib.contextmanager
def add_path_to_errors(path: Path) -> Iterator[None]:
    """Set the file name of an ``OSError`` that the ``with`` block raises, if it has none.

    Errors of a full disk, for example, have no file name.
    """
    try:
        yield
    except OSError as error:
        if error.errno is not None and error.filename is None:
            error.filename = str(path)
        raise


def rename_with_number(path: Path) -> Path:
    """Rename ``path`` to ``<stem>.<n><suffix>`` with the lowest unused n; return the new path."""
    number = 1
    while (new_path := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return path.rename(new_path)


@contextlib.contextmanager
def atomic_write(path: str | Path) -> Iterator[TextIOWrapper]:
    """Yield a new UTF-8 text file, which replaces ``path`` at the end of the ``with`` block.

    If the block raises, ``path`` is unchanged. Parent directories are created. Raises ``OSError``
    if ``path`` is a device, a pipe or a directory: a rename would delete it.
    """
    with (
        replace_atomically(path) as partial_path,
        add_path_to_errors(Path(path)),
        partial_path.open("w", encoding="utf-8") as file,
    ):
        yield file
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def replace_atomically(path: str | Path) -> Iterator[Path]:
    """Yield the path of a file to write, which replaces ``path`` as in ``atomic_write``."""
    path = Path(path)
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "is not a regular file", str(path))
    path.parent.mkdir(parents=True, exist_ok=True)
    partial_path = path.with_name(f".{path.name}.{os.getpid()}.partial")
    try:
        yield partial_path
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)  # no effect if it has been renamed


def write_html_or_svg(path: Path, text: str, key: str) -> None:
    """Write HTML or SVG ``text`` to ``path``. Error messages name the option ``key``.

    Raises ``ConfigError`` if ``path`` has content that this function did not write.
    """
    try:
        old_content = path.read_bytes()
    except FileNotFoundError:
        old_content = b""
    if old_content and not old_content.rstrip().endswith(PAGE_SIGNATURE.encode()):
        raise ConfigError(
            f"{key}={str(path)!r}: exists and was not written by this command; allowed: a new "
            f"file, or a file that this command wrote; fix: {key} FILE, or remove the file",
            "file_exists",
        )
    with atomic_write(path) as file:
        file.write(f"{text.rstrip()}\n{PAGE_SIGNATURE}\n")


def require_replaceable_directory(
    target: Path,
    key: str,
    overwrite: bool,
    protected_paths: Iterable[Path] = (),
    command: str = "",
) -> None:
    """Raise ``ConfigError`` unless the directory ``target`` may be replaced.

    It may be replaced if it does not exist, is empty, or is unchanged since ``publish_directory``
    wrote it for the same ``command``. With ``overwrite`` other content may be replaced too. A
    directory that contains a path of ``protected_paths``, the home directory or the working
    directory is never replaced. Error messages name the config key ``key``.
    """
    with _lock_directory(target.parent):
        _require_replaceable(target, key, overwrite, protected_paths, command)


@contextlib.contextmanager
def _lock_directory(directory: Path) -> Iterator[None]:
    """Lock ``directory`` during the ``with`` block, so that no other process publishes into it."""
    if not directory.is_dir():
        yield
        return
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        with contextlib.suppress(OSError):  # continue without lock if the file system has no locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _require_replaceable(
    target: Path, key: str, overwrite: bool, protected_paths: Iterable[Path], command: str
) -> None:
    setting_text = f"{key}={str(target)!r}"
    allowed_text = "allowed: a new or empty directory, or one that this command wrote"
    if target.is_symlink():
        message = (
            f"{setting_text}: is a symbolic link; {allowed_text}; fix: {key}={target.resolve()!s}"
        )
        raise ConfigError(message, "file_exists")
    if target.exists() and not target.is_dir():
        raise ConfigError(
            f"{setting_text}: is a file; {allowed_text}; fix: {key}=DIR", "file_exists"
        )
    resolved_target = target.expanduser().resolve()
    for folder in (Path.home(), Path.cwd(), *protected_paths):
        if folder.resolve().is_relative_to(resolved_target):
            raise ConfigError(
                f"{setting_text}: contains {folder}, which is never replaced; {allowed_text}; "
                f"fix: {key}=DIR",
                "file_exists",
            )
    foreign_file = "" if overwrite or not target.is_dir() else _find_foreign_file(target, command)
    if foreign_file:
        raise ConfigError(
            f"{setting_text}: contains {foreign_file}, which this command did not write; "
            f"{allowed_text}; fix: {key}=DIR, or overwrite=true to delete the content",
            "file_exists",
        )


def require_new_file(target: Path, key: str, overwrite: bool, fix: str) -> None:
    """Raise ``ConfigError`` if ``target`` is no regular file, or has content without ``overwrite``.

    Error messages name the config key ``key`` and suggest ``fix``.
    """
    try:
        file_status = target.stat()
    except OSError:  # usually ``target`` is new; any other fault is reported when it is written
        return
    if not stat.S_ISREG(file_status.st_mode):
        file_kind = "a directory" if stat.S_ISDIR(file_status.st_mode) else "a device or a pipe"
        message = f"{key}={str(target)!r}: is {file_kind}; allowed: a file; fix: {key}=FILE"
        raise ConfigError(message, "file_exists")
    if file_status.st_size and not overwrite:
        raise ConfigError(
            f"{key}={str(target)!r}: exists already; allowed: a new file; "
            f"fix: {key}=FILE, or {fix} to replace it",
            "file_exists",
        )


def _find_foreign_file(directory: Path, command: str) -> str:
    """Return the name of a file that ``command`` did not publish, or "" if there is none.

    A file that was changed after ``publish_directory`` also counts.
    """
    fingerprint_by_name = {}
    with contextlib.suppress(OSError, ValueError, KeyError, TypeError):
        file_list = json.loads((directory / FILE_LIST_NAME).read_text(encoding="utf-8"))
        # Lists of earlier versions name no command.
        if file_list.get("command", command) == command:
            fingerprint_by_name = dict(file_list["files"])
    for path in sorted(directory.rglob("*")):
        name = path.relative_to(directory).as_posix()
        if name == FILE_LIST_NAME or (path.is_dir() and not path.is_symlink()):
            continue
        fingerprint = fingerprint_by_name.get(name)
        if fingerprint is None or fingerprint != _compute_fingerprint(path):
            return name
    return ""


def _compute_fingerprint(path: Path) -> str:
    """Return a text with size and SHA-256 digest of a file; "" for a link or a missing file.

    The digest is omitted for files of more than ``MAX_HASHED_BYTES``.
    """
    if path.is_symlink() or not path.is_file():
        return ""
    size = path.stat().st_size
    digest = hashlib.sha256(path.read_bytes()).hexdigest() if size <= MAX_HASHED_BYTES else ""
    return f"{size} {digest}"


@contextlib.contextmanager
def publish_directory(
    target: str | Path, overwrite: bool = False, command: str = ""
) -> Iterator[Path]:
    """Yield an empty directory, which replaces ``target`` at the end of the ``with`` block.

    If the block raises, ``target`` is unchanged. Raises ``ConfigError`` if ``target`` has files
    that this function did not write for ``command``, unless ``overwrite`` is set. Readers always
    see a complete version, even if several processes publish. On systems without ``renameat2``
    (only Linux has it), ``target`` does not exist for a moment.
    """
    target = Path(target)
    require_replaceable_directory(target, "target", overwrite, command=command)
    target.parent.mkdir(parents=True, exist_ok=True)
    prefix = f".{target.name[:150]}.partial-"
    remove_abandoned_directories(target.parent, prefix, keeps_this_process=True)
    partial_dir = make_partial_directory(target.parent, prefix)
    try:
        yield partial_dir
        set_permissions_and_flush(partial_dir)
        files = [path for path in sorted(partial_dir.rglob("*")) if path.is_file()]
        fingerprint_by_name = {
            path.relative_to(partial_dir).as_posix(): _compute_fingerprint(path) for path in files
        }
        (partial_dir / FILE_LIST_NAME).write_text(
            json.dumps({"command": command, "files": fingerprint_by_name}, indent=1),
            encoding="utf-8",
        )
        flush_to_disk(partial_dir / FILE_LIST_NAME)
        _replace_directory(partial_dir, target, overwrite, command)
        flush_to_disk(target.parent)
    finally:
        shutil.rmtree(partial_dir, ignore_errors=True)


def _replace_directory(partial_dir: Path, target: Path, overwrite: bool, command: str) -> None:
    """Rename ``partial_dir`` to ``target``, and a previous ``target`` to ``partial_dir``."""
    with _lock_directory(target.parent):
        # Check again, now with the lock: files may have been added since the first check.
        _require_replaceable(target, "target", overwrite, (), command)
        if not target.exists() or not any(target.iterdir()):
            partial_dir.rename(target)  # rename() also replaces an empty directory
        elif not _exchange_directories(partial_dir, target):
            old_target = partial_dir.with_name(f"{partial_dir.name}.old")
            target.rename(old_target)
            partial_dir.rename(target)
            old_target.rename(partial_dir)


def _exchange_directories(first: Path, second: Path) -> bool:
    """Exchange two directories atomically. Return False if the system does not support it."""
    renameat2 = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if renameat2 is None:
        return False
    if renameat2(AT_FDCWD, os.fsencode(first), AT_FDCWD, os.fsencode(second), RENAME_EXCHANGE) == 0:
        return True
    error_number = ctypes.get_errno()
    if error_number in (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP):
        return False
    raise OSError(error_number, os.strerror(error_number), str(second))


def make_partial_directory(parent: Path, prefix: str) -> Path:
    """Create a directory ``<prefix><host>-<pid>-*`` in ``parent``, with the usual permissions."""
    host_and_pid = f"{socket.gethostname()}-{os.getpid()}"
    path = Path(tempfile.mkdtemp(prefix=f"{prefix}{host_and_pid}-", dir=parent))
    path.chmod(0o777 & ~_read_umask())  # mkdtemp lets only the owner read the directory
    return path


def remove_abandoned_directories(
    parent: Path, prefix: str, keeps_this_process: bool = False
) -> None:
    """Remove directories that ``make_partial_directory`` made in processes that have ended.

    Directories with the number of this process are also removed: an earlier process in the same
    container may have had this number. ``keeps_this_process`` keeps them for other threads.
    """
    for path in parent.iterdir():
        suffix = path.name.removeprefix(prefix)
        is_of_this_process = suffix.startswith(f"{socket.gethostname()}-{os.getpid()}-")
        if suffix == path.name or (is_of_this_process and keeps_this_process):
            continue
        if is_of_this_process or _is_abandoned(path, suffix):
            logger.info("removing %s, which was not finished", path)
            shutil.rmtree(path, ignore_errors=True)


def _is_abandoned(path: Path, suffix: str) -> bool:
    name_match = re.fullmatch(r"(.+)-(\d+)-[^-]+", suffix)  # host, process, random letters
    if name_match is None:
        return False  # another program made it
    with contextlib.suppress(FileNotFoundError):  # another process has just finished it
        if time.time() - path.stat().st_mtime > MAX_PARTIAL_AGE_S:
            return True
    return name_match[1] == socket.gethostname() and not psutil.pid_exists(int(name_match[2]))


def _read_umask() -> int:
    with contextlib.suppress(OSError, StopIteration):
        status_lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
        return int(next(line for line in status_lines if line.startswith("Umask:")).split()[1], 8)
    # Without /proc, the umask can only be read by setting it. Other threads see the new value for a
    # moment.
    umask = os.umask(0o077)
    os.umask(umask)
    return umask


def set_permissions_and_flush(directory: Path) -> None:
    """Give all files in ``directory`` the usual permissions (umask), and flush them to the disk."""
    umask = _read_umask()
    for path in directory.rglob("*"):
        if path.is_file() and not path.is_symlink():
            path.chmod(0o666 & ~umask)
            flush_to_disk(path)


def flush_to_disk(path: Path) -> None:
    """Flush the content of a file, or the list of files of a directory, to the disk (``fsync``)."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        with add_path_to_errors(path):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)
