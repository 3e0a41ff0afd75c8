"""One error form for command lines: a mistake is a sentence on standard error and exit status 2."""

import argparse
import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import yaml

from verl.config.settings import ConfigError

MISTAKE = 2  # exit status
DEEPEST = 50  # levels of a YAML file
LARGEST_PLAN = 1_000_000  # bytes of a YAML file that a command reads
_Loader: Any = getattr(yaml, "CSafeLoader", yaml.SafeLoader)


class UsageError(ValueError):
    """A mistake in the arguments of a command, or in a file that they name."""


def run_reporting_mistakes(main: Callable[..., int | None], *args: Any) -> int:
    """Return the exit status of ``main(*args)``: ``MISTAKE``, with the message on standard error,
    where the user made a mistake.

    Mistakes are ``UsageError``, ``ConfigError``, ``SystemExit`` with a message, and an ``OSError``
    that names a file. Every other exception is a fault of the program and is raised.
    """
    try:
        return main(*args) or 0
    except (UsageError, ConfigError) as error:
        message = str(error)
    except SystemExit as error:
        if not isinstance(error.code, str):
            raise
        message = error.code
    except OSError as error:
        # Without a number it was raised by our own code, with a sentence.
        if error.errno is not None and error.filename is None:
            raise
        message = f"{error.filename}: {error.strerror}" if error.filename else str(error)
    sys.stderr.write(f"{message}\n")
    return MISTAKE


def positive_int(text: str) -> int:
    """Read an argument that is a whole number of at least 1; a type for ``argparse``."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value}; allowed: whole numbers of at least 1")
    return value


def read_yaml_mapping(path: Path) -> dict[str, Any]:
    """Return the mapping in the YAML file ``path``.

    Raises ``UsageError`` for anything else, aliases included: a few hundred bytes of them can
    stand for gigabytes.
    """
    content = path.read_bytes()
    if len(content) > LARGEST_PLAN:
        raise UsageError(f"{path}: {len(content)} bytes; allowed: {LARGEST_PLAN}; fix: split it")
    try:
        text = content.decode("utf-8-sig")
        _refuse_unbounded(path, text)
        values = yaml.safe_load(text)
    except (UnicodeDecodeError, yaml.YAMLError, RecursionError) as error:
        first = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise UsageError(f"{path}: not YAML ({first}); fix: correct the file") from error
    if not isinstance(values, Mapping) or not all(isinstance(key, str) for key in values):
        raise UsageError(f"{path}: no mapping of names to values; allowed: key: value lines")
    return dict(values)


def _refuse_unbounded(path: Path, text: str) -> None:
    """Raise ``UsageError`` for aliases and deep nesting, before anything is made of ``text``."""
    # Counted in the text: the parser's time grows with the cube of the depth.
    depth = 0
    for sign in re.findall(r"[\[\]{}]", text):
        depth += 1 if sign in "[{" else -1
        if depth > DEEPEST:
            raise UsageError(f"{path}: {depth} levels; allowed: {DEEPEST}; fix: nest less deeply")
    if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(text, _Loader)):
        raise UsageError(f"{path}: has an alias (*name); allowed: none; fix: write it out")
