"""Error reporting of all command lines: a user's mistake gives a message and exit status 2."""

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings import ConfigError
from verl.config.yaml_files import MAX_BYTES, find_exceeded_limit

# Exit statuses.
MISTAKE = 2
INTERRUPTED = 130


class UsageError(ValueError):
    """A mistake in the arguments of a command, or in a file that they name."""


def run_reporting_mistakes(
    main: Callable[..., int | None], *args: Any, catches_os_errors: bool = True
) -> int:
    """Call ``main(*args)`` and return the exit status.

    A user's mistake gives ``MISTAKE`` and a message on standard error, Ctrl-C gives
    ``INTERRUPTED``. Mistakes are ``UsageError``, ``ConfigError`` and ``SystemExit`` with a message;
    with ``catches_os_errors`` also ``OSError`` with a file name or without a number.
    """
    try:
        return main(*args) or 0
    except (UsageError, ConfigError) as error:
        message = str(error)
    except KeyboardInterrupt:
        sys.stderr.write("interrupted\n")
        return INTERRUPTED
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        message = error.code
    except OSError as error:
        # An OSError without a number was raised by this project, with a message.
        if not catches_os_errors or (error.errno is not None and error.filename is None):
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    sys.stderr.write(f"{message}\n")
    return MISTAKE


def parse_positive_int(text: str) -> int:
    """Parse a whole number of at least 1; an ``argparse`` type."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; allowed: whole numbers of at least 1")
    return value


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file ``path``.

    Raises ``UsageError`` for anything else, and for a file above the limits of ``yaml_files``.
    """
    content = path.read_bytes()
    if len(content) > MAX_BYTES:
        raise UsageError(f"{path}: {len(content)} bytes; allowed: {MAX_BYTES}; fix: split it")
    try:
        text = content.decode("utf-8-sig")
        excess = find_exceeded_limit(text)
        values = None if excess else yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        first_line = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: not YAML ({first_line}); fix: correct the file") from error
    if excess:
        raise UsageError(f"{path}: {excess}")
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{path}: not a mapping of names to values; allowed: key: value lines")
    return dict(values)
