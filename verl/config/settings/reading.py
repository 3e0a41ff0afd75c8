"""Conversion of plain values to a section, with a message for each wrong key."""

import contextlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from pydantic import ValidationError
from pydantic_core import ErrorDetails, PydanticUndefined

from verl.config.settings.errors import (
    ConfigError,
    InvalidSettingError,
    MissingKeyError,
    Problem,
    get_problem_code,
)
from verl.config.settings.hints import build_unknown_key_problem, nearest_name
from verl.config.settings.keys import (
    Key,
    ValueType,
    collect_direct_keys,
    collect_section_keys,
    value_at_path,
)
from verl.config.settings.section import Section

SectionT = TypeVar("SectionT", bound=Section)
OUT_OF_BOUNDS_ERROR_TYPES = (
    "greater_than",
    "less_than",
    "literal_error",
    "missing",
    "too_long",
    "too_short",
    "finite_number",
)
TRUE_WORDS = ("true", "yes", "on", "y", "t", "1")
FALSE_WORDS = ("false", "no", "off", "n", "f", "0")


@dataclass
class ReadResult(Generic[SectionT]):
    """Result of ``read_section``: a section without the refused keys, and a message for each."""

    section: SectionT | None = None  # None if the other values cannot be read either
    problems: dict[str, Problem] = field(default_factory=dict)  # path of a key -> message


def read_section_or_raise(
    cls: type[SectionT], values: Mapping[str, Any] | None, path: str = ""
) -> SectionT:
    """Convert ``values`` to section ``cls``; raise ``ConfigError`` that names all wrong keys."""
    read_result = read_section(cls, values or {}, path)
    if read_result.problems or read_result.section is None:
        raise ConfigError(read_result.problems.values())
    return read_result.section


def read_section(
    cls: type[SectionT], values: Mapping[str, Any], path: str = ""
) -> ReadResult[SectionT]:
    """Convert ``values`` to the section ``cls`` at the dotted ``path`` (empty: the root)."""
    prefix = f"{path}." if path else ""
    read_result: ReadResult[SectionT] = ReadResult()
    # YAML and JSON have no tuples.
    remaining_values = _convert_values(values, cls, _convert_list_to_tuple)
    refused_keys: list[Key] = []
    # Validate again without the refused keys, so that checks of the other keys can run.
    while True:
        try:
            read_result.section = cls.model_validate(remaining_values)
            break
        except ValidationError as error:
            validation_errors = error.errors()
        accepted_values: dict[str, Any] = remaining_values
        for details in validation_errors:
            mistake = _Mistake.from_details(details, cls, prefix, remaining_values)
            read_result.problems.setdefault(mistake.path, mistake.describe_mistake(cls, prefix))
            refused_keys += [mistake.key] if mistake.key else []
            path_names = mistake.path.removeprefix(prefix).split(".")
            accepted_values = _without_key(accepted_values, path_names)
        # If all invalid keys are absent from the values, their defaults are invalid. Stop, because
        # removing values cannot help.
        if accepted_values == remaining_values:
            return read_result
        remaining_values = accepted_values
    for key in refused_keys:
        # Reading a refused key must raise MissingKeyError and not return the default.
        delete_key(read_result.section, key.path.removeprefix(prefix))
    return read_result


@dataclass(frozen=True)
class _Mistake:
    path: str
    value: Any
    key: Key | None  # None: there is no such key
    details: ErrorDetails

    @classmethod
    def from_details(
        cls, details: ErrorDetails, section: type[Section], prefix: str, values: Mapping[str, Any]
    ) -> "_Mistake":
        """Return the mistake that the error ``details`` of pydantic describe.

        ``details`` may name an item inside the value of a key. The path of the mistake ends at
        this key.
        """
        error = details.get("ctx", {}).get("error")
        location = [
            *details["loc"],
            *([error.key] if isinstance(error, InvalidSettingError) else []),
        ]
        path = prefix
        key: Key | None = None
        current_section: type[Section] | None = section
        value: Any = values
        is_value_given = True
        while current_section is not None and location:
            name = str(location.pop(0))
            key = collect_direct_keys(current_section, path).get(name)
            path += f"{name}."
            # Use None if ``value`` is no dictionary: for ``a: 1``, the path ``a.b`` has no value.
            is_value_given = isinstance(value, Mapping) and name in value
            value = value.get(name) if isinstance(value, Mapping) else None
            current_section = key.section if key is not None else None
        if not is_value_given and key is not None and not key.is_section:
            value = key.default_value
        return cls(path.removesuffix("."), value, key, details)

    def describe_mistake(self, root_section: type[Section], prefix: str) -> Problem:
        """Return the message; for an unknown key it names a similar key of ``root_section``."""
        key = self.key
        if key is None:
            return build_unknown_key_problem(
                self.path, self.value, collect_section_keys(root_section, prefix)
            )
        setting = f"{self.path}={_format_value(self.value)}"
        if key.is_section:
            fix = f"set its keys: {self.path}.KEY=..."
            return Problem(f"{setting}: a section, not a value; {fix}", "wrong_type")
        if self.value is PydanticUndefined:
            why = f"it has no value and no default; allowed: {key.describe_allowed()}"
            return Problem(f"{self.path}: {why}; fix: {self.path}=VALUE", "missing_key")
        error = self.details.get("ctx", {}).get("error")
        if isinstance(error, ValueError):
            reason = error.reason if isinstance(error, InvalidSettingError) else error
            return Problem(f"{setting}: {reason}", get_problem_code(error, "out_of_range"))
        is_out_of_bounds = self.details["type"].startswith(OUT_OF_BOUNDS_ERROR_TYPES)
        why = "not allowed" if is_out_of_bounds else "wrong type"
        text = f"{setting}: {why}; allowed: {key.describe_allowed()}; fix: {self._suggest_fix(key)}"
        return Problem(text, "out_of_range" if is_out_of_bounds else "wrong_type")

    def _suggest_fix(self, key: Key) -> str:
        choices = key.value_type.choices
        given_values = self.value if isinstance(self.value, list | tuple) else [self.value]
        invalid_values = [str(item) for item in given_values if choices and item not in choices]
        suggestion = nearest_name(invalid_values[0], map(str, choices)) if invalid_values else None
        if suggestion:
            return f"did you mean {suggestion}?"
        default = "null" if key.default_value is None else _format_value(key.default_value)
        return f"{key.path}={default} is the default"


