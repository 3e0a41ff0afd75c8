"""Reader of the rows of Parquet and JSON Lines files."""

import codecs
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from verl.config.settings.errors import UserError

SUFFIXES = (".parquet", ".jsonl", ".json")
MAX_LINE_BYTES = 16_000_000  # maximum bytes per line; parsing a longer row would take minutes
UTF16_BOMS = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
UTF8_FIX = "fix: iconv -f ENCODING -t UTF-8 FILE > NEW"
ALLOWED_TEXT = "allowed: one object per line"
# First character of a JSON file that has one value over several lines -> command that converts it
# to JSON Lines
CONVERT_COMMANDS = {"[": "jq -c '.[]' FILE > NEW.jsonl", "{": "jq -c . FILE > NEW.jsonl"}


def read_rows(path: str | Path) -> Iterator[dict[str, Any]]:
    """Return an iterator over the rows of ``path``. Empty lines are skipped.

    The suffix determines the format; a file without a suffix is JSON Lines. Raises
    ``FileNotFoundError``, ``IsADirectoryError``, and ``ValueError`` for content that is not of the
    format; the message names file and line.
    """
    path = Path(path)
    if path.is_dir():
        fix = "name its files, as a list [FILE,FILE] if there are several"
        if (path / "dataset_info.json").is_file():  # written by ``Dataset.save_to_disk``
            fix = f"write a file with datasets.load_from_disk({str(path)!r}).to_parquet(FILE)"
        raise IsADirectoryError(f"{path}: a directory; allowed: a file; fix: {fix}")
    if path.suffix not in (*SUFFIXES, ""):
        raise UserError(
            f"{path}: unknown kind of file; allowed: {', '.join(SUFFIXES)} (JSON: one object per "
            "line); fix: convert the file",
            "unreadable_file",
        )
    if not path.is_file():
        is_pattern = any(character in path.name for character in "*?[")
        fix = "name each file: patterns are not expanded" if is_pattern else "correct the path"
        raise FileNotFoundError(f"{path}: no such file; allowed: an existing file; fix: {fix}")
    return _read_parquet_rows(path) if path.suffix == ".parquet" else _read_json_rows(path)


def _read_parquet_rows(path: Path) -> Iterator[dict[str, Any]]:
    import pyarrow
    import pyarrow.parquet  # imported here, because JSON Lines files do not need it

    try:
        file = pyarrow.parquet.ParquetFile(path)
        column_names = file.schema_arrow.names
        duplicate_names = sorted({name for name in column_names if column_names.count(name) > 1})
        if duplicate_names:
            message = f"two columns have the name {duplicate_names[0]!r}; allowed: unique names"
            raise UserError(message, "unreadable_file")
        for batch in file.iter_batches():
            yield from batch.to_pylist(maps_as_pydicts="strict")
    # pyarrow raises OverflowError for a date before year 1, and KeyError for an unknown time zone
    # or a map with two equal keys.
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError, KeyError) as error:
        reason = " ".join(str(error).split())
        message = f"{path}: not a Parquet file: {reason}; fix: write the file again"
        raise UserError(message, "unreadable_file") from error


def _read_json_rows(path: Path) -> Iterator[dict[str, Any]]:
    with path.open("rb") as file:
        lines_read = 0
        # readline() splits at line feeds only. splitlines() would also split inside of JSON texts.
        while line := file.readline(MAX_LINE_BYTES + 1):
            lines_read += 1
            row = _parse_json_row(line, f"{path}, line {lines_read}", is_first_line=lines_read == 1)
            if row is not None:
                yield row


def _parse_json_row(line: bytes, location: str, is_first_line: bool) -> dict[str, Any] | None:
    """Return the object in ``line``, or None for a blank line. Errors begin with ``location``."""
    if len(line) > MAX_LINE_BYTES:
        raise UserError(
            f"{location}: longer than {MAX_LINE_BYTES:,} bytes; allowed: shorter rows; "
            "fix: remove the row",
            "does_not_fit",
        )
    if is_first_line and line.startswith(UTF16_BOMS):
        raise UserError(f"{location}: UTF-16 text; allowed: UTF-8; {UTF8_FIX}", "unreadable_file")
    try:
        text = line.decode("utf-8-sig" if is_first_line else "utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{location}: not UTF-8 text ({error.reason}, byte {line[error.start]:#04x} in column "
            f"{error.start + 1}); allowed: UTF-8; {UTF8_FIX}",
            "unreadable_file",
        ) from error
    if not text:
        return None
    try:
        row = parse_json(text)
    except ValueError as error:
        # If the line is only "[" or "{", the file has one JSON value over several lines.
        fix = CONVERT_COMMANDS.get(text, "correct the line")
        message = f"{location}: not JSON: {error}; {ALLOWED_TEXT}; fix: {fix}"
        raise UserError(message, "unreadable_file") from error
    if not isinstance(row, dict):
        fix = CONVERT_COMMANDS.get(text[0], "correct the line")
        message = f"{location}: a {type(row).__name__}, not an object; {ALLOWED_TEXT}; fix: {fix}"
        raise UserError(message, "unreadable_file")
    return row


def parse_json(text: str) -> Any:
    """Return the value of the JSON ``text``. Raise ``ValueError``, also for a repeated key."""
    try:
        return json.loads(text, object_pairs_hook=_refuse_duplicate_keys)
    except RecursionError:
        raise ValueError("the value is nested too deeply") from None


def _refuse_duplicate_keys(pairs: Sequence[tuple[str, Any]]) -> dict[str, Any]:
    json_object = dict(pairs)
    if len(json_object) < len(pairs):
        keys = [name for name, _ in pairs]
        duplicate_key = next(name for name in keys if keys.count(name) > 1)
        raise ValueError(f"an object has the key {duplicate_key!r} twice")
    return json_object
