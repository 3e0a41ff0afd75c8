"""What the page's scripts decide without a page, run by node."""

import json

import pytest

from tests.helpers.page import find_node, run_scripts
from verl.record.report.plays import embedded, packed

pytestmark = pytest.mark.skipif(find_node() is None, reason="no node: pyright[nodejs] brings one")
FILE = {
    "name": "train-4",
    "kind": "train",
    "step": 4,
    "tasks": ["Door/a", "Door/b"],
    "group": [0, 1, 0],
    "won": [1, 0, 0],
    "return": [1.0, 0.25, 0.0],
    "turns": [3, 2, 1],
    "tokens": [30, 20, 10],
}


def chosen(body, **names):
    values = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
    return run_scripts(("codec.js", "choose.js"), values + body)


def test_what_is_packed_is_unpacked():
    value = {"text": "</script> ü 漢", "numbers": [0, -1.5, None]}
    text = embedded(packed(value))
    assert chosen("return unpack(bytesOf(text));", text=text) == value


def test_rows_are_told_apart_and_groups_stand_together():
    rows = chosen("return byGroup(rowsOf(file));", file=FILE)
    assert [(row["number"], row["task"], row["won"]) for row in rows] == [
        (0, "Door/a", True),
        (2, "Door/a", False),
        (1, "Door/b", False),
    ]
    assert rows[1]["earned"] == 0.0 and rows[1]["tokens"] == 10 and rows[1]["step"] == 4


def test_the_nearest_step_that_has_plays_is_shown():
    files = [
        {"kind": kind, "step": step} for kind, step in (("train", 1), ("val", 4), ("train", 9))
    ]
    body = "return asked.map(([kind, step]) => nearestFile(files, kind, step)?.step ?? null);"
    asked = [["train", 4], ["train", 6], ["val", 50], ["audit", 1]]
    assert chosen(body, files=files, asked=asked) == [1, 9, 4, None]


def test_few_returns_have_a_bin_each_and_many_share_bins():
    body = "return countedBins(earned.map((value) => ({ earned: value, won: value >= 1 })));"
    bins = chosen(body, earned=[0, 1, 1, 0.5])
    assert [(bin["low"], bin["high"], bin["count"], bin["won"]) for bin in bins] == [
        (0, 0, 1, 0),
        (0.5, 0.5, 1, 0),
        (1, 1, 2, 2),
    ]
    bins = chosen(body, earned=[place / 100 for place in range(101)])
    assert len(bins) == 20 and sum(bin["count"] for bin in bins) == 101
    assert (bins[0]["low"], bins[-1]["high"]) == (0, 1) and bins[0]["count"] == 6
    assert chosen(body, earned=[]) == []


def test_every_play_is_in_the_bin_that_opens_it():
    body = """
        const rows = earned.map((value) => ({ earned: value, won: false, task: "t" }));
        const choice = { outcome: "", search: "" };
        return countedBins(rows).map((bin) => [
            bin.count, rows.filter((row) => matches(row, { ...choice, bin })).length,
        ]);
    """
    pairs = chosen(body, earned=[(-1) ** place * place / 7 for place in range(60)])
    assert len(pairs) == 20 and all(counted == opened for counted, opened in pairs)


def test_plays_are_chosen_by_outcome_and_task():
    body = """
        const rows = rowsOf(file);
        const numbers = (choice) => rows.filter((row) => matches(row, choice)).map((r) => r.number);
        return choices.map(numbers);
    """
    none = {"outcome": "", "search": "", "bin": None}
    choices = [none, none | {"outcome": "won"}, none | {"outcome": "lost"}, none | {"search": "/B"}]
    assert chosen(body, file=FILE, choices=choices) == [[0, 1, 2], [0], [1, 2], [1]]


def test_colours_are_full_below_the_outliers():
    body = "return lists.map(fullSize);"
    lists = [[0.1] * 30 + [-50.0], [-2.0], []]
    assert chosen(body, lists=lists) == [0.1, 2.0, 1e-9]


def test_numbers_are_short():
    body = (
        "return [shortNumber(0.123456), shortNumber(-2), plural(1, 'play'), plural(1200, 'play')];"
    )
    assert chosen(body) == ["0.123", "-2", "1 play", "1,200 plays"]


def test_plays_part_where_they_did_or_saw_something_else():
    def play(*turns):
        return {
            "steps": [dict(zip(("observation", "action"), turn, strict=True)) for turn in turns]
        }

    first = play(("hall", "go"), ("door", "open"))
    others = [
        first,
        play(("hall", "go"), ("door", "look")),
        play(("hall", "go"), ("wall", "open")),
        play(("hall", "go")),
        play(("hall", "go"), ("door", "open"), ("cave", "sit")),
    ]
    body = "return others.map((other) => partingTurn(first, other));"
    found = run_scripts(
        ("compare.js",), f"const first = {json.dumps(first)}, others = {json.dumps(others)}; {body}"
    )
    assert found == [None, 1, 1, 1, 2]


def test_a_play_stands_first_and_the_other_outcome_beside_it():
    rows = [{"number": number, "won": number in (0, 2)} for number in range(4)]
    body = (
        f"const rows = {json.dumps(rows)}; return besides(rows, rows[2]).map((row) => row.number);"
    )
    assert run_scripts(("compare.js",), body) == [2, 1, 3, 0]
