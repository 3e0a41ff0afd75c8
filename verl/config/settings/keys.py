"""Keys of sections as data for help texts and messages: path, type, default, text and bounds."""

import ast
import dataclasses
import functools
import inspect
import itertools
import sys
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Le
from pydantic.fields import FieldInfo

from verl.config.settings.section import GpuOnly, RunsCode, Section, Unused

M = TypeVar("M")


@dataclass(frozen=True, slots=True)
class ValueType:
    """Allowed values of a key: the name of its type, and bounds of the value or of its items."""

    type_name: str
    choices: tuple[Any, ...] = ()
    low: float | None = None
    high: float | None = None
    items: type | None = None  # list or tuple if the value is one
    is_optional: bool = False
    allows_any_key: bool = False  # a dictionary: any key is allowed below this one

    @property
    def is_list(self) -> bool:
        return self.items is not None

    @property
    def is_text(self) -> bool:
        """True if the value, or each item of it, is text."""
        return all(isinstance(choice, str) for choice in self.choices) and (
            bool(self.choices) or self.type_name.removesuffix(" | None") in ("str", "list[str]")
        )

    def describe_allowed(self) -> str:
        """Return the allowed values as text: ``one of a, b``, ``int >= 1``."""
        if self.choices:
            names = ", ".join(map(str, self.choices))
            return f"any of {names}" if self.is_list else f"one of {names}"
        bounds = [f">= {_format_bound(self.low)}"] if self.low is not None else []
        bounds += [f"<= {_format_bound(self.high)}"] if self.high is not None else []
        return f"{self.type_name} {' and '.join(bounds)}".strip()


def parse_annotation(annotation: object, markers: tuple[Any, ...] = ()) -> ValueType:
    """Return the allowed values that the type ``annotation`` describes.

    ``markers`` are the arguments of the enclosing ``Annotated`` types, such as ``Ge(1)``.
    """
    origin = get_origin(annotation)
    arguments = get_args(annotation)
    if origin is Annotated:
        return parse_annotation(arguments[0], (*arguments[1:], *markers))
    if origin is Literal:
        kinds = sorted({type(choice).__name__ for choice in arguments})
        return ValueType(" | ".join(kinds), choices=arguments)
    if origin in (Union, types.UnionType):
        return _union_type(arguments, markers)
    minimum = next((_as_number(marker.ge) for marker in markers if isinstance(marker, Ge)), None)
    maximum = next((_as_number(marker.le) for marker in markers if isinstance(marker, Le)), None)
    if origin in (list, tuple):
        return _list_type(origin, arguments)
    if origin is dict:
        return ValueType(_annotation_name(annotation), allows_any_key=True)
    if annotation is Any:
        return ValueType("any value", allows_any_key=True)
    return ValueType(_annotation_name(annotation), low=minimum, high=maximum)


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _as_number(bound: object) -> float | None:
    return bound if isinstance(bound, int | float) else None


def _union_type(arguments: tuple[Any, ...], markers: tuple[Any, ...]) -> ValueType:
    shapes = [
        parse_annotation(argument, markers)
        for argument in arguments
        if argument is not types.NoneType
    ]
    optional = len(shapes) < len(arguments)
    union_name = " | ".join(
        [*(shape.type_name for shape in shapes), *(["None"] if optional else [])]
    )
    if len(shapes) > 1:  # several types: the bounds of one do not apply to the others
        return ValueType(union_name, is_optional=optional)
    single_type = shapes[0]
    return dataclasses.replace(single_type, type_name=union_name, is_optional=optional)


def _list_type(container_type: type, arguments: tuple[Any, ...]) -> ValueType:
    item = parse_annotation(arguments[0]) if arguments else ValueType("any value")
    fixed = container_type is tuple and arguments[-1] is not Ellipsis
    list_name = f"list of {len(arguments)} {item.type_name}" if fixed else f"list[{item.type_name}]"
    return ValueType(list_name, item.choices, item.low, item.high, items=container_type)


def _annotation_name(annotation: object) -> str:
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return annotation.__name__
    if get_origin(annotation) is Annotated:
        return _annotation_name(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        key, value = map(_annotation_name, get_args(annotation))
        return f"dict[{key}, {value}]"
    return str(annotation).replace("typing.", "")


@dataclass(frozen=True, slots=True)
class Key:
    """One key or section. ``path`` is dotted; only a section has ``section`` set."""

    path: str
    declaring_class: type[Section]
    field: FieldInfo
    section: type[Section] | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        """True if it holds keys instead of a value."""
        return self.section is not None

    @property
    def allows_any_key(self) -> bool:
        """True if any key is allowed below this one, because its value is a dictionary."""
        return not self.is_section and self.value_type.allows_any_key

    @property
    def value_type(self) -> ValueType:
        """Return the type and the bounds of the value."""
        return _field_type(self.declaring_class, self.name)

    @property
    def default_value(self) -> Any:
        """Return the value that applies if the key is not set."""
        return self.field.get_default(call_default_factory=True)

    @property
    def help_text(self) -> str:
        """Return the help text, which is the docstring below the key."""
        return self.field.description or attribute_doc(self.declaring_class, self.name)

    @property
    def unused_mark(self) -> Unused | None:
        """Return the ``Unused`` annotation of a key without effect; None for a key with effect."""
        return self._find_mark(Unused)

    @property
    def is_gpu_only(self) -> bool:
        """True if the key has no effect on CPU."""
        return self._find_mark(GpuOnly) is not None

    @property
    def code_mark(self) -> RunsCode | None:
        """Return the ``RunsCode`` annotation of a key that can name code; None for others."""
        return self._find_mark(RunsCode)

    def _find_mark(self, kind: type[M]) -> M | None:
        return next((mark for mark in self.field.metadata if isinstance(mark, kind)), None)

    def describe_allowed(self) -> str:
        """Return the allowed values as text."""
        return self.value_type.describe_allowed()


@functools.cache
def _field_type(owner: type[Section], name: str) -> ValueType:
    field = owner.model_fields[name]
    return parse_annotation(field.annotation, tuple(field.metadata))


def section_class(field: FieldInfo) -> type[Section] | None:
    """Return the section class of ``field``; None if it holds a value."""
    field_type = field.annotation
    if isinstance(field_type, type) and not isinstance(field_type, types.GenericAlias):
        return field_type if issubclass(field_type, Section) else None
    return None


@functools.cache
def direct_keys(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """Return the keys and sections directly in ``cls`` by name; ``prefix`` starts their paths."""
    keys = {}
    for name, field in cls.model_fields.items():
        keys[name] = Key(f"{prefix}{name}", cls, field, section_class(field))
    return types.MappingProxyType(keys)


@functools.cache
def keys_of(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """Return all keys and sections of ``cls`` by dotted path, in the order of declaration."""
    keys: dict[str, Key] = {}
    for key in direct_keys(cls, prefix).values():
        keys[key.path] = key
        if key.section is not None:
            keys.update(keys_of(key.section, f"{key.path}."))
    return types.MappingProxyType(keys)


def section_key(path: str, cls: type[Section]) -> Key:
    """Return a ``Key`` for a section ``cls`` at ``path`` that a plugin added to the schema."""
    summary = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split())
    field = FieldInfo(annotation=cls, default_factory=cls, description=summary)
    return Key(path, cls, field, section=cls)


def attribute_doc(cls: type, name: str) -> str:
    """Return the docstring below attribute ``name`` of ``cls`` or of one of its base classes."""
    # Search the class before its bases: a subclass may declare a key again with another docstring.
    class_docs = (_attribute_docs(base) for base in cls.__mro__ if issubclass(base, Section))
    return next((docs[name] for docs in class_docs if name in docs), "")


@functools.cache
def _attribute_docs(cls: type) -> Mapping[str, str]:
    # Pydantic can read these docstrings too, but it does so when it creates the class. That would
    # add 0.1 s to every start, although only --help shows the texts.
    body = _class_bodies(cls.__module__).get(cls.__name__, [])
    docs = {}
    for statement, next_statement in itertools.pairwise(body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant):
            docs[statement.target.id] = " ".join(str(next_statement.value.value).split())
    return types.MappingProxyType(docs)


@functools.cache
def _class_bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # class of an interactive session: there is no source file
        return {}
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def value_at_path(cfg: object, path: str) -> Any:
    """Return the value at dotted ``path`` of a config object or nested dictionary.

    Raises ``AttributeError`` or ``KeyError`` if there is none.
    """
    for name in path.split("."):
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg
