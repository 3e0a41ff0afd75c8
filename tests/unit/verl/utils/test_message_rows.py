"""Tests of data rows from files, pandas and other tools: their values, and refusals with the
place.
"""

import json
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from enum import StrEnum
from uuid import UUID

import numpy as np
import pandas
import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.helpers.refusals import allowed, fix, has_problem, mentions
from verl.config.settings.errors import ProblemCode
from verl.utils.chat_template import THOUGHT_KEYS
from verl.utils.message_rows import (
    MAX_CHARACTERS,
    DataRow,
    InvalidRowError,
    read_episode_messages,
    read_prompt_messages,
    read_table,
)

USER = {"role": "user", "content": "2+2?"}
AGENT = {"role": "assistant", "content": "4"}
SYSTEM = {"role": "system", "content": ""}
CIRCLE: list[object] = []  # contains itself
CIRCLE.append(CIRCLE)
PART = {"type": "text", "text": "2+2?"}


def make_row(**cells):
    return DataRow("data.path='a.jsonl'", 3, cells)


def read_prompt(value, **cells):
    return read_prompt_messages(make_row(prompt=value, **cells), "prompt", "data.prompt_key")


def read_episode(*messages, **cells):
    return read_episode_messages(
        make_row(messages=list(messages), **cells), "messages", "data.messages_key"
    )


@pytest.mark.parametrize(
    "value",
    [
        "2+2?",
        [USER],
        (USER,),
        np.array([USER], dtype=object),
        json.dumps([USER]),
        f"  {json.dumps([USER])}\n",
        b"2+2?",
        [{"role": "user", "content": [PART]}],
        [{"role": "user", "content": np.array([{**PART, "image_url": None}], dtype=object)}],
        [{"role": "user", "content": [PART | {"text": "2+"}, PART | {"text": "2?"}]}],
        [{**USER, "tool_calls": None, "name": float("nan"), "images": []}],
        [{**USER, "weight": 0}],
    ],
)
def test_all_forms_of_messages_are_read_as_equal(value):
    assert read_prompt(value, tools=None, images=[], videos=np.array([])) == [USER]


@pytest.mark.parametrize("text", ["[1, 2, 3] sorted?", "[", "[[[", "[{}]", '{"role": "user"}'])
def test_text_that_is_no_message_list_stays_a_text(text):
    assert read_prompt(text) == [{"role": "user", "content": text}]


def test_conversation_keeps_its_messages():
    assert read_prompt([SYSTEM, USER, AGENT, USER]) == [SYSTEM, USER, AGENT, USER]


@pytest.mark.parametrize(
    "value",
    [
        None,
        float("nan"),
        pandas.NA,
        5,
        2.5,
        True,
        "",
        " \n",
        [],
        {},
        USER,
        [None],
        ["2+2?"],
        [[["role", "user"]]],
        [{"role": "user"}],
        [{"role": "user", "content": None}],
        [{"role": "user", "content": 5}],
        [{"role": "user", "content": ["2+2?"]}],
        [{"role": "user", "content": []}],
        [{"role": "user", "content": [PART, {"type": "image_url", "image_url": "a"}]}],
        [{"role": "user", "content": "  "}],
        [{"role": "tool", "content": "4"}, USER],
        [{"role": "function", "content": "4"}, USER],
        [{"role": "developer", "content": "4"}, USER],
        [{"from": "human", "value": "2+2?"}],
        [SYSTEM],
        [USER, AGENT],
        [{**USER, "name": "bob"}],
        [USER, {**AGENT, "tool_calls": [{"id": 1}]}, USER],
        [USER, {**AGENT, "function_call": {"name": "f"}}, USER],
        *([USER, {**AGENT, key: "hm"}, USER] for key in THOUGHT_KEYS),
        [{**USER, "images": ["a.png"]}],
        [{**USER, "tools": [{"name": "f"}]}],
        [USER, {**AGENT, "refusal": "no"}, USER],
        [USER, {**AGENT, "prefix": True}, USER],
        [{**USER, "weight": 0.5}],
        [{**USER, "content": 10**5000}],
        str([USER]),
        json.dumps([USER])[:-1],
        "half \ud83d",
        json.dumps([{"role": "user", "content": "half \ud83d"}]),
        b"\xff\xfe",
        "x" * (MAX_CHARACTERS + 1),
        json.loads("[" * 500 + "]" * 500),
    ],
)
def test_unusable_prompt_is_refused_with_its_place(value):
    with pytest.raises(InvalidRowError) as refused:
        read_prompt(value)
    (message,) = refused.value.problems
    assert message.code in ("wrong_cell", "no_effect") and refused.value.column == "prompt"
    assert message.startswith("data.path='a.jsonl': row 3: ") and allowed(message) and fix(message)


