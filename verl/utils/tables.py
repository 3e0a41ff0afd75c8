"""Reader of the rows of Parquet and JSON Lines files."""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json")
MAX_LINE = 16_000_000  # bytes; parsing a longer row would take minutes
BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TO_UTF8 = "fix: iconv -f ENCODING -t UTF-8 FILE > NEW"
ALLOWED_LINES = "allowed: one object per line"
# Command that converts a file with one JSON value to lines, by the first character of the file.
CONVERT_COMMANDS = {"[": "jq -c '.[]' FILE > NEW.jsonl", "{": "jq -c . FILE > NEW.jsonl"}


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Return an iterator over the rows of ``path``. Empty lines are skipped.

    A file without a suffix is read as JSON Lines. Raises ``FileNotFoundError`` for a missing file,
    and ``ValueError`` that names file and line for content that does not match the suffix.
    """
    path = Path(path)
    if path.suffix not in (*SUFFIXES, ""):
        raise ValueError(
            f"{path}: unknown kind of file; allowed: {', '.join(SUFFIXES)} (JSON: one object per "
            "line); fix: convert the file"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; fix: correct the path")
    return _read_parquet_rows(path) if path.suffix == ".parquet" else _read_json_rows(path)


def _read_parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet  # an optional format: imported where it is read
    except ImportError as error:
        raise ValueError(
            f"{path}: reading Parquet needs pyarrow; fix: pip install pyarrow"
        ) from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two columns have the name {twice[0]!r}; allowed: unique names")
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    # A damaged page raises OSError, text that is not UTF-8 ValueError, and a date before year 1
    # OverflowError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: not a Parquet file: {why}; fix: write the file again") from error


def _read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        lines_read = 0
        # Split at line feeds only: splitlines() also splits at characters that JSON texts contain.
        while line := file.readline(MAX_LINE + 1):
            lines_read += 1
            row = _parse_json_row(line, f"{path}, line {lines_read}", is_first_line=lines_read == 1)
            if row is not None:
                yield row


def _parse_json_row(line: bytes, where: str, is_first_line: bool) -> dict[str, Any] | None:
    """Return the object in ``line``, or None for a blank line. ``where`` names it in errors."""
    if len(line) > MAX_LINE:
        raise ValueError(
            f"{where}: longer than {MAX_LINE:,} bytes; allowed: shorter rows; fix: remove the row"
        )
    if is_first_line and line.startswith(BOMS):
        raise ValueError(f"{where}: UTF-16 text; allowed: UTF-8; {TO_UTF8}")
    try:
        text = line.decode("utf-8-sig" if is_first_line else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise ValueError(
            f"{where}: not UTF-8 text ({error.reason}, byte {line[error.start]:#04x} in column "
            f"{error.start + 1}); allowed: UTF-8; {TO_UTF8}"
        ) from error
    if not text:
        return None
    try:
        row = parse_json(text)
    except ValueError as error:
        # A single bracket is the start of a value of several lines.
        fix = CONVERT_COMMANDS.get(text, "correct the line")
        raise ValueError(f"{where}: not JSON: {error}; {ALLOWED_LINES}; fix: {fix}") from error
    if not isinstance(row, dict):
        fix = CONVERT_COMMANDS.get(text[0], "correct the line")
        raise ValueError(
            f"{where}: a {type(row).__name__}, not an object; {ALLOWED_LINES}; fix: {fix}"
        )
    return row


def parse_json(text: str) -> Any:
    """Return the value of the JSON ``text``; raise ``ValueError`` also for duplicate keys."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _refuse_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return values
