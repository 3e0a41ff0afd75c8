"""Reading and writing of JSON Lines files. An incomplete line, as after a crash, is skipped."""

import json
import math
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from verl.utils.files import add_path_to_errors, atomic_write

# With these options orjson encodes arrays, dataclasses and dates as ``to_json_types`` does.
_ORJSON_OPTIONS = (
    orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_PASSTHROUGH_DATACLASS | orjson.OPT_PASSTHROUGH_DATETIME
)


def to_json_types(value: object) -> Any:
    """Convert ``value`` to types that JSON can represent.

    Arrays, tensors, tuples and sets become lists, NaN and infinite numbers None. Objects of other
    types become ``str(value)``.
    """
    if isinstance(value, float):
        # Python's json module would write NaN and Infinity, which are not valid JSON.
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
        # orjson refuses integers of more than 64 bits, lone surrogates, and keys that are not
        # strings. Python's encoder accepts them.
        return json.dumps(to_json_types(record), separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class EncodedLines:
    """JSON lines with newlines, as arrays, which Ray sends to another process without a copy."""

    data: np.ndarray  # bytes of all lines
    positions: np.ndarray  # [N + 1], start of each line, and the end

    def __iter__(self) -> Iterator[memoryview]:
        bytes_of_lines = self.data.data
        return (bytes_of_lines[start:end] for start, end in pairwise(self.positions.tolist()))


def encode(records: Iterable[Mapping[str, Any]]) -> EncodedLines:
    """Encode ``records`` as JSON lines."""
    lines = [dumps(record).encode() + b"\n" for record in records]
    positions = np.array(list(accumulate(map(len, lines), initial=0)))
    return EncodedLines(np.frombuffer(b"".join(lines), dtype=np.uint8), positions)


@dataclass(frozen=True, slots=True)
class RowEncoder:
    """Callable that encodes one JSON line per row, for the files of rollouts.

    ``format_lines(data, tokenizer)`` yields the JSON object of each row of a ``DataProto``. The
    encoder can run in the process that generated the rows. Only columns that change after the
    rollout are sent there: the tensors ``tensor_names`` and the other columns ``column_names``.
    """

    format_lines: Callable[[Any, Any], Iterable[Mapping[str, Any]]]
    tensor_names: tuple[str, ...]
    column_names: tuple[str, ...]

    def __call__(self, data: object, tokenizer: object, /) -> EncodedLines:
        """Return one JSON line per row of ``data``."""
        return encode(self.format_lines(data, tokenizer))


def append(path: Path, record: Mapping[str, Any]) -> None:
    """Append ``record`` to ``path`` as one line and flush it to the disk."""
    with add_path_to_errors(path), path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")  # end an incomplete line, which would make this line unreadable
        file.write(f"{dumps(record)}\n".encode())
        # flush() only passes the line to the operating system. fsync() writes it to the disk.
        file.flush()
        os.fsync(file.fileno())


def read(path: Path, max_characters: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield the objects of the file ``path``. Yield nothing if there is no regular file.

    Incomplete lines, and lines that are not a JSON object, are skipped. Reading stops at the end of
    the line in which ``max_characters`` is reached.
    """
    if not path.is_file():  # a pipe or a device may never end
        return
    num_characters = 0
    with path.open(encoding="utf-8", errors="replace") as file:
        for line in file:
            record = _parse(line)
            if record is not None:
                yield record
            num_characters += len(line)
            if max_characters is not None and num_characters >= max_characters:
                return


def _parse(line: str) -> dict[str, Any] | None:
    # A line without newline may be incomplete, even if it is valid JSON.
    if not line.endswith("\n"):
        return None
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def write(path: Path, records: Iterable[Mapping[str, Any] | memoryview]) -> None:
    """Write ``records`` to ``path`` atomically, one per line.

    A ``memoryview`` is a record that ``encode`` has already encoded as a line.
    """
    with atomic_write(path) as file:
        buffer: Any = file.buffer
        for record in records:
            is_encoded = isinstance(record, memoryview)
            buffer.write(record if is_encoded else f"{dumps(record)}\n".encode())


def write_text_atomically(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` atomically: a reader sees the old or the new content."""
    with atomic_write(path) as file:
        file.write(text)