@pytest.mark.parametrize(
    ("cells", "code", "parts"),
    [
        ({"prompt": None, "id": 1}, "wrong_cell", ["null"]),
        ({"prompt": pandas.NA}, "wrong_cell", ["null"]),
        ({"prompt": []}, "wrong_cell", []),
        ({"prompt": USER}, "wrong_cell", ["{'role': 'user'", "[{...}]"]),
        ({"prompt": 5, "text": "a"}, "wrong_cell", ["'5'", "data.prompt_key=COLUMN"]),
        ({"text": "a"}, "missing_column", ["data.prompt_key=COLUMN", "text"]),
    ],
)
def test_cell_without_messages_is_refused_with_a_fix(cells, code, parts):
    with pytest.raises(InvalidRowError, check=has_problem(code, "data.path", *parts)) as refused:
        read_prompt_messages(make_row(**cells), "prompt", "data.prompt_key")
    assert refused.value.column == "prompt"


@pytest.mark.parametrize(
    "cells",
    [
        {"images": ["a.png"]},
        {"image": b"\x89PNG"},
        {"images": np.array([{"bytes": b"\x89", "path": None}], dtype=object)},
        {"videos": ["a.mp4"]},
        {"audio": "a.wav"},
        {"multi_modal_data": {"image": ["a"]}},
        {"tools": [{"name": "f"}]},
        {"tools": '[{"name": "f"}]'},
        {"images": [10**5000]},
        {"images": CIRCLE},
        {"images": torch.eye(2).to_sparse()},
        {"functions": [{"name": "f"}]},
        {"documents": [{"text": "a"}]},
        {"chat_template_kwargs": {"enable_thinking": False}},
        {"system": "Be brief."},
        {"system_prompt": "Be brief."},
    ],
)
def test_unsupported_columns_are_refused(cells):
    for read in (
        lambda: read_prompt("<image> what?", **cells),
        lambda: read_episode(USER, AGENT, **cells),
    ):
        with pytest.raises(InvalidRowError, check=has_problem("no_effect", "data.path")) as refused:
            read()
        assert refused.value.column == next(iter(cells))


@pytest.mark.parametrize(
    "field, value, weight",
    [
        ("weight", 0, 0.0),
        ("loss_mask", 1, 1.0),
        ("train", False, 0.0),
        ("trainable", True, 1.0),
        ("training", False, 0.0),
        ("loss", np.int64(0), 0.0),
        ("loss_weight", 1.0, 1.0),
        ("weight", None, None),
    ],
)
def test_message_weight_has_several_names(field, value, weight):
    read_messages = read_episode(USER, {**AGENT, field: value}, USER, AGENT)
    assert [message.get("weight") for message in read_messages] == [None, weight, None, None]


@pytest.mark.parametrize(
    "messages",
    [
        [USER],
        [AGENT],
        [AGENT, USER],
        [SYSTEM, AGENT],
        [USER, USER, AGENT, AGENT],
        [USER, AGENT, SYSTEM, AGENT],
        [USER, {**AGENT, "content": ""}],
        [USER, {**AGENT, "weight": 0}],
        [USER, {**AGENT, "weight": 2}],
        [USER, {**AGENT, "weight": "0"}],
        [USER, {**AGENT, "loss_mask": [0, 1]}],
        [USER, {**AGENT, "weight": 0, "train": True}, USER, AGENT],
        [{**SYSTEM, "weight": 0}, USER, AGENT],
        [USER, {**AGENT, "content": None, "tool_calls": [{"id": 1}]}],
    ],
)
def test_episode_without_training_target_is_refused(messages):
    with pytest.raises(
        InvalidRowError, check=mentions("data.path='a.jsonl'", "row 3", "column 'messages'")
    ):
        read_episode(*messages)


