"""Tests of the functions in the page's scripts, run by node without a page."""

import json

import pytest

from tests.helpers.report_data import find_node, run_scripts
from verl.record.report.trajectory_chunks import compress_json, encode_base64

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


def run_choose_script(body, **names):
    values = "".join(f"const {name} = {json.dumps(value)};" for name, value in names.items())
    return run_scripts(("codec.js", "choose.js"), values + body)


def test_packed_text_is_unpacked():
    value = {"text": "</script> ü 漢", "numbers": [0, -1.5, None]}
    text = encode_base64(compress_json(value))
    assert run_choose_script("return unpack(decodeBase64(text));", text=text) == value


def test_rows_have_numbers_and_groups_are_adjacent():
    rows = run_choose_script("return sortByGroup(listRows(file));", file=FILE)
    assert [(row["number"], row["task"], row["won"]) for row in rows] == [
        (0, "Door/a", True),
        (2, "Door/a", False),
        (1, "Door/b", False),
    ]
    assert rows[1]["return"] == 0.0 and rows[1]["tokens"] == 10 and rows[1]["step"] == 4


def test_nearest_step_with_trajectories_is_chosen():
    files = [
        {"kind": kind, "step": step} for kind, step in (("train", 1), ("val", 4), ("train", 9))
    ]
    body = "return requests.map(([kind, step]) => nearestFile(files, kind, step)?.step ?? null);"
    requests = [["train", 4], ["train", 6], ["val", 50], ["audit", 1]]
    assert run_choose_script(body, files=files, requests=requests) == [1, 9, 4, None]


def test_few_returns_have_own_bins_and_many_share_bins():
    body = "return countByBin(returns.map((value) => ({ return: value, won: value >= 1 })));"
    bins = run_choose_script(body, returns=[0, 1, 1, 0.5])
    assert [(bin["low"], bin["high"], bin["count"], bin["won"]) for bin in bins] == [
        (0, 0, 1, 0),
        (0.5, 0.5, 1, 0),
        (1, 1, 2, 2),
    ]
    bins = run_choose_script(body, returns=[index / 100 for index in range(101)])
    assert len(bins) == 20 and sum(bin["count"] for bin in bins) == 101
    assert (bins[0]["low"], bins[-1]["high"]) == (0, 1) and bins[0]["count"] == 6
    assert run_choose_script(body, returns=[]) == []


def test_every_trajectory_is_counted_in_the_bin_that_opens_it():
    body = """
        const rows = returns.map((value) => ({ return: value, won: false, task: "t" }));
        const choice = { outcome: "", search: "" };
        return countByBin(rows).map((bin) => [
            bin.count, rows.filter((row) => matches(row, { ...choice, bin })).length,
        ]);
    """
    pairs = run_choose_script(body, returns=[(-1) ** index * index / 7 for index in range(60)])
    assert len(pairs) == 20 and all(counted == opened for counted, opened in pairs)


def test_trajectories_are_selected_by_outcome_and_task():
    body = """
        const rows = listRows(file);
        const numbers = (choice) => rows.filter((row) => matches(row, choice)).map((r) => r.number);
        return choices.map(numbers);
    """
    none = {"outcome": "", "search": "", "bin": None}
    choices = [none, none | {"outcome": "won"}, none | {"outcome": "lost"}, none | {"search": "/B"}]
    assert run_choose_script(body, file=FILE, choices=choices) == [[0, 1, 2], [0], [1, 2], [1]]


def test_colour_scale_ignores_outliers():
    body = "return lists.map(computeScale);"
    lists = [[0.1] * 30 + [-50.0], [-2.0], []]
    assert run_choose_script(body, lists=lists) == [0.1, 2.0, 1e-9]


def test_numbers_are_short():
    body = "return [shortNumber(0.123456), shortNumber(-2)];"
    assert run_choose_script(body) == ["0.123", "-2"]


def test_counts_have_the_plural_of_their_word():
    body = "return counts.map(([count, word]) => plural(count, word));"
    counts = [[1, "turn"], [1200, "turn"], [1, "trajectory"], [0, "trajectory"], [2, "day"]]
    texts = ["1 turn", "1,200 turns", "1 trajectory", "0 trajectories", "2 days"]
    assert run_choose_script(body, counts=counts) == texts


def test_first_different_turn_is_found():
    def make_trajectory(*turns):
        return {
            "steps": [dict(zip(("observation", "action"), turn, strict=True)) for turn in turns]
        }

    first = make_trajectory(("hall", "go"), ("door", "open"))
    candidates = [
        first,
        make_trajectory(("hall", "go"), ("door", "look")),
        make_trajectory(("hall", "go"), ("wall", "open")),
        make_trajectory(("hall", "go")),
        make_trajectory(("hall", "go"), ("door", "open"), ("cave", "sit")),
    ]
    body = "return candidates.map((other) => firstDifference(first, other));"
    turns = run_scripts(
        ("compare.js",),
        f"const first = {json.dumps(first)}, candidates = {json.dumps(candidates)}; {body}",
    )
    assert turns == [None, 1, 1, 1, 2]