def _format_value(value: object) -> str:
    return repr(list(value) if isinstance(value, tuple) else value)


def _without_key(values: Mapping[str, Any], path_names: list[str]) -> dict[str, Any]:
    remaining_values: dict[str, Any] = dict(values)
    name = path_names[0]
    nested_values = remaining_values.get(name)
    if len(path_names) > 1 and isinstance(nested_values, Mapping):
        remaining_values[name] = _without_key(nested_values, path_names[1:])
    else:
        remaining_values.pop(name, None)
    return remaining_values


def delete_key(section: Section, path: str) -> None:
    """Delete the key at ``path`` below ``section``: reading it then raises ``MissingKeyError``."""
    parent_path, _, name = path.rpartition(".")
    # The parent may have been refused, or it may be an entry of a dictionary.
    with contextlib.suppress(MissingKeyError, KeyError):
        parent = value_at_path(section, parent_path) if parent_path else section
        if isinstance(parent, Section):
            vars(parent).pop(name, None)
            (parent.__pydantic_extra__ or {}).pop(name, None)


# ---- conversion of values from files and command lines --------------------------------------


def convert_text_values(values: Mapping[str, Any], cls: type[Section]) -> dict[str, Any]:
    """Return ``values`` converted to the types of ``cls``, for values of files and command lines.

    For a list, ``console`` becomes ``["console"]``. For an optional text, ``false`` becomes None.
    For a boolean, ``yes`` becomes True. For a text, 4 becomes ``"4"``. For a number, ``"4"``
    becomes 4. Keys of dictionaries become text. A text that begins with ``~/`` is a path in the
    home directory.
    """
    return _convert_values(values, cls, _convert_text_value)


def _convert_values(
    values: Mapping[str, Any], cls: type[Section], convert: Callable[[Any, ValueType], Any]
) -> dict[str, Any]:
    """Apply ``convert`` to the values of the keys that ``cls`` and its sections declare."""
    converted_values = dict(values)
    for name, key in collect_direct_keys(cls).items():
        value = values.get(name)
        if name in values and key.section is None:
            converted_values[name] = convert(value, key.value_type)
        elif key.section is not None and isinstance(value, Mapping):
            converted_values[name] = _convert_values(value, key.section, convert)
    return converted_values


def _convert_list_to_tuple(value: Any, value_type: ValueType) -> Any:
    should_be_tuple = isinstance(value, list) and value_type.container_type is tuple
    return tuple(value) if should_be_tuple else value


def _convert_text_value(value: Any, value_type: ValueType) -> Any:
    if value_type.allows_any_key:
        if isinstance(value, Mapping):
            return {str(name): item for name, item in value.items()}
        return value
    if value_type.is_list:
        items = [value] if isinstance(value, str) else value
        if isinstance(items, list) and value_type.is_text:
            return [_as_text(item) for item in items]
        return items
    if value is False and value_type.is_optional and value_type.is_text:
        return None
    if value_type.is_text:
        return _as_text(value)
    if isinstance(value, str):
        return _parse_text(value, value_type.type_name.removesuffix(" | None"))
    # type() and not isinstance(), because bool is a subclass of int.
    if type(value) is int and value in (0, 1) and value_type.type_name.startswith("bool"):
        return bool(value)
    return value


def _as_text(value: object) -> Any:
    if isinstance(value, str) and value.startswith("~/"):
        return os.path.expanduser(value)
    return str(value) if isinstance(value, int | float) else value


def _parse_text(text: str, type_name: str) -> Any:
    lower_text = text.strip().lower()
    if type_name == "bool" and lower_text in TRUE_WORDS + FALSE_WORDS:
        return lower_text in TRUE_WORDS
    parse_number = {"int": int, "float": float}.get(type_name)
    try:
        return lower_text if parse_number is None else parse_number(lower_text)
    except ValueError:
        return text
