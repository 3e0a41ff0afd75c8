"""Wire format between the pool and a worker: one JSON object per line.

Numpy scalars are sent as numbers. Numpy arrays and images are sent as dtype, shape and base64 text,
and are received as arrays.
"""

import base64
import dataclasses
import json
import math
import numbers
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from agent_system.environments.env import TOOL_RESULTS, Observation, Step
from rlvcr.levels import LEVELS
from verl.records import ANSWER, REWARD_PARTS

# Bytes of the longest valid line: 4000 x 4000 pixels of three bytes fit in base64.
MAX_LINE_BYTES = 64 * 1024 * 1024
SURROGATES = re.compile("[\ud800-\udfff]")
_ARRAY_KEY = "__array__"


class InvalidEnvReplyError(ValueError):
    """Return value of an environment, or message of a worker, that violates the protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """Return ``message`` as one line. Raises ``TypeError`` for values that JSON cannot express."""
    return json.dumps(message, default=_encode_value, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message in ``line``. Raises ``InvalidEnvReplyError`` if it is no JSON object."""
    try:
        message = json.loads(line, object_hook=_decode_array)
    except (ValueError, UnicodeDecodeError) as error:
        raise InvalidEnvReplyError(f"not a JSON line: {line[:120]!r}") from error
    if not isinstance(message, dict):
        raise InvalidEnvReplyError(f"not a JSON object: {line[:120]!r}")
    return message


def pack_observation(observation: Observation) -> list[Any]:
    """Return the fields of the observation in order; ``Observation(*fields)`` is the inverse."""
    return [getattr(observation, field.name) for field in dataclasses.fields(Observation)]


def check_reset(result: object) -> Observation:
    """Return ``result``. Raises ``InvalidEnvReplyError`` if ``reset`` must not return it."""
    return _check_observation(result, "reset")


def check_step(result: object) -> Step:
    """Return ``result`` with plain Python types.

    Raises ``InvalidEnvReplyError`` unless it is a valid result of ``step``.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 4:
        raise InvalidEnvReplyError(
            f"step returned {_describe_value(result)}, not (observation, reward, done, info)"
        )
    observation, reward, done, info = result
    _check_observation(observation, "step")
    # A NaN or infinite reward would make all advantages of the group NaN.
    if not _is_finite_number(reward):
        raise InvalidEnvReplyError(
            f"step returned the reward {_describe_value(reward)}, not a finite number"
        )
    if not isinstance(done, (bool, np.bool_)):
        raise InvalidEnvReplyError(f"step returned done = {_describe_value(done)}, not a bool")
    _check_info(info, "step")
    return observation, float(reward), bool(done), info


def _check_observation(value: object, method: str) -> Observation:
    if not isinstance(value, Observation):
        raise InvalidEnvReplyError(
            f"{method} returned {_describe_value(value)}, not an Observation"
        )
    if not _is_valid_unicode(value.text) or not (
        value.anchor is None or _is_valid_unicode(value.anchor)
    ):
        raise InvalidEnvReplyError(
            f"{method} returned an Observation with text {_describe_value(value.text)} and anchor "
            f"{_describe_value(value.anchor)}, not valid Unicode strings"
        )
    for message in value.opening:
        if not isinstance(message, dict) or not all(
            _is_valid_unicode(message.get(key)) for key in ("role", "content")
        ):
            raise InvalidEnvReplyError(
                f"{method} returned an Observation whose opening has the message "
                f"{_describe_value(message)}, not a dict with the strings role and content"
            )
    _check_info(value.info, method)
    return value


def _check_info(info: object, method: str) -> None:
    if not isinstance(info, dict):
        raise InvalidEnvReplyError(f"{method} returned info = {_describe_value(info)}, not a dict")
    for key in ("won", "is_action_valid"):
        # Refuse fractions, which are no truth values, and NaN, which ``bool`` reads as True.
        value = info.get(key, False)
        if not isinstance(value, (numbers.Real, np.bool_)) or value not in (0, 1):
            raise InvalidEnvReplyError(
                f"{method} returned info[{key!r}] = {_describe_value(value)}, not a bool"
            )
    for key, (is_valid, expected_form) in _CHECKS_OF_INFO.items():
        value = info.get(key)
        if value is not None and not is_valid(value):
            raise InvalidEnvReplyError(
                f"{method} returned info[{key!r}] = {_describe_value(value)}, not {expected_form}"
            )


def _are_actions(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_is_valid_unicode, value))


def _are_rewards(value: object) -> bool:
    return isinstance(value, dict) and all(
        _is_valid_unicode(name) and _is_finite_number(reward) for name, reward in value.items()
    )


def _is_finite_number(value: object) -> bool:
    try:
        return isinstance(value, (numbers.Real, np.bool_)) and math.isfinite(value)
    except OverflowError:  # an integer beyond float64
        return False


def _is_thinking_level(value: object) -> bool:
    is_integer = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_integer and value in LEVELS


def _are_tool_results(value: object) -> bool:
    return isinstance(value, (list, tuple)) and all(
        isinstance(result, dict) and _is_valid_unicode(result.get("content")) for result in value
    )


def _is_valid_unicode(value: object) -> bool:
    """Return True for a string without lone surrogates, which tokenizers refuse."""
    return isinstance(value, str) and SURROGATES.search(value) is None


# Keys of ``info`` that prompts, metrics or estimators use. None means that there is no value.
_CHECKS_OF_INFO: dict[str, tuple[Callable[[object], bool], str]] = {
    "admissible_actions": (_are_actions, "a list of strings"),
    "situation": (_is_valid_unicode, "a string"),
    "needed_level": (_is_thinking_level, "an integer from 1 to 4"),
    ANSWER: (_is_valid_unicode, "a string"),
    REWARD_PARTS: (_are_rewards, "a dict of finite numbers by name"),
    TOOL_RESULTS: (_are_tool_results, "a list of dicts with the string content"),
}


def _describe_value(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


def _encode_value(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):
        array = np.ascontiguousarray(value)
        # The bytes of an object array are pointers, which are invalid in another process.
        if array.dtype.hasobject:
            raise TypeError("an array of objects cannot be sent as JSON")
        return {
            _ARRAY_KEY: base64.b64encode(array.tobytes()).decode(),
            "dtype": array.dtype.str,
            "shape": array.shape,
        }
    if isinstance(value, (set, frozenset)):
        # JSON has no sets. Sort them, because their order differs between processes.
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def _decode_array(value: dict[str, Any]) -> Any:
    if _ARRAY_KEY not in value:
        return value
    array = np.frombuffer(base64.b64decode(value[_ARRAY_KEY]), dtype=np.dtype(value["dtype"]))
    return array.reshape(value["shape"])
