"""Refusal to run code that the stored config of a run names, without ``trust_run_code=true``."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from verl.config.compose import list_override_keys, read_user_config_files
from verl.config.plugins import collect_all_keys
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Key, Section

TRUST_KEY = "trust_run_code"
TRUST_ARGUMENTS = {f"{TRUST_KEY}=true", "--trust-run-code"}
# Files and folders that identify a run directory.
_RUN_DIRECTORY_ENTRIES = ("env.json", "metrics.jsonl", "rollouts", "checkpoints")


def find_keys_that_name_code(
    stored_config: Mapping[str, Any], schema: type[Section] = PPOConfig
) -> list[str]:
    """Return the dotted paths of the keys of a run's config that name code to execute."""
    keys = collect_all_keys(schema)
    code_key_names = {key.name for key in keys.values() if key.code_annotation}
    return sorted(_iterate_code_keys(stored_config, "", keys, code_key_names))


def _iterate_code_keys(
    values: Mapping[str, Any],
    path_prefix: str,
    keys: Mapping[str, Key],
    code_key_names: Collection[str],
) -> Iterator[str]:
    for name, value in values.items():
        path = f"{path_prefix}{name}"
        key = keys.get(path)
        if isinstance(value, str) and "${" in value:
            # The value of an interpolation may name code. Report the key if the schema allows code
            # for it or for a key below it.
            is_code = any(
                other_key.code_annotation and f"{other_path}.".startswith(f"{path}.")
                for other_path, other_key in keys.items()
            )
        elif key is not None:
            is_code = key.code_annotation is not None and key.code_annotation.names_code(value)
        else:
            # A key in a dictionary (env.kwargs), or of an environment whose package is missing.
            is_code = name in code_key_names and bool(value) and not isinstance(value, Mapping)
        if is_code:
            yield path
        elif isinstance(value, Mapping):
            yield from _iterate_code_keys(value, f"{path}.", keys, code_key_names)


def refuse_code_in_stored_config(
    stored_config: Mapping[str, Any],
    run: str,
    command_line_keys: Collection[str] = (),
    fix: str = f"{TRUST_KEY}=true",
    schema: type[Section] = PPOConfig,
) -> None:
    """Raise ``ConfigError`` if ``stored_config``, the config of a run, names code to execute.

    Keys in ``command_line_keys`` are allowed, because the command line sets them. ``run`` names the
    run, and ``fix`` the setting that allows its code, for the message.
    """
    refused_paths = [
        path
        for path in find_keys_that_name_code(stored_config, schema)
        if not any(f"{path}.".startswith(f"{key}.") for key in command_line_keys)
    ]
    if refused_paths:
        raise ConfigError(
            f"{run}: its stored configuration would execute code: {', '.join(refused_paths)}; "
            f"allowed: code that the command line names; fix: {fix} if you trust this run",
            "untrusted_code",
        )


def refuse_code_in_run_directory(
    name: str,
    config_path: str | None,
    overrides: Sequence[str],
    schema: type[Section],
    is_run_directory: bool = False,
) -> None:
    """Raise ``ConfigError`` if config ``name`` is in a run directory and names code to execute.

    Keys in ``overrides`` are allowed. A run directory is recognised by its files, unless
    ``is_run_directory`` already says so.
    """
    for file, content in read_user_config_files(name, config_path).items():
        if is_run_directory or any(
            file.with_name(entry_name).exists() for entry_name in _RUN_DIRECTORY_ENTRIES
        ):
            refuse_code_in_stored_config(
                content, f"config {str(file)!r}", list_override_keys(overrides), schema=schema
            )
