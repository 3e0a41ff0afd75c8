"""The file that answers go to: tried before anything is sampled, and kept whatever happens.

rows ──▶ trial ──▶ answers as they come ──▶ NAME.partial.jsonl ──▶ NAME.jsonl, NAME.parquet
"""

import contextlib
import logging
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from itertools import chain, count
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl.config.settings import ConfigError
from verl.trainer.launch.preflight_machine import unwritable
from verl.utils import jsonl
from verl.utils.files import naming, put_aside
from verl.utils.message_rows import DataRow

if TYPE_CHECKING:  # an optional format
    import pyarrow

logger = logging.getLogger(__name__)
KEY = "data.output_path"
SUFFIXES = (".jsonl", ".parquet")
ALLOWED = "a file that can be made and written"
Record = dict[str, Any]


class AnswerFile:
    """The file of the rows with their answers, and one of the answers so far.

    ``rows`` are those of the prompts, and ``column`` is added to them. Where no Parquet table can
    hold them the file is JSON lines, with a warning. Raises ``ConfigError`` for a file that cannot
    be written, for a column that is there already, and for cells that JSON cannot hold.
    """

    def __init__(self, path: Path, rows: Sequence[DataRow], column: str) -> None:
        self.column = column
        for row in rows:
            if column in row.cells:
                fix = f"data.response_key=NAME, another one than {', '.join(map(str, row.cells))}"
                raise row.bad(column, "is there already", "a new column", fix)
        if not column:
            raise ConfigError("data.response_key='': no name; allowed: a name; fix: leave it out")
        why = _why_not(path) or _why_not(_partial(path))
        if path.suffix == ".parquet" and find_spec("pyarrow") is None:
            why = "Parquet is written by pyarrow, which is not installed"
        if why:
            raise ConfigError(f"{KEY}={str(path)!r}: {why}; allowed: {ALLOWED}; fix: {KEY}=FILE")
        self.path = path
        self.records = [dict(row.cells) for row in rows]
        if path.suffix == ".parquet":
            self.path = _path_of_table(path, self._with([[""]] * len(rows)))
        if self.path.suffix == ".jsonl":
            self.records = [{name: row.read(name) for name in row.cells} for row in rows]

    @property
    def partial(self) -> Path:
        """The file of the answers so far."""
        return _partial(self.path)

    @contextlib.contextmanager
    def keeping(self) -> Iterator[None]:
        """A block that calls ``keep``: the answers so far are removed where it ends well, else the
        log says where they are.
        """
        if self.partial.exists():
            logger.warning("%s is now %s", self.partial, put_aside(self.partial))
        try:
            yield
        except BaseException:
            if self.partial.exists():
                logger.warning("the answers so far are in %s", self.partial)
            raise
        self.partial.unlink(missing_ok=True)

    def keep(self, row: int, sample: int, text: str) -> None:
        """Write an answer down before the others are there."""
        record = {"row": row, "sample": sample, self.column: text}
        with naming(self.partial), self.partial.open("a", encoding="utf-8") as file:
            file.write(jsonl.dumps(record) + "\n")

    def write(self, answers: Sequence[list[str]]) -> None:
        """Write the rows with their ``answers``. Raises ``ConfigError`` where that fails."""
        records = self._with(answers)
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            if self.path.suffix == ".jsonl":
                jsonl.write(self.path, records)
            else:
                _write_table(self.path, build_table(records))
        except OSError as error:
            why = f"cannot be written: {error}; the answers are in {self.partial}"
            allowed = "allowed: room on the disk; fix: make room, or another file"
            raise ConfigError(f"{KEY}={str(self.path)!r}: {why}; {allowed}") from error

    def _with(self, answers: Sequence[list[str]]) -> list[Record]:
        pairs = zip(self.records, answers, strict=True)
        return [record | {self.column: said} for record, said in pairs]


def _partial(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial.jsonl")


def _why_not(path: Path) -> str:
    """Why no file can be written at ``path``; empty where it can."""
    try:
        there = path.is_dir()
        path.exists()  # a name that is too long is told here alone
    except (OSError, ValueError) as error:
        return f"it can be no file: {getattr(error, 'strerror', None) or error}"
    return "it is a directory" if there else unwritable(path.parent)


def _path_of_table(path: Path, records: Sequence[Record]) -> Path:
    """``path`` where a table can hold ``records``, else one beside it for JSON lines."""
    import pyarrow
    import pyarrow.parquet

    try:
        empty = build_table(records).schema.empty_table()
        pyarrow.parquet.write_table(empty, pyarrow.BufferOutputStream())
    # Texts with half a surrogate pair are a ValueError, integers of more than 64 bits an
    # OverflowError.
    except (pyarrow.ArrowException, TypeError, ValueError, OverflowError) as error:
        lines = _free(path.with_suffix(".jsonl"))
        why = " ".join(str(error).split())
        logger.warning("no Parquet table can hold the rows (%s): they go to %s", why, lines)
        return lines
    return path


def _free(path: Path) -> Path:
    """``path``, or the first one of ``<stem>.1<suffix>``, ``.2`` ... where nothing is."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in count(1))
    return next(one for one in chain([path], names) if not one.exists())


def build_table(records: Sequence[Record]) -> "pyarrow.Table":
    """A table with every column that one of ``records`` has; what a record lacks is null, and so is
    an object without keys, which Parquet cannot hold.
    """
    import pyarrow

    names = dict.fromkeys(name for record in records for name in record)
    columns = ([_storable(record.get(name)) for record in records] for name in names)
    return pyarrow.table(dict(zip(names, map(pyarrow.array, columns), strict=True)))


def _storable(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _storable(item) for key, item in value.items()} or None
    return [_storable(item) for item in value] if isinstance(value, list) else value


def _write_table(path: Path, table: "pyarrow.Table") -> None:
    import pyarrow.parquet

    partial = path.with_name(f".{path.name}.partial")
    try:
        pyarrow.parquet.write_table(table, partial)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
