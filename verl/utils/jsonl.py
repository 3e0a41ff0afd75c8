"""Files of one JSON object a line that survive a crash in the middle of a line."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from verl.utils.files import atomic_write, naming

# Kinds that orjson has a form of its own for, as ``plain`` has them.
_FORM = (
    orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)


def plain(value: object) -> Any:
    """``value`` as JSON can carry it: arrays and tensors become lists, numbers that are not finite
    become null.
    """
    if isinstance(value, (str, bool)) or value is None:
        return value
    if isinstance(value, float):
        # Python would write NaN and Infinity, which no other reader of JSON takes.
        return value if math.isfinite(value) else None
    if isinstance(value, int):
        return value
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, np.generic):
        return plain(value.item())
    to_list = getattr(value, "tolist", None)  # arrays and tensors
    if to_list is not None:
        return plain(to_list())
    return str(value)


def dumps(record: Mapping[str, Any]) -> str:
    """One line without its newline; arrays of numbers are fastest as they are."""
    try:
        return orjson.dumps(record, plain, _FORM).decode()
    except TypeError:
        # What only Python's encoder has a form for: integers of more than 64 bits, halves of
        # surrogate pairs, keys that are no text.
        return json.dumps(plain(record), separators=(",", ":"))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append one line and return when it is on the disk."""
    with naming(path), path.open("a", encoding="utf-8") as file:
        file.write(dumps(record) + "\n")
        # Both: flush() only hands the line to the system, which may lose it with the power.
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, most: int | None = None) -> Iterator[dict[str, Any]]:
    """The objects of ``path``, none if it does not exist; a torn or foreign line is skipped.

    Stops behind the line with which ``most`` characters are read.
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
            if most is not None and characters >= most:
                return


def _parse(line: str) -> dict[str, Any] | None:
    # Without its newline a line may be the torn beginning of one, even where it parses.
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) else None


def write(path: Path, records: Iterable[Mapping[str, Any]]) -> int:
    """Write ``records`` to ``path`` so that it holds either all of them or what it held before;
    returns how many.
    """
    count = 0
    with atomic_write(path) as file:
        for record in records:
            file.write(dumps(record) + "\n")
            count += 1
    return count


def write_text(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` so that a reader sees all of it or what was there before."""
    with atomic_write(path) as file:
        file.write(text)
