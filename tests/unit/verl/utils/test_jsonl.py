"""Lines of JSON: whatever a record holds, a line is what ``plain`` makes of it."""

import json
import math
from enum import StrEnum

import numpy as np
import pytest
import torch

from verl.utils import jsonl


class Kind(StrEnum):
    ENV = "env"


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ([["look", 0.3], ("ü", -1e-9)], '[["look",0.3],["ü",-1e-09]]'),
        (np.float64(0.1), "0.1"),
        (np.float32(0.5), "0.5"),
        (np.array([1, 2]), "[1,2]"),
        (torch.tensor([[0.5, math.inf]]), "[[0.5,null]]"),
        ({1: math.nan, "b": [math.inf]}, '{"1":null,"b":[null]}'),
        ({(1, 2): np.bool_(True)}, '{"(1, 2)":true}'),
        ({Kind.ENV: Kind.ENV, 2.5: {3}}, '{"env":"env","2.5":[3]}'),
        ([None, True, 2**70], f"[null,true,{2**70}]"),
    ],
)
def test_a_line_says_what_a_record_holds(value, line):
    record = {"value": value}
    assert jsonl.dumps(record) == f'{{"value":{line}}}'
    plain = json.dumps(jsonl.plain(record), ensure_ascii=False, separators=(",", ":"))
    assert jsonl.dumps(record) == plain
