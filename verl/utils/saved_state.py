"""Reader of the values in ``state.json`` of a checkpoint, which may be damaged or made by hand."""

import sys
from collections.abc import Callable, Mapping
from typing import Any

SHOWN_CHARACTERS = 80  # maximum number of characters of a value in an error message
_NO_DEFAULT: Any = object()


class InvalidStateError(ValueError):
    """Error: a value in a checkpoint's state is missing or invalid. The message names the key."""


def read_state_value(
    state: object,
    key: str,
    is_valid: Callable[[Any], bool],
    allowed: str,
    default: object = _NO_DEFAULT,
) -> Any:
    """Return ``state[key]``, or ``default`` if there is one and the key is missing.

    Raises ``InvalidStateError`` unless ``state`` is a mapping and ``is_valid(value)`` is true.
    ``allowed`` describes valid values.
    """
    if not isinstance(state, Mapping):
        raise InvalidStateError(
            f"{repr(state)[:SHOWN_CHARACTERS]} instead of the key {key}; allowed: an object"
        )
    if key not in state:
        if default is not _NO_DEFAULT:
            return default
        raise InvalidStateError(f"{key} is missing; allowed: {allowed}")
    check_state_value(key, state[key], is_valid(state[key]), allowed)
    return state[key]


def check_state_value(key: str, value: object, is_valid: bool, allowed: str) -> None:
    """Raise ``InvalidStateError`` unless ``is_valid``. ``allowed`` describes valid values."""
    if not is_valid:
        raise InvalidStateError(f"{key}={repr(value)[:SHOWN_CHARACTERS]}; allowed: {allowed}")


def is_count(value: object) -> bool:
    """Return True for an integer of at least 0."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_not_negative(value: object) -> bool:
    """Return True for a finite number of at least 0."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return False
    return 0 <= value <= sys.float_info.max


def is_json_object(value: object) -> bool:
    """Return True for a JSON object."""
    return isinstance(value, Mapping)