@pytest.mark.parametrize(
    "value, plain",
    [
        (np.array(["5", "five"], dtype=object), ["5", "five"]),
        (np.array([[1, 2]]), [[1, 2]]),
        (np.float32(0.5), 0.5),
        (torch.tensor([1, 2]), [1, 2]),
        ((1, (2,)), [1, [2]]),
        (float("nan"), None),
        (np.float64("nan"), None),
        (np.datetime64("NaT"), None),
        (pandas.NaT, None),
        (pandas.NA, None),
        (Decimal("NaN"), None),
        (Decimal("sNaN"), None),
        (Decimal("1E+50"), 10**50),
        (np.str_("text"), "text"),
        (StrEnum("Role", ["user"]).user, "user"),
        (Decimal("42.00"), 42),
        (Decimal("1.50"), 1.5),
        (datetime(2020, 1, 2, 3, tzinfo=UTC), "2020-01-02T03:00:00+00:00"),
        (pandas.Timestamp("2020-01-02"), "2020-01-02T00:00:00"),
        (date(2020, 1, 2), "2020-01-02"),
        (np.datetime64("2020-01-02"), "2020-01-02"),
        (timedelta(seconds=90), 90.0),
        (UUID(int=1), "00000000-0000-0000-0000-000000000001"),
        (b"text", "text"),
        ({1: np.int64(2), "when": date(2020, 1, 2)}, {"1": 2, "when": "2020-01-02"}),
    ],
)
def test_cells_are_converted_to_json_types(value, plain):
    cell = make_row(cell=value).read_cell("cell")
    assert cell == plain and type(cell) is type(plain)
    json.dumps(cell)


VALUES_WITHOUT_JSON = [
    *(b"\xff", {"a": {1, 2}}, 1j, object(), ["\udc00"], CIRCLE),
    *(float("inf"), np.array([-np.inf]), Decimal("Infinity"), Decimal("1E+999999"), [10**5000]),
    *(torch.eye(2).to_sparse(), torch.empty(2, device="meta")),
]


@pytest.mark.parametrize("value", VALUES_WITHOUT_JSON)
def test_cells_that_json_cannot_hold_are_refused(value):
    with pytest.raises(InvalidRowError, check=mentions("row 3", "column 'cell'")):
        make_row(cell=value).read_cell("cell")


def test_system_column_is_ignored_beside_a_system_message():
    assert read_prompt([SYSTEM, USER], system="Be brief.") == [SYSTEM, USER]


def test_objects_may_be_written_as_json():
    assert make_row(cell='{"a": 1}').read_object("cell") == {"a": 1}
    assert make_row(cell=None).read_object("cell") is make_row().read_object("cell") is None
    for value in ("text", [1], 5, "{", '["a"]'):
        with pytest.raises(InvalidRowError, check=mentions("row 3", "column 'cell'")):
            make_row(cell=value).read_object("cell")


def test_bad_files_are_named_with_the_key(tmp_path):
    pyarrow.parquet.write_table(pyarrow.table({"prompt": ["a"] * 5000}), tmp_path / "a.parquet")
    damaged = bytearray((tmp_path / "a.parquet").read_bytes())
    damaged[4:40] = bytes(36)
    (tmp_path / "a.parquet").write_bytes(damaged)
    (tmp_path / "empty.jsonl").touch()
    codes: dict[str, ProblemCode] = {
        "a.parquet": "unreadable_file",
        "empty.jsonl": "no_rows",
        "nowhere.jsonl": "missing_file",
        "a.csv": "unreadable_file",
    }
    for name, code in codes.items():
        with pytest.raises(
            InvalidRowError, check=has_problem(code, "data.val_files", tmp_path / name)
        ):
            list(read_table("data.val_files", [str(tmp_path / name)]))


def test_path_of_an_unknown_user_is_named():
    with pytest.raises(
        InvalidRowError, check=mentions("data.val_files='~nobody_has_this_name/a.jsonl'")
    ):
        list(read_table("data.val_files", ["~nobody_has_this_name/a.jsonl"]))