def test_opposite_outcome_is_placed_beside_a_trajectory():
    rows = [{"number": number, "won": number in (0, 2)} for number in range(4)]
    order = "return orderMembers(rows, rows[2]).map((row) => row.number);"
    body = f"const rows = {json.dumps(rows)}; {order}"
    assert run_scripts(("compare.js",), body) == [2, 1, 3, 0]


STATES = """
    const rows = [
        { number: 0, won: true, return: 1 }, { number: 1, won: false, return: 0 },
        { number: 2, won: false, return: 0 },
    ];
    const step = (observation, action, advantage) => ({ observation, action, advantage });
    const trajectories = [
        { steps: [step("hall", "go", 1), step("cave", "dig", 0.5)] },
        { steps: [step("hall", "go", -2), step("hall", "sit", -0.5)] },
        { steps: [step("hall", "go", 0)] },
    ];
"""


def run_states_script(body):
    return run_scripts(("choose.js", "states.js"), STATES + body)


def test_state_graph_has_actions_with_their_mean_credit():
    graph = run_states_script("return buildStateGraph(rows, trajectories);")
    nodes = {node["name"]: (node["depth"], node["count"]) for node in graph["nodes"]}
    assert nodes == {
        "state hall": (0, 4),
        "state cave": (1, 1),
        "end success": (2, 1),
        "end failure": (2, 2),
    }
    edges = {
        (edge["from"], edge["action"], edge["to"]): (len(edge["rows"]), edge["credit"])
        for edge in graph["edges"]
    }
    assert edges == {
        ("state hall", "go", "state cave"): (1, 1),
        ("state hall", "go", "state hall"): (1, -2),
        ("state hall", "go", "end failure"): (1, 0),
        ("state cave", "dig", "end success"): (1, 0.5),
        ("state hall", "sit", "end failure"): (1, -0.5),
    }
    assert graph["measured"] and not graph["cut"]


def test_state_graph_uses_returns_without_advantages():
    body = "for (const { steps } of trajectories) for (const step of steps) delete step.advantage;"
    graph = run_states_script(body + "return buildStateGraph(rows, trajectories);")
    credit = {(edge["action"], edge["to"]): edge["credit"] for edge in graph["edges"]}
    assert not graph["measured"]
    assert credit["dig", "end success"] == pytest.approx(2 / 3)
    assert credit["sit", "end failure"] == pytest.approx(-1 / 3)


def test_state_name_of_the_estimators_is_used():
    body = """
        trajectories[0].steps[1].state = "hall";
        return buildStateGraph(rows, trajectories).nodes.map((node) => node.name);
    """
    assert sorted(run_states_script(body)) == ["end failure", "end success", "state hall"]


def test_state_graph_of_a_long_episode_is_cut():
    body = """
        const long = { steps: Array.from({ length: 50 }, (_, at) => step("room " + at, "on", 0)) };
        return buildStateGraph([rows[0]], [long], 10);
    """
    graph = run_states_script(body)
    assert (graph["turns"], graph["cut"], len(graph["nodes"])) == (10, True, 11)
    assert graph["nodes"][-1]["name"] == "end later turns"


def test_states_and_actions_are_drawn_without_overlap():
    body = """
        const twins = [step("a", "left"), step("a", "right"), step("a", "up")];
        const next = [step("b", "on"), step("b", "on"), step("c", "on")];
        const ways = twins.map((first, which) => ({ steps: [first, next[which]] }));
        return placeNodes(buildStateGraph(rows, ways));
    """
    graph = run_states_script(body)
    positions = {(node["x"], node["y"]) for node in graph["nodes"]}
    assert len(positions) == len(graph["nodes"]) == 5
    bends = {edge["action"]: edge["bend"] for edge in graph["edges"] if edge["from"] == "state a"}
    assert bends["left"] != bends["right"] and bends["up"] == 0
    assert all(x + 150 <= graph["width"] and y + 34 <= graph["height"] for x, y in positions)


def test_click_selects_the_nearest_curve():
    chart = {
        "series": [
            {"x": [1, 2], "at": [100, 90], "trajectories": "train"},
            {"x": [2], "at": [20], "trajectories": "val"},
        ]
    }
    requests = [[1, 0], [2, 80], [2, 30]]
    body = f"""
        const chart = {json.dumps(chart)};
        return {requests}.map(([step, height]) => findKind(chart, step, height));
    """
    page = "globalThis.document = { getElementById: () => null };"
    assert run_scripts(("dom.js", "charts.js"), body, before=page) == ["train", "train", "val"]
