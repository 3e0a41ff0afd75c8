"""Tests of rows from Parquet and JSON files, and of messages about broken files."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from tests.helpers.refusals import has_problem, mentions
from verl.config.settings.errors import UserError
from verl.utils.tables import read_rows

MAP = pyarrow.map_(pyarrow.string(), pyarrow.int64())
ROWS = [{"text": "a\u2028b", "n": 1}, {"text": "c", "n": 2}]


def test_rows_are_equal_in_all_kinds_of_files(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    for name in ("a.parquet", "a.jsonl", "a.json"):
        assert list(read_rows(tmp_path / name)) == ROWS
    assert list(read_rows(str(tmp_path / "a.jsonl"))) == ROWS


@pytest.mark.parametrize(
    ("name", "text", "parts"),
    [
        ("a.csv", "n\n1", [".parquet, .jsonl, .json"]),
        ("a.parquet", "no table", []),
        ("a.jsonl", "{}\n{", ["line 2"]),
        ("a.jsonl", "\n[]", ["line 2", "list"]),
    ],
)
def test_unreadable_file_is_named(tmp_path, name, text, parts):
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(UserError, check=has_problem("unreadable_file", "", path, *parts)):
        list(read_rows(path))


def test_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, check=mentions(tmp_path / "a.json")):
        read_rows(tmp_path / "a.json")


@pytest.mark.parametrize(
    ("file_in_directory", "fix"),
    [("part.parquet", "[FILE,FILE]"), ("dataset_info.json", "load_from_disk")],
)
@pytest.mark.parametrize("directory_name", ["rows", "rows.parquet"])
def test_directory_is_no_missing_file(tmp_path, directory_name, file_in_directory, fix):
    directory = tmp_path / directory_name
    directory.mkdir()
    (directory / file_in_directory).touch()
    with pytest.raises(IsADirectoryError, check=mentions(directory, fix)):
        read_rows(directory)


def test_pattern_is_not_expanded(tmp_path):
    (tmp_path / "a.jsonl").write_text("{}")
    with pytest.raises(FileNotFoundError, check=mentions(tmp_path / "*.jsonl")):
        read_rows(tmp_path / "*.jsonl")


@pytest.mark.parametrize(
    "data, code",
    [
        ('{"a": 1}\n{"a": "é"}'.encode("latin-1"), "unreadable_file"),
        ('{"a": 1}'.encode("utf-16"), "unreadable_file"),
        ('{"a": 1}'.encode("utf-32"), "unreadable_file"),
        (b'{"a": 1, "a": 2}', "unreadable_file"),
        (b'{"b": {"a": 1, "a": 2}}', "unreadable_file"),
        (b'{"a":' + b"[" * 100_000 + b"]" * 100_000 + b"}", "unreadable_file"),
        (b'{"a":' * 100_000 + b"1" + b"}" * 100_000, "unreadable_file"),
        (b'{"a": "' + b"x" * 20_000_000 + b'"}', "does_not_fit"),
        (b'{"a": 1' + b"0" * 5000 + b"}", "unreadable_file"),
        (b'[\n{"a": 1}\n]', "unreadable_file"),
        (b'{\n"a": 1\n}', "unreadable_file"),
    ],
)
def test_lines_that_are_no_rows_are_named(tmp_path, data, code):
    path = tmp_path / "a.jsonl"
    path.write_bytes(data)
    line_number = 2 if data.startswith(b'{"a": 1}\n') else 1
    with pytest.raises(UserError, check=has_problem(code, "", f"{path}, line {line_number}: ")):
        list(read_rows(path))


def test_byte_order_mark_and_line_separators_are_accepted(tmp_path):
    (tmp_path / "a.jsonl").write_bytes('\ufeff{"a": "\x85\u2028"}\r\n\r\n{"a": 2}'.encode())
    assert list(read_rows(tmp_path / "a.jsonl")) == [{"a": "\x85\u2028"}, {"a": 2}]


def test_map_column_is_an_object(tmp_path):
    maps = [[("a", 1), ("b", 2)], [], None]
    table = pyarrow.table({"cell": pyarrow.array(maps, MAP)})
    pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
    cells = [row["cell"] for row in read_rows(tmp_path / "a.parquet")]
    assert cells == [{"a": 1, "b": 2}, {}, None]


def test_unsupported_tables_are_named(tmp_path):
    duplicate_columns = pyarrow.table(
        [pyarrow.array(["a"]), pyarrow.array(["b"])], names=["p", "p"]
    )
    early_dates = pyarrow.table({"p": pyarrow.array([-(2**62)], pyarrow.timestamp("ms"))})
    equal_keys = pyarrow.table({"p": pyarrow.array([[("a", 1), ("a", 2)]], MAP)})
    unknown_zone = pyarrow.table({"p": pyarrow.array([1], pyarrow.timestamp("us", "Mars/Base"))})
    for table in (duplicate_columns, early_dates, equal_keys, unknown_zone):
        pyarrow.parquet.write_table(table, tmp_path / "a.parquet")
        with pytest.raises(ValueError, check=mentions("a.parquet")):
            list(read_rows(tmp_path / "a.parquet"))
