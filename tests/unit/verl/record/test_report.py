"""Tests of the report: its content, its self-containment, and that it never stops training."""

import base64
import gzip
import hashlib
import html.parser
import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.fake_run import fake_run
from tests.helpers.refusals import has_problem, mentions
from tests.helpers.report_data import index_of, list_trajectories
from verl.record.report import figures, write_report
from verl.record.report.charts import (
    MAX_POINTS,
    Chart,
    Scale,
    Series,
    compute_linear_ticks,
    compute_log_ticks,
    compute_step_ticks,
    draw_svg,
    format_number,
    smooth_values,
)
from verl.record.report.figures import format_duration
from verl.record.report.run_data import load_run
from verl.record.report.trajectory_chunks import (
    RolloutFile,
    compress_rollout_file,
    pick_success_and_failure,
    read_trajectories,
    select_files_within_budget,
)
from verl.utils import jsonl
from verl.utils.commands import UsageError

ROOT = Path(__file__).resolve().parents[4]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory):
    return fake_run(
        tmp_path_factory.mktemp("runs") / "rlvcr" / "quickstart", steps=12, validate_every=6
    )


@pytest.fixture(scope="module")
def page(run_dir):
    return write_report(run_dir).read_text()


class PageParser(html.parser.HTMLParser):
    """Checks that tags close in order and collects their attributes and texts."""

    EMPTY = ("meta", "input", "line", "path", "circle", "rect", "br", "link", "img")

    def __init__(self):
        super().__init__()
        self.open, self.attributes, self.text = [], [], []

    def handle_starttag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]
        if tag not in self.EMPTY:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.attributes += [(tag, *pair) for pair in attrs]

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        self.text.append(data)


def read_hover_data(chart):
    """Return the data of a chart for the script of the page."""
    match = re.search(r'data-hover="([^"]*)"', chart)
    assert match is not None
    return json.loads(html.unescape(match[1]))


def parse_page(page):
    tags = PageParser()
    tags.feed(page)
    assert tags.open == []
    return tags


def test_page_is_well_formed_and_self_contained(page):
    tags = parse_page(page)
    assert not [a for a in tags.attributes if a[1] in ("src", "href", "data", "action")]
    assert not re.search(r"https?://(?!www\.w3\.org/2000/svg)|@import|url\(", page)


def test_page_shows_charts_figures_and_episodes(page):
    tags = parse_page(page)
    text = " ".join(" ".join(tags.text).split())
    for heading in (
        "Success rate",
        "Share of thinking levels",
        "Sampled tokens per episode",
        "Time per step",
        "Policy loss",
        "Engine against trainer",
        "Trajectories",
        "Configuration",
    ):
        assert heading in text, heading
    assert "95% interval" in text and "finished, step 12 of" not in text and "step 12 of 30" in text


