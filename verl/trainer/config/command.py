"""The command line of the small commands: ``key=value`` words, read without configs and sweeps."""

import sys
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf

from verl.trainer.config.compose import parse_overrides
from verl.utils.settings import ConfigError, Section, keys_of
from verl.utils.settings.reading import from_text, read

SectionT = TypeVar("SectionT", bound=Section)


def read_words(words: Sequence[str], schema: type[SectionT], required: Sequence[str]) -> SectionT:
    """The configuration that ``words`` describe.

    Raises ``ConfigError`` with every unknown key, wrong value and missing one of ``required``.
    """
    tree = OmegaConf.create()
    for override in parse_overrides(words):
        OmegaConf.update(tree, override.key_or_group, override.value(), force_add=True)
    written: Any = OmegaConf.to_container(tree)
    reading = read(schema, from_text(written, schema))
    problems = list(reading.problems.values())
    keys = keys_of(schema)
    given = {override.key_or_group for override in parse_overrides(words)}
    problems += [
        f"{key}: required ({keys[key].doc.removesuffix('; required')}); fix: {key}=..."
        for key in required
        if key not in given
    ]
    if problems or reading.section is None:
        raise ConfigError(dict.fromkeys(problems))
    return reading.section


def run_command(
    main: Callable[[Any], object],
    schema: type[Section],
    required: Sequence[str],
    prog: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Run ``main(config)`` of the command line; returns the exit status: 0, or 2 where it is
    refused, with every problem on standard error.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    if not words or {"--help", "-h"} & set(words):
        sys.stdout.write(_help(schema, prog))
        return 0
    try:
        main(read_words(words, schema, required))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return 2
    return 0


def _help(schema: type[Section], prog: str) -> str:
    lines = [f"usage: python -m {prog} key=value ...", ""]
    for key in keys_of(schema).values():
        if not key.is_section and not key.unused:
            lines += [f"{key.path}  ({key.allowed()}; default {key.default!r})", f"    {key.doc}"]
    return "\n".join(lines) + "\n"
