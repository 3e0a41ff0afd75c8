"""Output file of ``main_generation``. Answers are also written to a partial file as they arrive.

rows ──▶ checks ──▶ each answer ──▶ NAME.partial.jsonl ──▶ all answers ──▶ NAME.jsonl, NAME.parquet
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.settings import ConfigError
from verl.trainer.launch.preflight_machine import find_write_problem
from verl.utils import jsonl
from verl.utils.files import add_path_to_errors, rename_aside
from verl.utils.message_rows import DataRow

if TYPE_CHECKING:  # an optional format
    import pyarrow

logger = logging.getLogger(__name__)
OUTPUT_KEY = "data.output_path"
SUFFIXES = (".jsonl", ".parquet")
ALLOWED_OUTPUT = "a file that can be created and written"
Record = dict[str, Any]


class AnswerFile:
    """Output file with the prompt ``rows`` and their answers, and a partial file during sampling.

    Answers are added in the new column ``column``. If a Parquet table cannot represent the rows,
    the file is written as JSON lines, with a warning.

    Raises:
        ConfigError: the file cannot be written, ``column`` exists already, or JSON cannot represent
            a cell.
    """

    def __init__(self, path: Path, rows: Sequence[DataRow], column: str) -> None:
        self.column = column
        for row in rows:
            if column in row.cells:
                fix = f"set data.response_key to a name not in {', '.join(map(str, row.cells))}"
                raise row.make_error(column, "exists already", "a new column", fix)
        if not column:
            raise ConfigError(
                "data.response_key='': the name is empty; allowed: a column name; fix: remove the "
                "key to use its default"
            )
        why = _find_output_problem(path) or _find_output_problem(_make_partial_path(path))
        if path.suffix == ".parquet" and find_spec("pyarrow") is None:
            why = "writing Parquet needs pyarrow, which is not installed"
        if why:
            raise ConfigError(
                f"{OUTPUT_KEY}={str(path)!r}: {why}; allowed: {ALLOWED_OUTPUT}; "
                f"fix: {OUTPUT_KEY}=FILE"
            )
        self.path = path
        self.records = [dict(row.cells) for row in rows]
        if path.suffix == ".parquet":
            self.path = _choose_table_path(path, self._add_answers([[""]] * len(rows)))
        if self.path.suffix == ".jsonl":
            self.records = [{name: row.read_cell(name) for name in row.cells} for row in rows]

    @property
    def partial_path(self) -> Path:
        """Path of the partial file, which has the answers sampled until now."""
        return _make_partial_path(self.path)

    @contextlib.contextmanager
    def keep_partial_answers(self) -> Iterator[None]:
        """Return a context for ``append_answer``; on an error the partial file is kept."""
        if self.partial_path.exists():
            logger.warning("%s is now %s", self.partial_path, rename_aside(self.partial_path))
        try:
            yield
        except BaseException:
            if self.partial_path.exists():
                logger.warning("the answers so far are in %s", self.partial_path)
            raise
        self.partial_path.unlink(missing_ok=True)

    def append_answer(self, row: int, sample: int, text: str) -> None:
        """Append ``text``, the answer ``sample`` to the prompt in ``row``, to the partial file."""
        record = {"row": row, "sample": sample, self.column: text}
        with (
            add_path_to_errors(self.partial_path),
            self.partial_path.open("a", encoding="utf-8") as file,
        ):
            file.write(jsonl.dumps(record) + "\n")

    def write(self, answers: Sequence[list[str]]) -> None:
        """Write the rows with their ``answers``. Raise ``ConfigError`` if that fails."""
        records = self._add_answers(answers)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.suffix == ".jsonl":
                jsonl.write(self.path, records)
            else:
                _write_table(self.path, build_table(records))
        except OSError as error:
            why = f"cannot be written: {error}; the answers are in {self.partial_path}"
            allowed = "allowed: a file on a disk with free space; fix: free disk space, or set"
            raise ConfigError(
                f"{OUTPUT_KEY}={str(self.path)!r}: {why}; {allowed} {OUTPUT_KEY}=FILE"
            ) from error

    def _add_answers(self, answers: Sequence[list[str]]) -> list[Record]:
        pairs = zip(self.records, answers, strict=True)
        return [record | {self.column: answer} for record, answer in pairs]


def _make_partial_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial.jsonl")


def _find_output_problem(path: Path) -> str:
    """Return the reason why no file can be written at ``path``; "" if one can be."""
    try:
        is_directory = path.is_dir()
        path.exists()  # only this call raises for a name that is too long
    except (OSError, ValueError) as error:
        return f"it cannot be a file: {getattr(error, 'strerror', None) or error}"
    return "it is a directory" if is_directory else find_write_problem(path.parent)


def _choose_table_path(path: Path, records: Sequence[Record]) -> Path:
    """Return ``path`` if a Parquet table can represent ``records``, else a path for JSON lines."""
    import pyarrow
    import pyarrow.parquet

    try:
        empty_table = build_table(records).schema.empty_table()
        pyarrow.parquet.write_table(empty_table, pyarrow.BufferOutputStream())
    # ValueError: text with an unpaired surrogate. OverflowError: integer of more than 64 bits.
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        # The first of NAME.jsonl, NAME.1.jsonl, NAME.2.jsonl, ... that is free.
        names = chain([path.stem], (f"{path.stem}.{number}" for number in count(1)))
        paths = (path.with_name(f"{name}.jsonl") for name in names)
        lines = next(candidate for candidate in paths if not candidate.exists())
        why = " ".join(str(error).split())
        logger.warning("Parquet cannot represent the rows (%s): they are written to %s", why, lines)
        return lines
    return path


def build_table(records: Sequence[Record]) -> "pyarrow.Table":
    """Return a table with the columns of all ``records``; empty dictionaries become null."""
    import pyarrow

    names = dict.fromkeys(name for record in records for name in record)
    columns = ([_make_storable(record.get(name)) for record in records] for name in names)
    return pyarrow.table(dict(zip(names, map(pyarrow.array, columns), strict=True)))


def _make_storable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _make_storable(item) for key, item in value.items()} or None
    return [_make_storable(item) for item in value] if isinstance(value, list) else value


def _write_table(path: Path, table: "pyarrow.Table") -> None:
    import pyarrow.parquet

    partial_path = path.with_name(f".{path.name}.partial")
    try:
        pyarrow.parquet.write_table(table, partial_path)
        partial_path.replace(path)
    finally:
        partial_path.unlink(missing_ok=True)