def test_page_holds_the_trajectories_of_every_step(page, run_dir):
    files = index_of(page)["files"]
    file_sizes = [(file["name"], len(file["won"])) for file in files]
    assert file_sizes == [
        ("val-0", 128),
        ("train-1", 32),
        ("val-6", 128),
        ("train-12", 32),
        ("val-12", 128),
    ]
    rows = list(jsonl.read(run_dir / "rollouts" / "12.jsonl"))
    (train,) = (file for file in files if file["name"] == "train-12")
    assert train["return"] == [row["return"] for row in rows] and train["whole"]
    assert train["group"] == [index // 8 for index in range(32)]
    success, no_success = train["pair"]
    assert (train["won"][success], train["won"][no_success]) == (
        1,
        0,
    ) and success // 8 == no_success // 8
    trajectory = list_trajectories(page, "train-12")[success]
    recorded = rows[success]["steps"][0]
    shown = trajectory["steps"][0]
    assert trajectory["name"] == rows[success]["traj_uid"] and shown["action"] == recorded["action"]
    texts, values = zip(*recorded["token_credit"], strict=True)
    # The first token of a turn was not sampled, so it has no advantage.
    assert shown["tokens"] == ["<|assistant|>", *texts]
    overlays = shown["overlays"]
    assert overlays["advantage"] == [None, *(pytest.approx(value, abs=1e-4) for value in values)]
    assert overlays["mask"] == [0] + [1] * len(texts) and shown["state"] == "at countertop 1"
    assert len(overlays["entropy"]) == len(overlays["gap"]) == 1 + len(texts)
    (table,) = shown["tables"]
    assert table["note"].startswith("thinking advantage of the sampled thought")
    assert [line["number"] for line in table["lines"]] == [1, 2, 3, 4]
    # Validation trajectories have no credit, so their response is one text.
    held_out = list_trajectories(page, "val-12")[0]["steps"][0]
    assert held_out["response"].startswith("<level>") and "tokens" not in held_out


def test_page_keeps_as_many_files_as_its_budget_allows(tmp_path):
    def file(kind, step):
        path = tmp_path / f"{kind}{step}"
        path.write_bytes(b"x" * 100)
        return RolloutFile(path, kind, step)

    files = [file("train", step) for step in range(1, 10)] + [file("val", 9)]
    assert select_files_within_budget(files, 1000) == files
    selected = [selected.name for selected in select_files_within_budget(files, 999)]
    assert selected == ["train-1", "train-3", "train-5", "train-7", "train-9", "val-9"]
    # The last file of each kind is kept for any budget.
    assert [selected.name for selected in select_files_within_budget(files, 1)] == [
        "train-1",
        "train-9",
        "val-9",
    ]
    assert select_files_within_budget([], 1) == []


def test_large_file_is_read_up_to_complete_trajectories(tmp_path):
    path = tmp_path / "1.jsonl"
    rows = [
        {"traj_uid": name, "length": 2, "won": False, "steps": [{"step": step}]}
        for name in ("a", "b")
        for step in (0, 1)
    ]
    jsonl.write(path, rows)
    assert [row["traj_uid"] for row in read_trajectories(path)] == ["a", "b"]
    max_bytes = path.stat().st_size // 2 + 1
    assert [row["traj_uid"] for row in read_trajectories(path, max_bytes)] == ["a"]


def test_page_holds_the_trajectories_of_an_audit(tmp_path):
    run_dir = fake_run(tmp_path / "run", steps=1, validate_every=1)
    fake_run(run_dir / "audit", steps=1, validate_every=1)
    uid = next(jsonl.read(run_dir / "audit" / "rollouts" / "1.jsonl"))["traj_uid"]
    point = {"traj_uid": uid, "step": 0, "returns": [[0.0, 0.5], [0.0], [0.0], [1.0]]}
    (run_dir / "audit" / "audit.json").write_text(json.dumps({"points": [point]}))
    page = write_report(run_dir).read_text()
    files = {file["name"]: file for file in index_of(page)["files"]}
    assert list(files) == ["val-0", "train-1", "val-1", "audit-1"]
    assert sum(files["audit-1"]["audited"]) == 1 and "audited" not in files["train-1"]
    (table,) = list_trajectories(page, "audit-1")[0]["steps"][0]["tables"]
    assert table["heads"][-1] == "executed return, n = 2"
    assert [line["cells"][-1][0] for line in table["lines"]] == ["0.25", "0.00", "0.00", "1.00"]


def test_token_lines_that_do_not_match_are_ignored(tmp_path):
    pairs = [["go", 0.5], [" on", -0.25]]
    row = {"traj_uid": "a", "won": True, "steps": [{"step": 0, "token_credit": pairs}]}
    token_line = {
        "step": 0,
        "tokens": ["<s>", "go", " on"],
        "mask": [0, 1, 1],
        "weight": [0, 1, 0.5],
    }
    file = RolloutFile(tmp_path / "1.jsonl", "train", 1, tmp_path / "tokens.jsonl")
    jsonl.write(file.path, [row])
    overlays = []
    for mask in ([0, 1, 1], [0, 1, 0]):
        rewrite_files(file, [{"traj_uid": "a", "steps": [token_line | {"mask": mask}]}])
        overlays.append(read_first_trajectory(file)["steps"][0]["overlays"])
    assert overlays[0] == {"advantage": [None, 0.5, -0.25], "mask": [0, 1, 0.5]}
    assert overlays[1] == {"advantage": [0.5, -0.25]}


def rewrite_files(file, lines):
    """Write new token lines. The rollout file is rewritten too, as when a step is repeated."""
    jsonl.write(file.tokens, lines)
    jsonl.write(file.path, list(jsonl.read(file.path)))


def read_first_trajectory(file):
    return json.loads(gzip.decompress(compress_rollout_file(file).packed))["trajectories"][0]


def test_changed_file_is_packed_again(tmp_path):
    file = RolloutFile(tmp_path / "1.jsonl", "train", 1)
    jsonl.write(file.path, [{"traj_uid": "a", "won": True, "steps": [{"step": 0}]}])
    first = compress_rollout_file(file)
    assert compress_rollout_file(file) is first
    jsonl.write(file.path, [{"traj_uid": "a", "won": True, "steps": []}] * 2)
    assert compress_rollout_file(file).summary["turns"] == [0] and first.summary["turns"] == [1]


def test_tokens_of_a_summary_have_the_values_of_the_token_file(tmp_path):
    token_path = tmp_path / "1.tokens.jsonl"
    file = RolloutFile(tmp_path / "1.jsonl", "train", 1, token_path)
    turn = {"step": 0, "token_credit": [["look", 0.5]]}
    summary = {"step": 1, "token_credit": [["desk", 0.25], ["left", -1.0]]}
    jsonl.write(file.path, [{"traj_uid": "a", "steps": [turn], "summary": summary}])
    values = {"step": 1, "tokens": ["desk", "left"], "mask": [1, 1], "entropy": [0.1, 0.2]}
    turn_values = {"step": 0, "tokens": ["look"], "mask": [1], "entropy": [0.7]}
    jsonl.write(token_path, [{"traj_uid": "a", "steps": [turn_values], "summary": values}])
    step = read_first_trajectory(file)["steps"][0]
    assert step["tokens"] == ["look"] and step["overlays"]["entropy"] == [0.7]
    assert step["summary"]["tokens"] == ["desk", "left"]
    assert step["summary"]["overlays"] == {
        "advantage": [0.25, -1.0],
        "entropy": [0.1, 0.2],
        "mask": [1, 1],
    }


def test_every_chart_has_labels_and_units(page):
    charts = re.findall(r"<svg .*?</svg>", page, re.DOTALL)
    assert len(charts) > 12
    for chart in charts:
        hover = read_hover_data(chart)
        below = "training step" if hover["axis"] == "step" else hover["axis"]
        assert (
            f"{below}</text>" in chart
            and chart.count('class="label"') == 2
            and 'class="tick"' in chart
        )
        assert all(len(s["x"]) == len(s["y"]) > 0 for s in hover["series"])


def test_measured_intervals_are_shown(tmp_path):
    bare = tmp_path / "bare"
    bare.mkdir()
    bounds = {"val/success_rate_low": 0.41, "val/success_rate_high": 0.6}
    jsonl.append(bare / "metrics.jsonl", {"step": 0, "val/success_rate": 0.5, **bounds})
    jsonl.append(bare / "metrics.jsonl", {"step": 3, "val/success_rate": 0.7})
    run = load_run(bare)
    assert run.success_interval(0) == (0.41, 0.6) and run.success_interval(3) == (0.7, 0.7)


def test_recorded_texts_are_no_markup(tmp_path):
    run_dir = fake_run(tmp_path / "r", steps=1, validate_every=1)
    path = run_dir / "rollouts" / "1.jsonl"
    hostile = "</script><script>alert(1)</script>"
    rows = list(jsonl.read(path))
    for row in rows:
        row["prompt"] = row["task_id"] = row["steps"][0]["observation"] = hostile
        row["steps"][0]["token_credit"] = [[hostile, 0.5]]
    jsonl.write(path, rows)
    page = write_report(run_dir).read_text()
    assert "alert(1)" not in page
    trajectory = list_trajectories(page, "train-1")[0]
    assert trajectory["prompt"] == hostile and trajectory["steps"][0]["tokens"] == [hostile]
    parse_page(page)


def test_lone_surrogates_and_impossible_numbers_do_not_prevent_a_report(tmp_path):
    run_dir = fake_run(tmp_path / "r", steps=2, validate_every=1)
    path = run_dir / "rollouts" / "2.jsonl"
    rows = list(jsonl.read(path))
    rows[0]["steps"][0]["observation"] = "a\ud83db"
    jsonl.write(path, rows)
    odd = {"val/\ud800/success_rate": 1.0, "x": 10**400, "time": "noon", "entropy": "Infinity"}
    odd |= {"val/success_rate_low": "x", "actor/entropy": math.inf}
    with (run_dir / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"step": 2, **odd}) + "\n")
    page = write_report(run_dir).read_text()
    assert list_trajectories(page, "train-2")[0]["steps"][0]["observation"] == "a?b"
    parse_page(page)


