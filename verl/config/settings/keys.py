"""Keys of sections as data: path, type, default, doc and bounds.

Help texts and messages read it.
"""

import ast
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from verl.config.settings.section import GpuOnly, RunsCode, Section, Unused


@dataclass(frozen=True, slots=True)
class Shape:
    """What may be written for a key: its type in words, and what bounds the value or its items."""

    words: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    items: type | None = None  # list or tuple, where the value is one
    optional: bool = False
    free: bool = False  # any key may be written below this one

    @property
    def is_list(self) -> bool:
        """Whether the value is a list."""
        return self.items is not None

    @property
    def is_text(self) -> bool:
        """Whether the value, or each item of it, is text."""
        return all(isinstance(choice, str) for choice in self.choices) and (
            bool(self.choices) or self.words.removesuffix(" | None") in ("str", "list[str]")
        )

    def allowed(self) -> str:
        """What may be written, in words."""
        if self.choices:
            names = ", ".join(map(str, self.choices))
            return f"any of {names}" if self.is_list else f"one of {names}"
        bounds = [f">= {_shown(self.low)}"] if self.low is not None else []
        bounds += [f"<= {_shown(self.high)}"] if self.high is not None else []
        return f"{self.words} {' and '.join(bounds)}".strip()


def shape_of(annotation: object, markers: tuple[Any, ...] = ()) -> Shape:
    """The shape that ``annotation`` describes; ``markers`` are those that stand around it."""
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return shape_of(arguments[0], (*arguments[1:], *markers))
    if origin is Literal:
        return Shape(_literal_words(arguments), choices=arguments)
    if origin in (Union, types.UnionType):
        return _union_shape(arguments, markers)
    low = next((_number(marker.ge) for marker in markers if isinstance(marker, Ge)), None)
    high = next((_number(marker.le) for marker in markers if isinstance(marker, Le)), None)
    if origin in (list, tuple):
        return _list_shape(origin, arguments)
    if origin is dict:
        return Shape(_words(annotation), free=True)
    if annotation is Any:
        return Shape("any value", free=True)
    return Shape(_words(annotation), low=low, high=high)


def _shown(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _number(bound: object) -> float | None:
    return bound if isinstance(bound, int | float) else None


def _union_shape(arguments: tuple[Any, ...], markers: tuple[Any, ...]) -> Shape:
    shapes = [shape_of(part, markers) for part in arguments if part is not types.NoneType]
    optional = len(shapes) < len(arguments)
    words = " | ".join([*(shape.words for shape in shapes), *(["None"] if optional else [])])
    if len(shapes) > 1:  # several types: none of them bounds the others
        return Shape(words, optional=optional)
    one = shapes[0]
    return Shape(words, one.choices, one.low, one.high, one.items, optional, one.free)


def _list_shape(kind: type, arguments: tuple[Any, ...]) -> Shape:
    item = shape_of(arguments[0]) if arguments else Shape("any value")
    fixed = kind is tuple and arguments[-1] is not Ellipsis
    words = f"list of {len(arguments)} {item.words}" if fixed else f"list[{item.words}]"
    return Shape(words, item.choices, item.low, item.high, items=kind)


def _literal_words(choices: tuple[Any, ...]) -> str:
    kinds = {type(choice).__name__ for choice in choices}
    return " | ".join(sorted(kinds))


def _words(annotation: object) -> str:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation.__name__
    if get_origin(annotation) is Annotated:
        return _words(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        key, value = map(_words, get_args(annotation))
        return f"dict[{key}, {value}]"
    return str(annotation).replace("typing.", "")


@dataclass(frozen=True, slots=True)
class Key:
    """One key or section. ``path`` is dotted; a section has ``section`` set and no shape."""

    path: str
    owner: type[Section]
    field: FieldInfo
    section: type[Section] | None = None

    @property
    def name(self) -> str:
        """The last part of the path."""
        return self.path.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        """Whether it holds keys instead of a value."""
        return self.section is not None

    @property
    def is_free(self) -> bool:
        """Whether any key may be written below this one."""
        return not self.is_section and self.shape.free

    @property
    def shape(self) -> Shape:
        """What may be written."""
        return _field_shape(self.owner, self.name)

    @property
    def default(self) -> Any:
        """The value where nothing is written."""
        return self.field.get_default(call_default_factory=True)

    @property
    def doc(self) -> str:
        """The help text: the docstring below the key."""
        return self.field.description or doc_of(self.owner, self.name)

    @property
    def unused(self) -> Unused | None:
        """Why the key changes nothing and who sets it; None where it counts."""
        return next((mark for mark in self.field.metadata if isinstance(mark, Unused)), None)

    @property
    def gpu_only(self) -> bool:
        """Whether the key changes nothing on CPU."""
        return any(isinstance(mark, GpuOnly) for mark in self.field.metadata)

    @property
    def runs_code(self) -> RunsCode | None:
        """The mark of a key whose value names code; None for any other."""
        return next((mark for mark in self.field.metadata if isinstance(mark, RunsCode)), None)

    def allowed(self) -> str:
        """What may be written here, in words."""
        return self.shape.allowed()


@functools.cache
def _field_shape(owner: type[Section], name: str) -> Shape:
    field = owner.model_fields[name]
    return shape_of(field.annotation, tuple(field.metadata))


def section_class(field: FieldInfo) -> type[Section] | None:
    """The section that ``field`` holds; None where it holds a value."""
    kind = field.annotation
    if isinstance(kind, type) and not isinstance(kind, types.GenericAlias):
        return kind if issubclass(kind, Section) else None
    return None


@functools.cache
def own_keys(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """The keys and sections directly in ``cls`` by name, with ``prefix`` before their paths."""
    keys = {}
    for name, field in cls.model_fields.items():
        keys[name] = Key(f"{prefix}{name}", cls, field, section_class(field))
    return types.MappingProxyType(keys)


@functools.cache
def keys_of(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """All keys and sections of ``cls`` by dotted path, in the order of declaration."""
    keys: dict[str, Key] = {}
    for key in own_keys(cls, prefix).values():
        keys[key.path] = key
        if key.section is not None:
            keys.update(keys_of(key.section, f"{key.path}."))
    return types.MappingProxyType(keys)


def plugged_key(path: str, cls: type[Section]) -> Key:
    """The section ``cls`` at ``path``, where no class declares it as an attribute."""
    summary = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    field = FieldInfo(annotation=cls, default_factory=cls, description=summary)
    return Key(path, cls, field, section=cls)


def doc_of(cls: type, name: str) -> str:
    """The docstring below attribute ``name`` of ``cls`` or of a class it inherits from."""
    # From the class itself upwards: a key that is declared again may have a text of its own.
    docs = (_attribute_docs(base) for base in cls.__mro__ if issubclass(base, Section))
    return next((found[name] for found in docs if name in found), "")


@functools.cache
def _attribute_docs(cls: type) -> Mapping[str, str]:
    # Pydantic can read them too, but when a class is made: a tenth of a second at every start,
    # for texts that only --help shows.
    body = _class_bodies(cls.__module__).get(cls.__name__, [])
    docs = {}
    for statement, below in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(below, ast.Expr) and isinstance(below.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(below.value.value).split())
    return types.MappingProxyType(docs)


@functools.cache
def _class_bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # made in a session: there is no file to read
        return {}
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def lookup(cfg: object, path: str) -> Any:
    """The value at dotted ``path`` of a config object or nested dictionary.

    Raises AttributeError or KeyError.
    """
    for name in path.split("."):
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg
