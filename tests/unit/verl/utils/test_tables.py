"""Rows of Parquet and JSON files are the same rows, and broken files are named."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from verl.utils.tables import read_rows

ROWS = [{"text": "a\u2028b", "n": 1}, {"text": "c", "n": 2}]


def test_rows_are_the_same_in_every_kind_of_file(tmp_path):
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    lines = "\n\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS)
    for name in ("a.jsonl", "a.json"):
        (tmp_path / name).write_text(lines, encoding="utf-8")
    for name in ("a.parquet", "a.jsonl", "a.json"):
        assert list(read_rows(tmp_path / name)) == ROWS
    assert list(read_rows(str(tmp_path / "a.jsonl"))) == ROWS


@pytest.mark.parametrize(
    "name, text, error, complaint",
    [
        ("a.csv", "n\n1", ValueError, r"unknown kind of file; allowed: .parquet, .jsonl, .json"),
        ("a.parquet", "no table", ValueError, "not a Parquet file"),
        ("a.jsonl", "{}\n{", ValueError, "line 2: not JSON"),
        ("a.jsonl", "\n[]", ValueError, "line 2: a list, not an object"),
        ("a.json", None, FileNotFoundError, "no such file"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, name, text, error, complaint):
    path = tmp_path / name
    if text is not None:
        path.write_text(text)
    with pytest.raises(error, match=f"{name}.*{complaint}"):
        list(read_rows(path))