def test_only_the_script_of_the_page_may_run(page):
    (script,) = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert f"script-src &#39;sha256-{digest}&#39;" in page and "default-src &#39;none&#39;" in page
    # No script uses a function that parses text as markup.
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(", script)


@pytest.mark.parametrize("present", ["metrics", "config"])
def test_run_that_has_just_begun_has_a_report(tmp_path, present):
    if present == "metrics":
        jsonl.append(
            tmp_path / "metrics.jsonl", {"step": 0, "val/success_rate": 0.25, "odd/text": "x"}
        )
    else:
        (tmp_path / "config.yaml").write_text(yaml.safe_dump({"trainer": {"project_name": "p"}}))
    parse_page(write_report(tmp_path).read_text())


BOMB = "a0: &a0 [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12)
)


@pytest.mark.parametrize("make", [os.mkfifo, lambda path: path.write_text(BOMB)])
def test_config_that_never_ends_is_ignored(tmp_path, make):
    run = fake_run(tmp_path / "run", steps=2, validate_every=2)
    (run / "config.yaml").unlink()
    make(run / "config.yaml")
    assert write_report(run).is_file()


@pytest.mark.parametrize("steps", ["x", [None], [[1]], 5, {"a": 1}, [{"step": "x"}, {"step": 1}]])
def test_rows_that_no_run_wrote_are_refused_by_their_file(tmp_path, steps):
    run = fake_run(tmp_path / "run", steps=2, validate_every=2)
    row = {"uid": "a", "traj_uid": "b", "steps": steps}
    (run / "rollouts" / "1.jsonl").write_text(json.dumps(row) + "\n")
    with pytest.raises(UsageError, check=has_problem("unreadable_file", "", "rollouts/1.jsonl: ")):
        write_report(run)


