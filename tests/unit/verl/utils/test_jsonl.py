"""Tests of JSON lines for values of all types."""

import json
import math
import os
from dataclasses import dataclass
from datetime import date
from enum import StrEnum

import numpy as np
import pytest
import torch

from verl.utils import jsonl


class Kind(StrEnum):
    ENV = "env"


@dataclass
class Place:
    name: str


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ([["look", 0.3], ("ü", -1e-9)], '[["look",0.3],["ü",-1e-9]]'),
        (np.float64(0.1), "0.1"),
        (np.float32(0.5), "0.5"),
        (np.array([1, 2]), "[1,2]"),
        (torch.tensor([[0.5, math.inf]]), "[[0.5,null]]"),
        ({1: math.nan, "b": [math.inf]}, '{"1":null,"b":[null]}'),
        ({(1, 2): np.bool_(True)}, '{"(1, 2)":true}'),
        ({Kind.ENV: Kind.ENV, 2.5: {3}}, '{"env":"env","2.5":[3]}'),
        ([None, True, 2**70], f"[null,true,{2**70}]"),
        (np.array([0.5, math.nan, -math.inf]), "[0.5,null,null]"),
        (np.array(["a", 1], dtype=object), '["a",1]'),
        ([Place("desk"), date(2026, 1, 2)], """["Place(name='desk')","2026-01-02"]"""),
    ],
)
def test_line_holds_the_values_of_a_record(value, line):
    record = {"value": value}
    assert jsonl.dumps(record) == f'{{"value":{line}}}'
    assert json.loads(jsonl.dumps(record)) == json.loads(json.dumps(jsonl.to_json_types(record)))


def test_lone_surrogate_is_written_and_read(tmp_path):
    record = {"observation": "a door \ud83d", "task": 1}
    jsonl.write(tmp_path / "1.jsonl", [record])
    assert list(jsonl.read(tmp_path / "1.jsonl")) == [record]


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.symlink_to("/dev/zero"), os.mkdir])
def test_file_that_never_ends_is_not_read(tmp_path, make):
    make(tmp_path / "rows.jsonl")
    assert list(jsonl.read(tmp_path / "rows.jsonl")) == []


def test_line_that_is_nested_too_deeply_is_skipped(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("[" * 100_000 + "\n" + '{"a": 1}\n')
    assert list(jsonl.read(path)) == [{"a": 1}]


def test_line_after_an_incomplete_one_can_be_read(tmp_path):
    path = tmp_path / "metrics.jsonl"
    jsonl.append(path, {"step": 1})
    with path.open("a") as file:
        file.write('{"step": 2, "lo')  # as after a full disk
    for step in (3, 4):
        jsonl.append(path, {"step": step, "text": "ü"})
    assert [record["step"] for record in jsonl.read(path)] == [1, 3, 4]
    assert path.read_bytes().count(b"\n") == 4
