"""The section of an environment as typed settings. Unknown keys and impossible values are refused
by name.

An environment declares a frozen dataclass whose fields are made by ``setting``; ``read_section`` fills it::

    @dataclass(frozen=True)
    class LakeSettings:
        size: int = setting(4, low=3)

    settings = read_section(LakeSettings, section, "lake")
"""

import dataclasses
import difflib
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

SHARED = frozenset(
    {"max_steps", "seed", "placement", "train_tasks", "val_tasks"}
)  # every section may hold these
Settings = TypeVar("Settings")


def setting(
    default: Any, *, low: float | None = None, high: float | None = None, choices: Sequence = ()
) -> Any:
    """A field of a settings class; ``low``, ``high`` (inclusive) and ``choices`` also bind the
    items of a tuple.
    """
    return dataclasses.field(
        default=default, metadata={"low": low, "high": high, "choices": tuple(choices)}
    )


def read_section(cls: type[Settings], section: Mapping[str, Any] | None, env_name: str) -> Settings:
    """An instance of ``cls`` with the values of ``section``; a key that is None keeps its default.

    The type of a default is the type of its key: a tuple takes a list of as many items, an empty
    one any number of strings, None a string. Raises ``ValueError`` naming key, value and what is
    allowed.
    """
    fields = {field.name: field for field in dataclasses.fields(cls)}
    known = known_values(fields, section, env_name)
    return cls(
        **{
            key: _checked(f"env.{env_name}.{key}", value, fields[key])
            for key, value in known.items()
        }
    )


def known_values(
    keys: Collection[str],
    section: Mapping[str, Any] | None,
    env_name: str,
    ignored: Collection[str] = SHARED,
) -> dict[str, Any]:
    """What ``section`` says of ``keys``, without None.

    Raises ``ValueError`` for a key neither known nor ignored.
    """
    for key, value in (section or {}).items():
        if key not in keys and key not in ignored:
            nearest = difflib.get_close_matches(key, keys, n=1)
            hint = f"; did you mean {nearest[0]}?" if nearest else ";"
            raise ValueError(
                f"env.{env_name}.{key}={value!r}: unknown key{hint} there are: {', '.join(keys)}"
            )
    return {
        key: value for key, value in (section or {}).items() if key in keys and value is not None
    }


def _checked(path: str, value: Any, field: dataclasses.Field) -> Any:
    default = field.default
    listed = (
        isinstance(default, tuple) and isinstance(value, Sequence) and not isinstance(value, str)
    )
    value = tuple(value) if listed else value
    fits = _same_type(value, default)
    items = value if isinstance(value, tuple) else (value,)
    if not fits or not all(_allowed(item, field.metadata) for item in items):
        raise ValueError(
            f"{path}={value!r}: allowed: {_words(default, field.metadata)}; the default is {default!r}"
        )
    return value


def _same_type(value: Any, default: Any) -> bool:
    if default == ():
        return isinstance(value, tuple) and all(isinstance(item, str) for item in value)
    if isinstance(default, tuple):
        return (
            isinstance(value, tuple)
            and len(value) == len(default)
            and all(map(_same_type, value, default))
        )
    if default is None:
        return isinstance(value, str)
    kinds = (int, float) if isinstance(default, float) else type(default)
    return isinstance(value, kinds) and isinstance(value, bool) == isinstance(default, bool)


def _allowed(item: Any, bounds: Mapping[str, Any]) -> bool:
    if bounds["choices"]:
        return item in bounds["choices"]
    return (bounds["low"] is None or item >= bounds["low"]) and (
        bounds["high"] is None or item <= bounds["high"]
    )


def _words(default: Any, bounds: Mapping[str, Any]) -> str:
    if bounds["choices"]:
        return ("a list of " if default == () else "one of ") + ", ".join(
            map(str, bounds["choices"])
        )
    if default == ():
        return "list of str"
    one = default[0] if isinstance(default, tuple) else default
    name = "str" if one is None else type(one).__name__
    words = [f"list of {len(default)} {name}" if isinstance(default, tuple) else name]
    words += [f">= {bounds['low']:g}"] if bounds["low"] is not None else []
    words += [f"<= {bounds['high']:g}"] if bounds["high"] is not None else []
    return " ".join(words)
