"""Refusal to run code (files, modules, commands) named by the stored config of another run.

The command line can allow it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from verl.config.compose import user_files
from verl.config.plugins import schema_keys
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Key, Section

TRUST = "trust_run_code"
TRUST_OVERRIDES = {f"{TRUST}=true", "--trust-run-code"}
# Files and folders that identify a run directory.
_RUN_FILES = ("env.json", "metrics.jsonl", "rollouts", "checkpoints")


def code_keys(stored: Mapping[str, Any], schema: type[Section] = PPOConfig) -> list[str]:
    """Return the paths of the keys in ``stored``, the config of a run, that would execute code."""
    keys = schema_keys(schema)
    names = {key.name for key in keys.values() if key.code_mark}
    return sorted(_iterate_code_keys(stored, "", keys, names))


def _iterate_code_keys(
    values: Mapping[str, Any], path_prefix: str, keys: Mapping[str, Key], names: Collection[str]
) -> Iterator[str]:
    for name, value in values.items():
        path = f"{path_prefix}{name}"
        key = keys.get(path)
        if isinstance(value, str) and "${" in value:
            # A run stores resolved values. An interpolation could copy code from a key with another
            # name. So it counts as code if it replaces a key that names code, or a section with
            # such a key.
            is_code = any(
                other_key.code_mark and f"{at}.".startswith(f"{path}.")
                for at, other_key in keys.items()
            )
        elif key is not None:
            is_code = key.code_mark is not None and key.code_mark.names_code(value)
        else:
            # The schema does not declare this key: it is in a dictionary (env.kwargs), or in the
            # section of an environment whose package is missing.
            is_code = name in names and bool(value) and not isinstance(value, Mapping)
        if is_code:
            yield path
        elif isinstance(value, Mapping):
            yield from _iterate_code_keys(value, f"{path}.", keys, names)


def refuse_stored_code(
    stored: Mapping[str, Any],
    run: str,
    given: Collection[str] = (),
    fix: str = f"{TRUST}=true",
    schema: type[Section] = PPOConfig,
) -> None:
    """Raise ``ConfigError`` if ``stored`` names code with a key that is not in ``given``."""
    refused = [
        path
        for path in code_keys(stored, schema)
        if not any(f"{path}.".startswith(f"{key}.") for key in given)
    ]
    if refused:
        raise ConfigError(
            f"{run}: its stored configuration would execute code: {', '.join(refused)}; allowed: "
            f"code that the command line names; fix: {fix} if you trust this run"
        )


def refuse_code_of_run(
    name: str,
    config_path: str | None,
    overrides: Sequence[str],
    schema: type[Section],
    is_run: bool = False,
) -> None:
    """Raise ``ConfigError`` if config ``name`` is in a run directory and names code.

    Keys in ``overrides`` are allowed. With ``is_run`` every directory counts as a run directory.
    """
    override_keys = {override.lstrip("+").partition("=")[0] for override in overrides}
    for file, content in user_files(name, config_path).items():
        if is_run or any(file.with_name(run_file).exists() for run_file in _RUN_FILES):
            refuse_stored_code(content, f"config {str(file)!r}", override_keys, schema=schema)
