"""Every key of a schema as data: path, type, default, doc and bounds.

The help text and the checks read it.
"""

import dataclasses
import difflib
import functools
import types
import typing
from collections.abc import Mapping
from typing import Any


@dataclasses.dataclass(frozen=True)
class Key:
    """One key or section of a schema.

    ``path`` is dotted; a section has ``is_section`` set and no bounds.
    """

    path: str
    type: Any
    default: Any
    doc: str
    is_section: bool = False
    choices: tuple = ()
    low: float | None = None
    high: float | None = None
    unused: str = ""
    gpu_only: bool = False

    @property
    def type_name(self) -> str:
        """The type as a reader writes it: ``int | None``, ``list[str]``."""
        return (
            self.type.__name__
            if isinstance(self.type, type) and not self.is_generic
            else str(self.type).replace("typing.", "")
        )

    @property
    def is_generic(self) -> bool:
        """Whether the type is parametrised (``list[str]``, ``dict[str, Any]``)."""
        return isinstance(self.type, types.GenericAlias)

    @property
    def is_free(self) -> bool:
        """Whether any key may be written below this one."""
        return self.type is Any or typing.get_origin(self.type) is dict

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return typing.get_origin(self.type) is list

    def allowed(self) -> str:
        """What may be written here, in words."""
        if self.choices:
            words = ", ".join(map(str, self.choices))
            return f"any of {words}" if self.is_list else f"one of {words}"
        bounds = [f">= {self.low:g}"] if self.low is not None else []
        bounds += [f"<= {self.high:g}"] if self.high is not None else []
        return " ".join([self.type_name, " and ".join(bounds)]).strip()


def _walk(cls: type, instance: Any, prefix: str) -> dict[str, Key]:
    hints = typing.get_type_hints(cls)
    keys = {}
    for field in dataclasses.fields(cls):
        path = f"{prefix}{field.name}"
        value = getattr(instance, field.name)
        meta = dict(field.metadata)
        if dataclasses.is_dataclass(value):
            keys[path] = Key(path, hints[field.name], None, meta["doc"], is_section=True)
            keys.update(_walk(type(value), value, f"{path}."))
        else:
            keys[path] = Key(path, hints[field.name], value, **meta)
    return keys


@functools.cache
def schema_keys(schema: type) -> Mapping[str, Key]:
    """All keys and sections of ``schema`` by dotted path, in the order of declaration."""
    return types.MappingProxyType(_walk(schema, schema(), ""))


def owner(path: str, keys: Mapping[str, Key]) -> Key | None:
    """The declared key that ``path`` names or lies below (in a free dictionary); None when there is
    none.
    """
    if path in keys:
        return keys[path]
    parts = path.split(".")
    for length in range(len(parts) - 1, 0, -1):
        key = keys.get(".".join(parts[:length]))
        if key is not None:
            return key if key.is_free and not key.is_section else None
    return None


def children(path: str, keys: Mapping[str, Key]) -> list[str]:
    """Names directly below section ``path`` (empty: the root)."""
    prefix = f"{path}." if path else ""
    return [
        key[len(prefix) :]
        for key in keys
        if key.startswith(prefix) and "." not in key[len(prefix) :]
    ]


def nearest(path: str, keys: Mapping[str, Key]) -> str | None:
    """The declared key that was most likely meant: a similar sibling, the same name elsewhere, a
    similar path.
    """
    section, _, name = path.rpartition(".")
    siblings = difflib.get_close_matches(name, children(section, keys), n=1, cutoff=0.75)
    if siblings:
        return f"{section}.{siblings[0]}" if section else siblings[0]
    names = {key.rpartition(".")[2] for key in keys}
    similar = difflib.get_close_matches(name, sorted(names), n=1, cutoff=0.75)
    if similar:
        candidates = [key for key in keys if key.rpartition(".")[2] == similar[0]]
        return max(
            candidates,
            key=lambda key: difflib.SequenceMatcher(None, key, path).ratio() if section else 0,
        )
    paths = difflib.get_close_matches(path, list(keys), n=1, cutoff=0.6)
    return paths[0] if paths else None


def unknown(path: str, value: Any, keys: Mapping[str, Key]) -> str:
    """The message for a key that does not exist."""
    section = path.rpartition(".")[0]
    while section and not (section in keys and keys[section].is_section):
        section = section.rpartition(".")[0]
    guess = nearest(path, keys)
    hint = f"; did you mean {guess}?" if guess else ""
    where = section or "the top level"
    return f"{path}={value!r}: unknown key{hint} ({where} allows: {', '.join(children(section, keys))})"
