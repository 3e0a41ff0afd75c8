"""Error reporting of all commands. A user's mistake gives a message and exit status 2."""

import argparse
import contextlib
import sys
from collections.abc import Callable, Iterator, Mapping
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings import ConfigError
from verl.config.yaml_files import YamlLimitExceeded, parse_yaml
from verl.utils.logging import escape_control_characters

# Exit statuses: of a user's mistake, and of Ctrl-C.
MISTAKE_STATUS = 2
INTERRUPTED_STATUS = 130


class UsageError(ValueError):
    """Error: a mistake in the arguments of a command, or in a file that the arguments name."""


def run_reporting_mistakes(
    main: Callable[..., int | None], *args: Any, catches_os_errors: bool = True
) -> int:
    """Call ``main(*args)`` and return the exit status.

    After a user's mistake the message is written to standard error, and the status is
    ``MISTAKE_STATUS``. After Ctrl-C the status is ``INTERRUPTED_STATUS``. Mistakes are
    ``UsageError``, ``ConfigError`` and ``SystemExit`` with a message. With ``catches_os_errors``,
    an ``OSError`` that has a file name or no ``errno`` is also a mistake.
    """
    # Paths may have characters that the encoding of the locale lacks.
    if isinstance(sys.stdout, TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        _require_working_directory()
        return main(*args) or 0
    except (UsageError, ConfigError) as error:
        message = str(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED_STATUS
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        message = error.code
    except OSError as error:
        # An OSError without errno was raised by this project and has a message for the user.
        if not catches_os_errors or (error.errno is not None and error.filename is None):
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    sys.stderr.write(f"{escape_control_characters(message)}\n")
    return MISTAKE_STATUS


def _require_working_directory() -> None:
    try:
        Path.cwd()
    except OSError as error:
        raise UsageError(
            "the working directory was deleted; allowed: an existing directory; fix: cd DIR"
        ) from error


@contextlib.contextmanager
def convert_read_errors(path: Path) -> Iterator[None]:
    """Raise ``UsageError`` with ``path`` if the ``with`` block cannot read the file's content."""
    try:
        yield
    except UsageError:
        raise
    except (TypeError, ValueError, LookupError, AttributeError) as error:
        why = " ".join(repr(error).split())[:200]
        raise UsageError(
            f"{path}: it is not a file that a run wrote ({why}); allowed: files of a run; fix: "
            "restore or remove it"
        ) from error


def parse_positive_int(text: str) -> int:
    """Parse a whole number of at least 1, as a ``type`` of ``argparse``."""
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"{text!r}; allowed: whole numbers of at least 1")
    return int(text)


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping that the YAML file ``path`` contains.

    Raises ``UsageError`` if the file is not a YAML mapping with string keys, or if it exceeds the
    limits of ``verl.config.yaml_files``.
    """
    try:
        values = parse_yaml(path.read_bytes().decode("utf-8-sig"))
    except YamlLimitExceeded as error:
        raise UsageError(f"{path}: {error}") from error
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: not YAML ({first_line}); fix: correct the file") from error
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{path}: not a mapping of names to values; allowed: key: value lines")
    return dict(values)
