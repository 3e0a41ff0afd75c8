"""Rows of files: Parquet, and JSON with an object a line."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json")


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``, in order; empty lines are none.

    Raises ``FileNotFoundError`` for a missing file, ``ValueError`` for another kind of file and for
    one that is not what its name says; the message names the line.
    """
    path = Path(path)
    if path.suffix not in SUFFIXES:
        raise ValueError(
            f"{path}: unknown kind of file; allowed: {', '.join(SUFFIXES)} (JSON: an object a "
            "line); fix: convert it"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; fix: mend the path")
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet  # an optional format: imported where it is read

    try:
        for batch in pyarrow.parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowInvalid as error:
        raise ValueError(f"{path}: not a Parquet file: {error}; fix: write it again") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    # By the file and not by splitlines(), which also splits at signs that JSON texts may hold.
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise ValueError(f"{path}, line {number}: not JSON: {error}") from error
            if not isinstance(row, dict):
                raise ValueError(f"{path}, line {number}: a {type(row).__name__}, not an object")
            yield row