def test_missing_run_is_an_error(tmp_path):
    with pytest.raises(FileNotFoundError, check=mentions("metrics.jsonl")):
        write_report(tmp_path)


def test_rows_of_one_trajectory_are_joined_in_order(tmp_path):
    rows = [{"traj_uid": "a", "won": True, "steps": [{"step": s}]} for s in (2, 0, 1)]
    jsonl.write(tmp_path / "1.jsonl", rows)
    (trajectory,) = read_trajectories(tmp_path / "1.jsonl")
    assert [step["step"] for step in trajectory["steps"]] == [0, 1, 2]


def test_samples_contrast_trajectories_of_the_same_task():
    def row(uid, won):
        return {"uid": uid, "won": won, "steps": [{}]}

    rows = [row("a", True), row("a", True), row("b", False), row("b", True)]
    assert [(r["uid"], r["won"]) for r in pick_success_and_failure(rows)] == [
        ("b", True),
        ("b", False),
    ]
    assert [r["won"] for r in pick_success_and_failure(rows[:2])] == [True]


def list_time_parts(run):
    return [part.metric for part in figures.select_parts_of_step_time(run)]


def test_nested_rollout_times_are_not_counted_twice(tmp_path):
    parts = {"timing_s/gen": 8.0, "timing_s/alternatives": 3.0, "timing_s/update_actor": 2.0}
    jsonl.append(tmp_path / "metrics.jsonl", {"step": 1, **parts})
    assert list_time_parts(load_run(tmp_path)) == ["timing_s/gen", "timing_s/update_actor"]
    inside = {"timing_s/gen_engine": 4.0, "timing_s/gen_env": 1.0, "timing_s/alternatives": 3.0}
    jsonl.append(tmp_path / "metrics.jsonl", {"step": 2, **parts, **inside})
    assert list_time_parts(load_run(tmp_path)) == [*inside, "timing_s/update_actor"]


