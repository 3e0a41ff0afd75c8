"""Tests of the comparison page: how runs form arms, and the statistics over seeds."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from tests.helpers.fake_run import fake_run
from tests.helpers.refusals import has_problem
from verl.config.settings import ConfigError
from verl.record.report import write_comparison
from verl.record.report.charts import Chart, draw_svg
from verl.record.report.comparison import (
    build_settings_table,
    build_value_table,
    compute_arm_curve,
    draw_comparison_sections,
    get_comparison_path,
    group_into_arms,
)
from verl.record.report.run_data import load_run
from verl.report_sections import Curve
from verl.utils import jsonl
from verl.utils.statistics import bootstrap_interval

ROOT = Path(__file__).resolve().parents[4]


def make_run(path, rates, **settings):
    """Write a run directory with success rates at steps 0, 1, ... and load it."""
    path.mkdir(parents=True)
    config = {"trainer": {"experiment_name": path.name, "seed": settings.pop("seed", 0)}}
    (path / "config.yaml").write_text(yaml.safe_dump(config | {"algorithm": settings}))
    for step, rate in enumerate(rates):
        jsonl.append(path / "metrics.jsonl", {"step": step, "val/success_rate": rate})
    return load_run(path)


def test_runs_that_differ_in_seeds_and_names_are_one_arm(tmp_path):
    runs = [make_run(tmp_path / f"a_s{seed}", [0.5], seed=seed, lr=1.0) for seed in (1, 2)]
    other = make_run(tmp_path / "b_s1", [0.5], seed=1, lr=2.0)
    assert group_into_arms([*runs, other]) == {"lr=1.0": runs, "lr=2.0": [other]}
    assert group_into_arms(runs) == {"a": runs}


@pytest.mark.parametrize("ending", ["-seed", "-seed=", "_s"])
def test_arms_with_many_differences_are_named_by_directory(tmp_path, ending):
    first = [
        make_run(tmp_path / f"long{ending}{seed}", [0.5], seed=seed, a=1, b=1, c=1)
        for seed in (1, 2)
    ]
    second = make_run(tmp_path / "short", [0.5], a=2, b=2, c=2)
    groups = group_into_arms([*first, second])
    assert groups == {"long": first, "short": [second]}
    table = build_settings_table(groups)
    assert table.head == ["setting", "long", "short"]
    assert table.lines == [
        ["algorithm.a", "1", "2"],
        ["algorithm.b", "1", "2"],
        ["algorithm.c", "1", "2"],
    ]


def test_arms_with_equal_names_get_numbers(tmp_path):
    folders = [tmp_path / parent / "run" for parent in ("x", "y")]
    one = make_run(folders[0], [0.5], a=1, b=1, c=1)
    other = make_run(folders[1], [0.5], a=2, b=2, c=2)
    assert list(group_into_arms([one, other])) == ["run", "run (2)"]


def test_line_is_the_mean_over_seeds_with_its_interval(tmp_path):
    runs = [
        make_run(tmp_path / "s1", [0.1, 0.2, 0.3], seed=1),
        make_run(tmp_path / "s2", [0.3, 0.6], seed=2),
        make_run(tmp_path / "s3", [0.2, 0.4, 0.9], seed=3),
    ]
    line = compute_arm_curve("arm", runs, Curve("val/success_rate", "held-out"), "accent")
    assert (line.name, list(line.xs), line.band) == ("arm, 3 seeds", [0, 1], True)
    assert line.ys == pytest.approx([0.2, 0.4])
    assert line.low is not None and line.high is not None
    low, high = bootstrap_interval([0.2, 0.6, 0.4], resamples=1000)
    assert (line.low[1], line.high[1]) == (low, high) and low < 0.4 < high
    svg = draw_svg(Chart("t", "won", [line]))
    assert svg.count('class="band') == 1 and "whisker" not in svg
    single_run = compute_arm_curve("arm", runs[:1], Curve("val/success_rate", "held-out"), "accent")
    assert (single_run.name, single_run.low, single_run.band) == ("arm", None, False)


def test_table_has_arms_with_intervals_and_their_runs(tmp_path):
    runs = [
        make_run(tmp_path / f"s{seed}", [0.25, rate], seed=seed)
        for seed, rate in ((1, 0.5), (2, 1.0))
    ]
    table = build_value_table({"arm": runs})
    assert table.head[:4] == ["arm", "seeds", "held-out before", "held-out after"]
    assert table.lines[0][:4] == ["arm", "2", "25% (25% to 25%)", "75% (50% to 100%)"]
    assert table.lines[1][:4] == ["\N{MIDDLE DOT} s1", "1", "25%", "50%"]
    # Values that were not measured are empty.
    assert table.lines[0][4:] == ["", "", ""]


def test_runs_of_different_lengths_are_compared_at_their_last_common_step(tmp_path):
    runs = [make_run(tmp_path / "s1", [0.0, 0.5, 1.0], seed=1)]
    runs.append(make_run(tmp_path / "s2", [0.0, 0.25], seed=2))
    lines = build_value_table({"arm": runs}).lines
    assert [line[3] for line in lines] == ["37.5% (25% to 50%), step 1", "100%", "25%"]


def test_page_is_written_next_to_its_runs(tmp_path):
    assert (
        get_comparison_path([tmp_path / "a" / "x", tmp_path / "a" / "y"])
        == tmp_path / "a" / "comparison.html"
    )
    assert (
        get_comparison_path([tmp_path / "a", tmp_path / "b" / "c"]) == tmp_path / "comparison.html"
    )


def test_command_line_writes_one_page_of_several_runs(tmp_path):
    runs = [
        fake_run(tmp_path / f"{name}_{seed}", 4, 2, rollouts=False, seed=seed, estimator=name)
        for name in ("rlvcr", "grpo")
        for seed in (1, 2)
    ]
    command = [sys.executable, "-m", "verl.utils.report", *map(str, runs)]
    written = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    page = Path(written.stdout.strip())
    assert page == tmp_path / "comparison.html", written.stderr
    text = page.read_text()
    assert "adv_estimator=rlvcr, 2 seeds" in text and "Settings that differ" in text
    assert "Thought length" in text and not re.search(r"https?://(?!www\.w3\.org/2000/svg)", text)
    assert not (runs[0] / "report.html").exists()
    out = tmp_path / "elsewhere.html"
    assert write_comparison(runs[:2], out) == out and "rlvcr_" not in text.split("</h1>")[0]
    page.write_text("notes of the user")
    with pytest.raises(ConfigError, check=has_problem("file_exists", "--out")):
        write_comparison(runs)
    assert page.read_text() == "notes of the user"
    refused = subprocess.run(
        [*command[:4], "--out", "x.html"], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert refused.returncode == 2 and "--out" in refused.stderr


def test_runs_without_a_common_metric_have_no_chart(tmp_path):
    first = make_run(tmp_path / "a", [0.5], x=1)
    second = make_run(tmp_path / "b", [], x=2)
    groups = group_into_arms([first, second])
    (success,) = draw_comparison_sections(groups)[:1]
    assert [chart.title for chart in success.charts] == ["Held-out success"]
    assert [line.name for line in success.charts[0].series] == ["x=1"]


def test_before_is_empty_without_val_before_train(tmp_path):
    """The first validation of such a run is not a measurement before training."""
    late = make_run(tmp_path / "late", [0.25, 0.5], seed=1)
    for line in late.metrics:
        line["step"] += 5
    (line,) = build_value_table({"arm": [late]}).lines
    assert line[2:4] == ["", "50%"]
