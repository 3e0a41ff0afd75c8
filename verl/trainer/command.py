"""Command line of ``main_generation`` and ``main_export``: overrides, no config files or sweeps."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.config.compose import parse_overrides, read_number_as_text
from verl.config.settings import ConfigError, Key, Problem, Section, collect_section_keys
from verl.config.settings.reading import convert_text_values, read_section
from verl.utils.commands import run_and_report_mistakes

SectionT = TypeVar("SectionT", bound=Section)


def read_overrides(
    overrides: Sequence[str], schema: type[SectionT], required_keys: Sequence[str]
) -> SectionT:
    """Return the configuration of type ``schema`` with ``overrides``.

    Raises ``ConfigError`` for invalid overrides, and if one of ``required_keys`` is not set.
    """
    keys = collect_section_keys(schema)
    override_tree = _build_override_tree(overrides, keys)
    read_result = read_section(schema, convert_text_values(override_tree, schema))
    missing_keys = [
        key for key in required_keys if _get_config_value(override_tree, key) in (None, "")
    ]
    problems = [text for key, text in read_result.problems.items() if key not in missing_keys]
    problems += [
        Problem(
            f"{key}: required ({keys[key].help_text.removesuffix('; required')}); fix: {key}=...",
            "missing_key",
        )
        for key in missing_keys
    ]
    if problems or read_result.section is None:
        raise ConfigError(dict.fromkeys(problems))
    return read_result.section


def _build_override_tree(overrides: Sequence[str], keys: Mapping[str, Key]) -> Any:
    tree = OmegaConf.create()
    override_text = ""
    try:
        for override in parse_overrides(overrides):
            override_text = override.input_line
            if override.is_sweep_override() or override.is_delete():
                raise ConfigError(
                    f"{override_text}: sweeps and deletions are not supported; allowed: key=value; "
                    "fix: quote the value",
                    "invalid_syntax",
                )
            override_key = override.key_or_group
            number_text = read_number_as_text(override, keys.get(override_key))
            value = override.value() if number_text is None else number_text
            OmegaConf.update(tree, override_key, value, force_add=True)
        return OmegaConf.to_container(tree, resolve=True)
    except OmegaConfBaseException as error:
        why = str(error).splitlines()[0]
        message = f"{override_text}: {why}; allowed: key=value; fix: correct the value"
        raise ConfigError(message, "invalid_syntax") from error


def _get_config_value(tree: object, key: str) -> Any:
    for name in key.split("."):
        tree = tree.get(name) if isinstance(tree, dict) else None
    return tree


def run_command(
    main: Callable[[Any], object],
    schema: type[Section],
    required_keys: Sequence[str],
    prog: str,
    argv: Sequence[str] | None = None,
) -> int:
    """Run ``main(config)`` or print the help; return the exit status."""
    args = list(sys.argv[1:] if argv is None else argv)
    if not args or {"--help", "-h"} & set(args):
        sys.stdout.write(_format_help(schema, prog))
        return 0

    def read_and_run() -> None:
        main(read_overrides(args, schema, required_keys).as_frozen())

    return run_and_report_mistakes(read_and_run, catches_os_errors=False)


def _format_help(schema: type[Section], prog: str) -> str:
    lines = [f"usage: python -m {prog} key=value ...", ""]
    for key in collect_section_keys(schema).values():
        if not key.is_section and not key.unused_annotation:
            lines += [
                f"{key.path}  ({key.describe_allowed()}; default {key.default_value!r})",
                f"    {key.help_text}",
            ]
    return "\n".join(lines) + "\n"
