"""From a plain tree to typed values: unknown keys, wrong types and values out of bounds are all
named at once.
"""

import difflib
import typing
from collections.abc import Iterator, Mapping
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from verl.trainer.config.errors import ConfigError
from verl.trainer.config.keys import Key, owner, schema_keys, unknown


def _leaves(tree: Mapping, keys: Mapping[str, Key], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        path = f"{prefix}{name}"
        key = keys.get(path)
        if isinstance(value, Mapping) and (key is None or key.is_section) and value:
            yield from _leaves(value, keys, f"{path}.")
        elif not (isinstance(value, Mapping) and key is not None and key.is_section):
            yield path, value


def _accept(value: Any, key: Key) -> Any:
    """Values that job scripts write and that mean one thing: one word for a list, False for no
    path, 1: for '1':.
    """
    if key.is_list and isinstance(value, str) and "${" not in value:
        return [value]
    if value is False and str in typing.get_args(key.type):
        return None
    if key.is_free and isinstance(value, Mapping):
        return {str(name): item for name, item in value.items()}
    return value


def to_typed(tree: DictConfig, schema: type) -> DictConfig:
    """Merge ``tree`` into ``schema``, interpolations kept.

    Raises ConfigError with every problem found.
    """
    keys = schema_keys(schema)
    typed = OmegaConf.structured(schema)
    problems = []
    for path, value in _leaves(OmegaConf.to_container(tree, resolve=False), keys):
        problem = _set(typed, path, value, keys)
        if problem:
            problems.append(problem)
    if problems:
        raise ConfigError(problems)
    return typed


def _set(typed: DictConfig, path: str, value: Any, keys: Mapping[str, Key]) -> str | None:
    """Write one value into ``typed``; return what is wrong with it, if anything."""
    key = owner(path, keys)
    if key is None:
        return unknown(path, value, keys)
    if key.is_section:
        return f"{path}={value!r}: a section, not a value; set its keys: {path}.KEY=..."
    try:
        OmegaConf.update(typed, path, _accept(value, key))
    except OmegaConfBaseException:
        return f"{path}={value!r}: wrong type; allowed: {key.allowed()}"
    if key.is_free or "${" in str(value):
        return None
    written = OmegaConf.select(typed, path)
    return _bound_problem(
        key, OmegaConf.to_container(written) if OmegaConf.is_list(written) else written
    )


def _bound_problem(key: Key, value: Any) -> str | None:
    if value is None:
        return None
    values = value if isinstance(value, list) else [value]
    bad_choice = key.choices and any(item not in key.choices for item in values)
    too_low = key.low is not None and any(item < key.low for item in values)
    too_high = key.high is not None and any(item > key.high for item in values)
    if bad_choice or too_low or too_high:
        return (
            f"{key.path}={value!r}: not allowed; allowed: {key.allowed()}; fix: {_fix(key, values)}"
        )
    return None


def _fix(key: Key, values: list) -> str:
    words = [str(item) for item in values if key.choices and item not in key.choices]
    guess = (
        difflib.get_close_matches(words[0], list(map(str, key.choices)), n=1, cutoff=0.4)
        if words
        else []
    )
    return f"did you mean {guess[0]}?" if guess else f"{key.path}={key.default!r} is the default"


def to_object(typed: DictConfig, schema: type) -> Any:
    """Resolve interpolations and return an instance of ``schema``.

    Raises ConfigError for values out of bounds.
    """
    try:
        cfg = OmegaConf.to_object(typed)
    except OmegaConfBaseException as error:
        where = getattr(error, "full_key", None) or "the config"
        raise ConfigError(f"{where}: {str(error).splitlines()[0]}") from error
    problems = [
        _bound_problem(key, lookup(cfg, key.path))
        for key in schema_keys(schema).values()
        if not key.is_section
    ]
    found = [problem for problem in problems if problem]
    if found:
        raise ConfigError(found)
    return cfg


def lookup(cfg: Any, path: str) -> Any:
    """The value at dotted ``path`` of a config object or nested dictionary.

    Raises AttributeError or KeyError.
    """
    for name in path.split("."):
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg
