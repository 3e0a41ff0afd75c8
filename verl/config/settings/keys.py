"""Descriptions of config keys (path, type, default, help text, bounds) for help and messages."""

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

from annotated_types import Ge, Gt, Le
from pydantic.fields import FieldInfo

from verl.config.settings.section import GpuOnly, RunsCode, Section, Unused

AnnotationT = TypeVar("AnnotationT")


@dataclass(frozen=True, slots=True)
class ValueType:
    """Allowed values of a key: the name of its type, and bounds of the value or of its items."""

    type_name: str
    choices: tuple[Any, ...] = ()
    minimum: float | None = None
    maximum: float | None = None
    above: float | None = None  # exclusive lower bound
    container_type: type | None = None  # list or tuple if the value is one
    is_optional: bool = False
    allows_any_key: bool = False  # a dictionary: any key is allowed below this one

    @property
    def is_list(self) -> bool:
        return self.container_type is not None

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
        bounds = [f">= {_format_bound(self.minimum)}"] if self.minimum is not None else []
        bounds += [f"> {_format_bound(self.above)}"] if self.above is not None else []
        bounds += [f"<= {_format_bound(self.maximum)}"] if self.maximum is not None else []
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
        type_names = sorted({type(choice).__name__ for choice in arguments})
        return ValueType(" | ".join(type_names), choices=arguments)
    if origin in (Union, types.UnionType):
        return _parse_union(arguments, markers)
    minimum = next((_as_number(marker.ge) for marker in markers if isinstance(marker, Ge)), None)
    maximum = next((_as_number(marker.le) for marker in markers if isinstance(marker, Le)), None)
    above = next((_as_number(marker.gt) for marker in markers if isinstance(marker, Gt)), None)
    if origin in (list, tuple):
        return _parse_list(origin, arguments)
    if origin is dict:
        return ValueType(_format_annotation(annotation), allows_any_key=True)
    if annotation is Any:
        return ValueType("any value", allows_any_key=True)
    return ValueType(_format_annotation(annotation), (), minimum, maximum, above)


def _format_bound(bound: float) -> str:
    return str(bound) if isinstance(bound, int) else f"{bound:g}"


def _as_number(bound: object) -> float | None:
    return bound if isinstance(bound, int | float) else None


def _parse_union(arguments: tuple[Any, ...], markers: tuple[Any, ...]) -> ValueType:
    member_types = [
        parse_annotation(argument, markers)
        for argument in arguments
        if argument is not types.NoneType
    ]
    is_optional_union = len(member_types) < len(arguments)
    names = [member_type.type_name for member_type in member_types]
    union_name = " | ".join([*names, "None"] if is_optional_union else names)
    if len(member_types) > 1:  # bounds of one member type do not apply to the others
        return ValueType(union_name, is_optional=is_optional_union)
    single_type = member_types[0]
    return dataclasses.replace(single_type, type_name=union_name, is_optional=is_optional_union)


def _parse_list(container_type: type, arguments: tuple[Any, ...]) -> ValueType:
    item_type = parse_annotation(arguments[0]) if arguments else ValueType("any value")
    list_name = f"list[{item_type.type_name}]"
    if container_type is tuple and arguments[-1] is not Ellipsis:
        list_name = f"list of {len(arguments)} {item_type.type_name}"
    return ValueType(
        list_name,
        item_type.choices,
        item_type.minimum,
        item_type.maximum,
        item_type.above,
        container_type=container_type,
    )


def _format_annotation(annotation: object) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    if get_origin(annotation) is Annotated:
        return _format_annotation(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        key, value = map(_format_annotation, get_args(annotation))
        return f"dict[{key}, {value}]"
    return str(annotation).replace("typing.", "")


@dataclass(frozen=True, slots=True)
class Key:
    """Description of a config key or of a section, at the dotted ``path``.

    ``section`` is the class of a section; None for a key with a value.
    """

    path: str
    declaring_class: type[Section]
    field: FieldInfo
    section: type[Section] | None = None

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        """True if this entry is a section, which holds keys instead of a value."""
        return self.section is not None

    @property
    def allows_any_key(self) -> bool:
        """True if any key is allowed below this one, because its value is a dictionary."""
        return not self.is_section and self.value_type.allows_any_key

    @property
    def value_type(self) -> ValueType:
        """Return the type and the bounds of the value."""
        return _parse_field_type(self.declaring_class, self.name)

    @property
    def default_value(self) -> Any:
        """Return the value that applies if the key is not set."""
        return self.field.get_default(call_default_factory=True)

    @property
    def help_text(self) -> str:
        """Return the help text, which is the docstring below the key."""
        return self.field.description or read_attribute_doc(self.declaring_class, self.name)

    @property
    def unused_annotation(self) -> Unused | None:
        """Return the ``Unused`` annotation of a key without effect; None for a key with effect."""
        return self._find_annotation(Unused)

    @property
    def is_gpu_only(self) -> bool:
        """True if the key has no effect on CPU."""
        return self._find_annotation(GpuOnly) is not None

    @property
    def code_annotation(self) -> RunsCode | None:
        """Return the ``RunsCode`` annotation of a key that can name code; None for others."""
        return self._find_annotation(RunsCode)

    def _find_annotation(self, annotation_type: type[AnnotationT]) -> AnnotationT | None:
        annotations = (item for item in self.field.metadata if isinstance(item, annotation_type))
        return next(annotations, None)

    def describe_allowed(self) -> str:
        """Return the allowed values as text."""
        return self.value_type.describe_allowed()


def format_default(key: Key) -> str:
    """Return the default value of ``key`` as text, in the form of an override."""
    default = "null" if key.default_value is None else key.default_value
    return str(list(default) if isinstance(default, tuple) else default)


@functools.cache
def _parse_field_type(owner: type[Section], name: str) -> ValueType:
    field = owner.model_fields[name]
    return parse_annotation(field.annotation, tuple(field.metadata))


def get_section_class(field: FieldInfo) -> type[Section] | None:
    """Return the section class of the pydantic ``field``; None if it holds a value."""
    field_type = field.annotation
    if isinstance(field_type, type) and issubclass(field_type, Section):
        return field_type
    return None


@functools.cache
def collect_direct_keys(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """Return the keys and sections of class ``cls`` by name, without those of its sections.

    ``prefix`` is put before their paths.
    """
    keys = {}
    for name, field in cls.model_fields.items():
        keys[name] = Key(f"{prefix}{name}", cls, field, get_section_class(field))
    return types.MappingProxyType(keys)


@functools.cache
def collect_section_keys(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """Return all keys and sections below section class ``cls``, by dotted path, in order."""
    keys: dict[str, Key] = {}
    for key in collect_direct_keys(cls, prefix).values():
        keys[key.path] = key
        if key.section is not None:
            keys.update(collect_section_keys(key.section, f"{key.path}."))
    return types.MappingProxyType(keys)


def make_section_key(path: str, cls: type[Section]) -> Key:
    """Return the ``Key`` of the section ``cls`` that a plugin added to the schema at ``path``.

    Its help text is the summary of the docstring of ``cls``, without the final full stop.
    """
    # Help texts end without a full stop, because pages and messages append further text to them.
    summary = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()).removesuffix(".")
    field = FieldInfo(annotation=cls, default_factory=cls, description=summary)
    return Key(path, cls, field, section=cls)


def read_attribute_doc(cls: type, name: str) -> str:
    """Return the docstring below attribute ``name`` of ``cls`` or of one of its base classes."""
    # Search the class before its bases: a subclass may declare a key again with another docstring.
    class_docs = (_read_attribute_docs(base) for base in cls.__mro__ if issubclass(base, Section))
    return next((help_texts[name] for help_texts in class_docs if name in help_texts), "")


@functools.cache
def _read_attribute_docs(cls: type) -> Mapping[str, str]:
    # Pydantic can read these docstrings too, but it does so when it creates the class. That would
    # add 0.1 s to every start, although only --help shows the texts.
    class_body = _read_class_bodies(cls.__module__).get(cls.__name__, [])
    help_texts = {}
    for statement, next_statement in itertools.pairwise(class_body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant):
            help_texts[statement.target.id] = " ".join(str(next_statement.value.value).split())
    return types.MappingProxyType(help_texts)


@functools.cache
def _read_class_bodies(module: str) -> Mapping[str, list[ast.stmt]]:
    try:
        tree = ast.parse(inspect.getsource(sys.modules[module]))
    except (OSError, TypeError):  # a class of an interactive session has no source file
        return {}
    return {node.name: node.body for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}


def value_at_path(cfg: object, path: str) -> Any:
    """Return the value at dotted ``path`` of a config object or nested dictionary.

    Raises ``AttributeError`` or ``KeyError`` if there is none.
    """
    for name in path.split("."):
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg
