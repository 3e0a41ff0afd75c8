"""Descriptions of config keys (path, type, default, help text, bounds) for help and messages."""

import ast
import dataclasses
import functools
import inspect
import itertools
import textwrap
import types
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from verl.config.settings.section import GpuOnly, NamesCode, Section, Unused

AnnotationT = TypeVar("AnnotationT")
SIGNS_OF_BOUNDS = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}  # attributes of Ge, Gt etc.


@dataclass(frozen=True, slots=True)
class ValueType:
    """Allowed values of a key: the name of its type, and bounds of the value or of its items."""

    type_name: str
    choices: tuple[Any, ...] = ()
    bounds: tuple[str, ...] = ()  # such as (">= 0", "<= 1")
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
        """Return the allowed values as text: ``one of a, b``, ``int >= 1 or null``."""
        null_text = " or null" if self.is_optional else ""
        if self.choices:
            choices_text = ", ".join(map(str, self.choices))
            return f"{'any' if self.is_list else 'one'} of {choices_text}{null_text}"
        type_name = self.type_name.removesuffix(" | None")
        return f"{' '.join([type_name, ' and '.join(self.bounds)]).strip()}{null_text}"


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
    if origin in (list, tuple):
        return _parse_list(origin, arguments)
    if origin is dict:
        return ValueType(_format_annotation(annotation), allows_any_key=True)
    if annotation is Any:
        return ValueType("any value", allows_any_key=True)
    return ValueType(_format_annotation(annotation), bounds=_format_bounds(markers))


def _format_bounds(markers: tuple[Any, ...]) -> tuple[str, ...]:
    bounds = [
        (sign, getattr(marker, name))
        for marker in markers
        for name, sign in SIGNS_OF_BOUNDS.items()
        if hasattr(marker, name)
    ]
    # A large number is written as 1e+06, but an integer with all its digits.
    return tuple(f"{sign} {x if isinstance(x, int) else format(x, 'g')}" for sign, x in bounds)


def _parse_union(arguments: tuple[Any, ...], markers: tuple[Any, ...]) -> ValueType:
    members = [argument for argument in arguments if argument is not types.NoneType]
    member_types = [parse_annotation(member, markers) for member in members]
    type_names = [member_type.type_name for member_type in member_types]
    is_optional = len(members) < len(arguments)
    union_name = " | ".join([*type_names, "None"] if is_optional else type_names)
    # Bounds of one member type do not apply to the others.
    union_type = member_types[0] if len(members) == 1 else ValueType("")
    return dataclasses.replace(union_type, type_name=union_name, is_optional=is_optional)


def _parse_list(container_type: type, arguments: tuple[Any, ...]) -> ValueType:
    item_type = parse_annotation(arguments[0]) if arguments else ValueType("any value")
    list_name = f"list[{item_type.type_name}]"
    if container_type is tuple and arguments[-1] is not Ellipsis:
        list_name = f"list of {len(arguments)} {item_type.type_name}"
    return ValueType(list_name, item_type.choices, item_type.bounds, container_type)


def _format_annotation(annotation: object) -> str:
    if isinstance(annotation, type):
        return annotation.__name__
    if get_origin(annotation) is Annotated:
        return _format_annotation(get_args(annotation)[0])
    if get_origin(annotation) is dict:
        key_type, value_type = map(_format_annotation, get_args(annotation))
        return f"dict[{key_type}, {value_type}]"
    return str(annotation).replace("typing.", "")


@dataclass(frozen=True)
class Key:
    """Description of a config key or of a section, at the dotted ``path``."""

    path: str
    declaring_class: type[Section]
    field: FieldInfo
    section: type[Section] | None = None  # class of a section; None for a key with a value

    @property
    def name(self) -> str:
        return self.path.rpartition(".")[2]

    @property
    def is_section(self) -> bool:
        return self.section is not None

    @property
    def allows_any_key(self) -> bool:
        """True if any key is allowed below this one, because its value is a dictionary."""
        return not self.is_section and self.value_type.allows_any_key

    @functools.cached_property
    def value_type(self) -> ValueType:
        return parse_annotation(self.field.annotation, tuple(self.field.metadata))

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
        return self._find_annotation(Unused)

    @property
    def is_gpu_only(self) -> bool:
        return self._find_annotation(GpuOnly) is not None

    @property
    def code_annotation(self) -> NamesCode | None:
        return self._find_annotation(NamesCode)

    def _find_annotation(self, annotation_type: type[AnnotationT]) -> AnnotationT | None:
        annotations = (item for item in self.field.metadata if isinstance(item, annotation_type))
        return next(annotations, None)

    def describe_allowed(self) -> str:
        return self.value_type.describe_allowed()


def format_default(key: Key) -> str:
    """Return the default value of ``key`` as text, in the form of an override."""
    default = "null" if key.default_value is None else key.default_value
    return str(list(default) if isinstance(default, tuple) else default)


@functools.cache
def collect_direct_keys(cls: type[Section], prefix: str = "") -> Mapping[str, Key]:
    """Return the keys and sections directly in ``cls``, by name; paths begin with ``prefix``."""
    keys = {}
    for name, field in cls.model_fields.items():
        section: Any = field.annotation
        is_section = isinstance(section, type) and issubclass(section, Section)
        keys[name] = Key(f"{prefix}{name}", cls, field, section if is_section else None)
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
    """Return the ``Key`` of section ``cls`` of a plugin; its help is its docstring's summary."""
    # Help texts end without a full stop, because pages and messages append further text to them.
    summary = " ".join((inspect.getdoc(cls) or "").partition("\n\n")[0].split()).removesuffix(".")
    field = FieldInfo(annotation=cls, default_factory=cls, description=summary)
    return Key(path, cls, field, section=cls)


def read_attribute_doc(cls: type, name: str) -> str:
    """Return the docstring below attribute ``name`` of ``cls`` or of one of its base classes."""
    # Search the class before its bases: a subclass may declare a key again with another docstring.
    class_docs = (
        _read_attribute_docs(base_class)
        for base_class in cls.__mro__
        if issubclass(base_class, Section)
    )
    return next((help_texts[name] for help_texts in class_docs if name in help_texts), "")


@functools.cache
def _read_attribute_docs(cls: type) -> Mapping[str, str]:
    # Pydantic can read these docstrings too, but it does so when it creates the class. That would
    # add 0.1 s to every start, although only --help shows the texts.
    try:
        syntax_tree = ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # a class of an interactive session has no source file
        return {}
    class_node: Any = syntax_tree.body[0]
    help_texts = {}
    for statement, next_statement in itertools.pairwise(class_node.body):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(next_statement, ast.Expr) and isinstance(next_statement.value, ast.Constant):
            help_texts[statement.target.id] = " ".join(str(next_statement.value.value).split())
    return types.MappingProxyType(help_texts)


def value_at_path(cfg: object, path: str) -> Any:
    """Return the value at dotted ``path`` of a config object or nested dictionary.

    Raises ``AttributeError`` or ``KeyError`` if there is none.
    """
    for name in path.split("."):
        cfg = cfg[name] if isinstance(cfg, Mapping) else getattr(cfg, name)
    return cfg
