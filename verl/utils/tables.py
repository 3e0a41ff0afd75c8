"""Rows of files: Parquet, and JSON with an object a line."""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

SUFFIXES = (".parquet", ".jsonl", ".json")
MAX_LINE = 16_000_000  # bytes; a longer row would stop a run in silence for minutes
BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
TO_UTF8 = "fix: iconv -f ENCODING -t UTF-8 FILE > NEW"
LINES = "allowed: an object a line"
# How a file of one JSON value becomes lines, by the sign that it begins with.
TO_LINES = {"[": "jq -c '.[]' FILE > NEW.jsonl", "{": "jq -c . FILE > NEW.jsonl"}


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """The rows of ``path``, in order; empty lines are none. Without a suffix it holds JSON.

    Raises ``FileNotFoundError`` for a missing file, ``ValueError`` for another kind of file and for
    one that is not what its name says; the message names the file, and the line of JSON.
    """
    path = Path(path)
    if path.suffix not in (*SUFFIXES, ""):
        raise ValueError(
            f"{path}: unknown kind of file; allowed: {', '.join(SUFFIXES)} (JSON: an object a "
            "line); fix: convert it"
        )
    if not path.is_file():
        raise FileNotFoundError(f"{path}: no such file; fix: mend the path")
    return _parquet_rows(path) if path.suffix == ".parquet" else _json_rows(path)


def _parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    try:
        import pyarrow
        import pyarrow.parquet  # an optional format: imported where it is read
    except ImportError as error:
        raise ValueError(f"{path}: Parquet is read by pyarrow; fix: pip install pyarrow") from error
    try:
        file = pyarrow.parquet.ParquetFile(path)
        names = file.schema_arrow.names
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"two columns are called {twice[0]!r}; allowed: names that differ")
        for batch in file.iter_batches():
            yield from batch.to_pylist()
    # A damaged page is an OSError, text that is not UTF-8 a ValueError, a date before year 1 an
    # OverflowError.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        why = " ".join(str(error).split())
        raise ValueError(f"{path}: not a Parquet file: {why}; fix: write it again") from error


def _json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        number = 0
        # By line feeds alone: splitlines() also splits at signs that JSON texts may hold.
        while line := file.readline(MAX_LINE + 1):
            number += 1
            row = _json_row(line, f"{path}, line {number}", first=number == 1)
            if row is not None:
                yield row


def _json_row(line: bytes, where: str, first: bool) -> dict[str, Any] | None:
    """The object in ``line``; None where it is blank."""
    if len(line) > MAX_LINE:
        raise ValueError(
            f"{where}: longer than {MAX_LINE:,} bytes; allowed: shorter rows; fix: leave it out"
        )
    if first and line.startswith(BOMS):
        raise ValueError(f"{where}: UTF-16 text; allowed: UTF-8; {TO_UTF8}")
    try:
        text = line.decode("utf-8-sig" if first else "utf-8").strip()
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
        fix = TO_LINES.get(text, "mend the line")  # a lone bracket: of a value of several lines
        raise ValueError(f"{where}: not JSON: {error}; {LINES}; fix: {fix}") from error
    if not isinstance(row, dict):
        fix = TO_LINES.get(text[0], "mend the line")
        raise ValueError(f"{where}: a {type(row).__name__}, not an object; {LINES}; fix: {fix}")
    return row


def parse_json(text: str) -> Any:
    """The value that ``text`` spells. Raises ``ValueError`` for what is no JSON, for a key that an
    object has twice, and for what is nested too deep to be read.
    """
    try:
        return json.loads(text, object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("nested too deep to be read") from None


def _without_doubles(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found
