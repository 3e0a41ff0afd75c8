"""Command line of ``main_generation`` and ``main_export``: overrides without configs and sweeps."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.compose import parse_overrides
from verl.config.settings import ConfigError, Section, keys_of
from verl.config.settings.reading import from_text, read
from verl.utils.commands import run_reporting_mistakes

SectionT = TypeVar("SectionT", bound=Section)


def read_words(words: Sequence[str], schema: type[SectionT], required: Sequence[str]) -> SectionT:
    """The configuration that ``words`` describe.

    Raises ``ConfigError`` with every unknown key, wrong value and missing one of ``required``.
    """
    written = _written(words)
    reading = read(schema, from_text(written, schema))
    keys = keys_of(schema)
    missing = [key for key in required if _at(written, key) in (None, "")]
    problems = [text for key, text in reading.problems.items() if key not in missing]
    problems += [
        f"{key}: required ({keys[key].doc.removesuffix('; required')}); fix: {key}=..."
        for key in missing
    ]
    if problems or reading.section is None:
        raise ConfigError(dict.fromkeys(problems))
    return reading.section


def _written(words: Sequence[str]) -> Any:
    """What ``words`` write, a value for each key. Raises ``ConfigError``."""
    tree = OmegaConf.create()
    word = ""
    try:
        for override in parse_overrides(words):
            word = override.input_line
            if override.is_sweep_override() or override.is_delete():
                raise ConfigError(f"{word}: not a value; allowed: key=value; fix: quote it")
            OmegaConf.update(tree, override.key_or_group, override.value(), force_add=True)
        return OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        raise ConfigError(f"{word}: {why}; allowed: key=value; fix: mend the value") from error


def _at(tree: Any, key: str) -> Any:
    """What is at dotted ``key``; None where nothing is."""
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def run_command(
    main: Callable[[Any], object],
    schema: type[Section],
    required: Sequence[str],
    prog: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Run ``main(config)`` of the command line and return the exit status."""
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"--help", "-h"} & set(words):
        sys.stdout.write(_help(schema, prog))
        return 0

    def command() -> None:
        main(read_words(words, schema, required).as_frozen())

    return run_reporting_mistakes(command, catches_os_errors=False)


def _help(schema: type[Section], prog: str) -> str:
    lines = [f"usage: python -m {prog} key=value ...", ""]
    for key in keys_of(schema).values():
        if not key.is_section and not key.unused:
            lines += [f"{key.path}  ({key.allowed()}; default {key.default!r})", f"    {key.doc}"]
    return "\n".join(lines) + "\n"
