"""Keys of a run's stored configuration that name code: nothing of it is executed unless the command
line asks for it.
"""

from collections.abc import Collection, Iterator, Mapping
from typing import Any

from verl.config.plugins import schema_keys
from verl.config.schema import PPOConfig
from verl.config.settings import ConfigError, Key

TRUST = "trust_run_code"


def code_keys(stored: Mapping[str, Any]) -> list[str]:
    """Paths of the keys in ``stored``, the configuration of a run, that would execute code."""
    keys = schema_keys(PPOConfig)
    names = {key.name for key in keys.values() if key.runs_code}
    return sorted(_found(stored, "", keys, names))


def _found(
    values: Mapping[str, Any], above: str, keys: Mapping[str, Key], names: Collection[str]
) -> Iterator[str]:
    for name, value in values.items():
        path = f"{above}{name}"
        key = keys.get(path)
        if key is not None:
            is_code = key.runs_code is not None and key.runs_code.in_value(value)
        else:
            # Below a free dictionary (env.kwargs) and in sections whose package is missing.
            is_code = name in names and bool(value) and not isinstance(value, Mapping)
        if is_code:
            yield path
        elif isinstance(value, Mapping):
            yield from _found(value, f"{path}.", keys, names)


def refuse_stored_code(
    stored: Mapping[str, Any], run: str, given: Collection[str] = (), fix: str = f"{TRUST}=true"
) -> None:
    """Raise ``ConfigError`` for keys of ``stored`` that name code and are not among ``given``, the
    keys of the command line.
    """
    found = [path for path in code_keys(stored) if not _is_given(path, given)]
    if found:
        raise ConfigError(
            f"{run}: its stored configuration would execute code: {', '.join(found)}; allowed: "
            f"code that the command line asks for; fix: {fix} if you trust this run"
        )


def _is_given(path: str, given: Collection[str]) -> bool:
    return any(path == key or path.startswith(f"{key}.") for key in given)
