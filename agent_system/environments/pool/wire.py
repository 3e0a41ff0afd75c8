"""Wire format between the pool and a worker: one JSON object per line.

Numpy scalars are sent as numbers. Numpy arrays and images are sent as dtype, shape and base64 text,
and are received as arrays.
"""

import base64
import json
import math
import numbers
import re
from typing import Any

import numpy as np

from agent_system.environments.env import Observation

# Bytes of the longest valid line: 4000 x 4000 pixels of three bytes fit in base64.
MAX_LINE = 64 * 1024 * 1024
SURROGATES = re.compile("[\ud800-\udfff]")
_ARRAY = "__array__"


class GarbageReturn(ValueError):
    """Return value of an environment, or message of a worker, that violates the protocol."""


def encode(message: dict[str, Any]) -> bytes:
    """Return ``message`` as one line. Raises ``TypeError`` for values that JSON cannot express."""
    return json.dumps(message, default=_plain, separators=(",", ":")).encode() + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    """Return the message in ``line``. Raises ``InvalidEnvReturn`` if it is no JSON object."""
    try:
        message = json.loads(line, object_hook=_revive)
    except (ValueError, UnicodeDecodeError) as error:
        raise GarbageReturn(f"not a JSON line: {line[:120]!r}") from error
    if not isinstance(message, dict):
        raise GarbageReturn(f"not a JSON object: {line[:120]!r}")
    return message


def pack_observation(observation: Observation) -> list[Any]:
    """Return the fields of the observation as a list of JSON values."""
    return [
        observation.text,
        observation.image,
        observation.anchor,
        observation.info,
        observation.opening,
    ]


def unpack_observation(fields: list[Any]) -> Observation:
    """Return the observation that ``pack_observation`` packed."""
    text, image, anchor, info, opening = fields
    return Observation(text=text, image=image, anchor=anchor, info=info, opening=opening)


def check_reset(result: object) -> Observation:
    """Return ``result``. Raises ``InvalidEnvReturn`` unless it is a valid result of ``reset``."""
    return _check_observation(result, "reset")


def check_step(result: object) -> tuple[Observation, float, bool, dict[str, Any]]:
    """Return ``result`` with plain Python types.

    Raises ``InvalidEnvReturn`` unless it is a valid result of ``step``.
    """
    if not isinstance(result, (tuple, list)) or len(result) != 4:
        raise GarbageReturn(
            f"step returned {_short(result)}, not (observation, reward, done, info)"
        )
    observation, reward, done, info = result
    _check_observation(observation, "step")
    # A NaN or infinite reward would make all advantages of the group NaN.
    if not isinstance(reward, (numbers.Real, np.number, np.bool_)) or not math.isfinite(reward):
        raise GarbageReturn(f"step returned the reward {_short(reward)}, not a finite number")
    if not isinstance(done, (bool, np.bool_)):
        raise GarbageReturn(f"step returned done = {_short(done)}, not a bool")
    _check_info(info, "step")
    return observation, float(reward), bool(done), info


def _check_observation(value: object, where: str) -> Observation:
    if not isinstance(value, Observation):
        raise GarbageReturn(f"{where} returned {_short(value)}, not an Observation")
    if not _is_text(value.text) or not (value.anchor is None or _is_text(value.anchor)):
        raise GarbageReturn(
            f"{where} returned an Observation with text {_short(value.text)} and anchor "
            f"{_short(value.anchor)}, not valid Unicode strings"
        )
    for message in value.opening:
        if not _is_text(message.get("role")) or not _is_text(message.get("content")):
            raise GarbageReturn(
                f"{where} returned an Observation whose opening has the message "
                f"{_short(message)}, not a dict with the strings role and content"
            )
    _check_info(value.info, where)
    return value


def _check_info(info: object, where: str) -> None:
    if not isinstance(info, dict):
        raise GarbageReturn(f"{where} returned info = {_short(info)}, not a dict")
    for key in ("won", "is_action_valid"):
        # Refuse fractions, which are no truth values, and NaN, which ``bool`` reads as True.
        if _scalar(info.get(key, False)) not in (0, 1):
            raise GarbageReturn(f"{where} returned info[{key!r}] = {_short(info[key])}, not a bool")
    actions = info.get("admissible_actions", ())
    if not isinstance(actions, (list, tuple)) or not all(map(_is_text, actions)):
        raise GarbageReturn(
            f"{where} returned info['admissible_actions'] = {_short(actions)}, not a list of "
            "strings"
        )


def _scalar(value: object) -> object:
    """Return ``value`` if it is a number or bool, else None."""
    return value if isinstance(value, (numbers.Real, np.bool_)) else None


def _is_text(value: object) -> bool:
    """Return True for a string without lone surrogates, which tokenizers refuse."""
    return isinstance(value, str) and SURROGATES.search(value) is None


def _short(value: object) -> str:
    return f"{type(value).__name__} {str(value)[:80]!r}"


def _plain(value: object) -> object:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, np.ndarray) or hasattr(value, "__array_interface__"):
        array = np.ascontiguousarray(value)
        # The bytes of an object array are pointers, which are invalid in another process.
        if array.dtype.hasobject:
            raise TypeError("an array of objects cannot be sent as JSON")
        return {
            _ARRAY: base64.b64encode(array.tobytes()).decode(),
            "dtype": array.dtype.str,
            "shape": array.shape,
        }
    if isinstance(value, (set, frozenset)):
        # JSON has no sets. Sort them, because their order differs between processes.
        return sorted(value)
    raise TypeError(f"{type(value).__name__} cannot be sent as JSON")


def _revive(value: dict[str, Any]) -> Any:
    if _ARRAY not in value:
        return value
    array = np.frombuffer(base64.b64decode(value[_ARRAY]), dtype=np.dtype(value["dtype"]))
    return array.reshape(value["shape"])