def test_ticks_are_round_and_cover_the_values():
    assert compute_linear_ticks(0.0, 0.97, 6) == [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert compute_linear_ticks(-3, 12, 4) == [-5, 0, 5, 10, 15]
    assert compute_linear_ticks(0, 0) == [0.0, 0.25, 0.5, 0.75, 1.0]
    assert compute_linear_ticks(5, 5)[0] <= 5 <= compute_linear_ticks(5, 5)[-1]
    assert compute_log_ticks(2e-7, 3e-4) == pytest.approx([1e-7, 1e-6, 1e-5, 1e-4, 1e-3])
    assert compute_step_ticks(1, 30, 5) == [10, 20, 30] and compute_step_ticks(0, 0) == [0.0]


def test_scales_map_ends_to_ends():
    assert Scale(0, 10, 100, 0)(2.5) == 75
    assert Scale(1e-4, 1, 0, 40, log=True)(1e-2) == 20


def test_numbers_are_short():
    shown = [format_number(v) for v in (0, 12345.6, 12.345, 0.012345, 1.23e-7, -3.0, 2e8)]
    assert shown == ["0", "12,346", "12.3", "0.0123", "1.2e-7", "-3", "2e8"]
    assert [format_duration(s) for s in (45, 400, 7500)] == ["45 s", "6 min 40 s", "2 h 05 min"]


def test_smoothing_has_no_bias_towards_the_start():
    assert smooth_values([2.0, 2.0, 2.0]) == pytest.approx([2.0, 2.0, 2.0])
    assert smooth_values([1.0, 0.0])[1] == pytest.approx(0.7 * 0.3 / 0.51)


def test_long_series_are_thinned():
    xs = list(range(10_000))
    ends = [float(x) for x in xs]
    series = Series("x", xs, [0.5] * 10_000, "accent", x_low=ends, x_high=ends).limit_points()
    assert len(series.xs) <= MAX_POINTS + 1 and series.xs[-1] == 9_999
    assert series.x_low == series.x_high == series.xs


def test_stacked_layers_are_summed():
    layers = [Series("a", [1, 2], [0.25, 0.5], "ramp-1"), Series("b", [2], [0.5], "ramp-2")]
    svg = draw_svg(Chart("t", "y", layers, "stacked", y_range=(0.0, 1.0), height=148))
    hover = read_hover_data(svg)
    assert [s["y"] for s in hover["series"]] == [["0.25", "0.5"], ["0", "0.5"]]
    assert "526 10L" in svg or "526.0 10.0L" in svg  # the sum 1.0 is at the top


def test_success_is_drawn_against_tokens_per_evaluation(tmp_path):
    for step, tokens, rate in ((0, 50.004, 0.2), (5, 40.0, 0.3), (10, 30.0, 0.6)):
        bounds = {"val/success_rate_low": rate - 0.1, "val/success_rate_high": rate + 0.1}
        line = {"step": step, "val/tokens_per_episode": tokens, "val/success_rate": rate, **bounds}
        jsonl.append(tmp_path / "metrics.jsonl", line)
        charts = figures.draw_success_section(load_run(tmp_path)).charts
        (path,) = next(c for c in charts if c.title == "Success against tokens").series
        # A single evaluation is shown in another chart.
        assert len(path.xs) == (0 if step == 0 else 1 + step // 5)
    assert (list(path.xs), path.ys) == ([50.0, 40.0, 30.0], [0.2, 0.3, 0.6])
    assert path.labels == ["step 0", "", "step 10"]
    assert path.low == pytest.approx([0.1, 0.2, 0.5])
    assert path.high == pytest.approx([0.3, 0.4, 0.7])


def test_points_have_their_own_axis():
    points = [
        Series("near", [11.0], [0.25], "ramp-1", [0.2], [0.3], labels=["near"]),
        Series("far & wide", [15.0], [0.75], "ramp-2", labels=["far & wide"]),
    ]
    chart = Chart("t", "won", points, "points", "tokens", "percent", width=600, height=200)
    svg = draw_svg(chart)
    hover = read_hover_data(svg)
    assert hover["axis"] == "tokens" and (hover["low"], hover["high"]) == (10.0, 16.0)
    assert [s["range"] for s in hover["series"]] == [["20% to 30%"], None]
    assert svg.count("<circle") == 2 and svg.count('class="whisker') == 1
    assert ">near</text>" in svg and ">far &amp; wide</text>" in svg and ">tokens</text>" in svg
    # 6 tokens lie between the margins of 60 and 14 pixels. Both points are one token from an end.
    assert re.findall(r'cx="([\d.]+)"', svg) == ["147.67", "498.33"]
    assert (
        'x="155.67"' in svg
        and 'x="506.33"' in svg
        and svg.count('text-anchor="end"') == len(re.findall(r"%</text>", svg))
    )
    assert chart.legend_series == []


def test_points_have_whiskers_in_both_directions():
    point = Series("a", [12.0], [0.5], "accent", [0.25], [0.75], x_low=[10.0], x_high=[16.0])
    svg = draw_svg(Chart("t", "won", [point], "points", "tokens", width=600, height=200))
    upright, sideways = re.findall(r'class="whisker c-accent" d="M([^"]+)"', svg)
    hover = read_hover_data(svg)
    # The axis covers the whole interval: 8 to 18 lie on 526 pixels behind the margin of 60.
    assert (hover["low"], hover["high"]) == (8.0, 18.0)
    ((start, height, end),) = re.findall(r"([\d.]+) ([\d.]+)H([\d.]+)M", sideways)
    assert (float(start), float(end)) == pytest.approx((60 + 526 * 0.2, 60 + 526 * 0.8))
    assert [float(height)] == hover["series"][0]["at"]
    assert [upright.split()[0]] == re.findall(r'cx="([\d.]+)"', svg)


def test_last_label_fits_and_axis_starts_at_zero():
    points = [Series("a", [1.0, 9.0], [0.0, 1.0], "accent", labels=["first", "last"])]
    svg = draw_svg(Chart("t", "won", points, "points", "tokens", width=600, height=200))
    assert read_hover_data(svg)["low"] == 0.0
    label = re.search(r'<text class="tick" x="([\d.]+)" text-anchor="end" [^>]*>last<', svg)
    assert label is not None and float(label[1]) < 586
    assert re.search(r'<text class="tick" x="[\d.]+" y="[\d.]+">first<', svg)


def test_only_task_sources_are_listed_as_task_types(tmp_path):
    names = [
        f"val/{source}/{name}"
        for source in ("alfworld/pick", "cool")
        for name in ("success_rate", "episode_reward")
    ]
    names.append("val/rules/fixed/success_rate")
    jsonl.append(tmp_path / "metrics.jsonl", {"step": 0, **dict.fromkeys(names, 0.5)})
    charts = figures.draw_success_section(load_run(tmp_path)).charts
    assert [s.name for s in charts[1].series] == ["alfworld/pick", "cool"]


def test_command_line_writes_and_shows_the_report(run_dir, tmp_path):
    written = subprocess.run(
        [sys.executable, "-m", "verl.record.report", str(run_dir)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=ROOT,
    )
    assert written.stdout.strip() == str(run_dir / "report.html")
    script = [
        sys.executable,
        str(ROOT / "scripts" / "show_trajectory.py"),
        str(run_dir),
        "--contexts",
        "--step",
        "12",
    ]
    shown = subprocess.run(script, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "success alfworld/pick_and_place_simple" in shown.stdout, shown.stderr
    assert "(sampled)" in shown.stdout
    script[-1] = "11"
    refused = subprocess.run(script, capture_output=True, text=True, timeout=60, cwd=tmp_path)
    assert "[1, 12]" in refused.stderr and refused.returncode != 0
