"""JSON Lines files (one object per line) whose readers skip a line that a crash cut off."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from verl.utils.files import add_path_to_errors, atomic_write

# Options under which orjson and ``to_json_types`` agree on arrays, dataclasses and dates.
_ORJSON_OPTIONS = (
    orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)


def to_json_types(value: object) -> Any:
    """Convert ``value`` to JSON types.

    Arrays, tensors and sets become lists, not finite numbers null, other objects their text.
    """
    if isinstance(value, float):
        # Python would write NaN and Infinity, which are not JSON.
        return value if math.isfinite(value) else None
    if isinstance(value, str | int) or value is None:
        return value
    if isinstance(value, dict):
        return {str(key): to_json_types(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [to_json_types(item) for item in value]
    if isinstance(value, np.generic):
        return to_json_types(value.item())
    to_list = getattr(value, "tolist", None)  # arrays and tensors
    if to_list is not None:
        return to_json_types(to_list())
    return str(value)


def dumps(record: Mapping[str, Any]) -> str:
    """Encode ``record`` as one JSON line without newline. Values may be arrays and tensors."""
    try:
        return orjson.dumps(record, to_json_types, _ORJSON_OPTIONS).decode()
    except TypeError:
        # Only Python's encoder accepts integers of more than 64 bits, lone surrogates, and keys
        # that are not strings.
        return json.dumps(to_json_types(record), separators=(",", ":"))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append ``record`` to ``path`` as one line and flush it to the disk."""
    with add_path_to_errors(path), path.open("a", encoding="utf-8") as file:
        file.write(dumps(record) + "\n")
        # flush() only passes the line to the operating system; fsync() writes it to the disk.
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, max_characters: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of ``path``; none if it does not exist.

    Skips incomplete lines and other values. Stops after ``max_characters``, at the end of a line.
    """
    if not path.exists():
        return
    characters = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parse(line)
            if record is not None:
                yield record
            characters += len(line)
            if max_characters is not None and characters >= max_characters:
                return


def _parse(line: str) -> dict[str, Any] | None:
    # A line without newline may be incomplete, even if it parses.
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write ``records`` to ``path`` atomically; return their number."""
    count = 0
    with atomic_write(path) as file:
        for record in records:
            file.write(dumps(record) + "\n")
            count += 1
    return count


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees the old or the new content."""
    with atomic_write(path) as file:
        file.write(text)
