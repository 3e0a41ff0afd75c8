"""Keys of a run's stored configuration that name code: nothing of it is executed unless the command
line asks for it.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from verl.config.compose import own_files
from verl.config.plugged import schema_keys
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Key, Section

TRUST = "trust_run_code"
TRUST_WORDS = {f"{TRUST}=true", "--trust-run-code"}
# Each of these beside a config shows that the directory is a run's.
_RUN_FILES = ("env.json", "metrics.jsonl", "rollouts", "checkpoints")


def code_keys(stored: Mapping[str, Any], schema: type[Section] = PPOConfig) -> list[str]:
    """Paths of the keys in ``stored``, the configuration of a run, that would execute code."""
    keys = schema_keys(schema)
    names = {key.name for key in keys.values() if key.runs_code}
    return sorted(_found(stored, "", keys, names))


def _found(
    values: Mapping[str, Any], above: str, keys: Mapping[str, Key], names: Collection[str]
) -> Iterator[str]:
    for name, value in values.items():
        path = f"{above}{name}"
        key = keys.get(path)
        if isinstance(value, str) and "${" in value:
            # What a run stores is resolved: a reference may stand for code that is written below a
            # key of another name.
            is_code = any(
                other.runs_code and f"{at}.".startswith(f"{path}.") for at, other in keys.items()
            )
        elif key is not None:
            is_code = key.runs_code is not None and key.runs_code.in_value(value)
        else:
            # Below a free dictionary (env.kwargs) and in sections whose package is missing.
            is_code = name in names and bool(value) and not isinstance(value, Mapping)
        if is_code:
            yield path
        elif isinstance(value, Mapping):
            yield from _found(value, f"{path}.", keys, names)


def refuse_stored_code(
    stored: Mapping[str, Any],
    run: str,
    given: Collection[str] = (),
    fix: str = f"{TRUST}=true",
    schema: type[Section] = PPOConfig,
) -> None:
    """Raise ``ConfigError`` for keys of ``stored`` that name code and are not among ``given``, the
    keys of the command line.
    """
    found = [path for path in code_keys(stored, schema) if not _is_given(path, given)]
    if found:
        raise ConfigError(
            f"{run}: its stored configuration would execute code: {', '.join(found)}; allowed: "
            f"code that the command line asks for; fix: {fix} if you trust this run"
        )


def refuse_code_of_run(
    name: str,
    config_path: str | None,
    overrides: Sequence[str],
    schema: type[Section],
    is_run: bool = False,
) -> None:
    """Raise ``ConfigError`` if config ``name`` lies in a run directory and names code that
    ``overrides`` do not name. ``is_run``: the directory counts as a run's whatever it holds.
    """
    given = {word.lstrip("+").partition("=")[0] for word in overrides}
    for file, content in own_files(name, config_path).items():
        if is_run or any(file.with_name(other).exists() for other in _RUN_FILES):
            refuse_stored_code(content, f"config {str(file)!r}", given, schema=schema)


def _is_given(path: str, given: Collection[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in given)
