"""Console, report and validation show what a method contributes, and name no method themselves."""

import io
import logging
import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console

import rlvcr.report_sections
from rlvcr.records import ThinkingTurnRecord
from tests.helpers.fake_run import fake_run
from tests.helpers.report_data import index_of, list_trajectories
from verl import report_sections as sections
from verl.protocol import DataProto
from verl.record.console import build_metric_table, format_console_metrics
from verl.record.report import write_report
from verl.records import StepRecord
from verl.report_sections import (
    AlternativesView,
    ConsoleMetric,
    Curve,
    HeadlineMetric,
    MetricColumn,
    MetricTable,
    NumberColumn,
    Plot,
    ReportContribution,
    ReportSection,
    Scatter,
    TurnView,
    compute_contributed_metrics,
    load_contributions,
)
from verl.trainer.ppo.metrics import compute_validation_metrics
from verl.utils import jsonl

ROOT = Path(__file__).resolve().parents[3]

WEATHER = ReportContribution(
    name="weather",
    console_metrics=(ConsoleMetric("rain", ("weather/rain",), "{:.1f} mm"),),
    headline_metrics=(HeadlineMetric("rain per day", "weather/rain", "{:.1f} mm"),),
    sections=(
        ReportSection(
            "Weather",
            "What falls from the sky.",
            (Plot("Rain", "millimetres", (Curve("weather/rain", "rain"),)),),
        ),
    ),
    health_plots=(Plot("Hail", "stones", (Curve("weather/hail", "hail"),)),),
    turn_view=TurnView(
        badge_key="season",
        flags=("storm",),
        alternatives=AlternativesView(
            key="skies",
            badge_key="season",
            text="sky",
            chosen_key="seen",
            columns=(NumberColumn("drops", "drops", "{:.0f}", highlights_largest=True),),
            note=("sun", "hours of sun {:.1f}"),
        ),
        lead="The tables show the skies of the other seasons.",
    ),
    batch_metrics=lambda batch, prefix: {f"{prefix}/rows": float(len(batch))},
)
ALTERNATIVE_SKIES = [
    {"season": 3, "sky": "clear", "seen": False, "drops": 1.0},
    {"season": 2, "sky": "grey", "seen": True, "drops": 7.0},
]


@pytest.fixture
def no_contributions(monkeypatch):
    """Remove all contributions except those that the test adds."""
    monkeypatch.setattr(sections, "CONTRIBUTIONS", [])
    sections.load_contributions.cache_clear()
    yield
    sections.load_contributions.cache_clear()


@pytest.fixture
def run_dir(tmp_path):
    """Return the directory of a run of two steps with weather metrics."""
    path = fake_run(tmp_path / "run", steps=2, validate_every=2)
    for step in (1, 2):
        record = {"step": step, "weather/rain": 1.5 * step, "weather/hail": 2}
        jsonl.append(path / "metrics.jsonl", record)
    rollouts = path / "rollouts" / "2.jsonl"
    rows = list(jsonl.read(rollouts))
    for row in rows:
        row["steps"][0] |= {
            "season": 2,
            "storm": "thunder",
            "skies": ALTERNATIVE_SKIES,
            "sun": 4.25,
        }
    jsonl.write(rollouts, rows)
    return path


def test_report_and_console_name_no_thinking_levels():
    files = [ROOT / "verl" / "report_sections.py"]
    files += [file for file in (ROOT / "verl" / "record").rglob("*") if file.is_file()]
    files = [file for file in files if "__pycache__" not in file.parts]
    assert len(files) > 15
    for file in files:
        lines = file.read_text().splitlines()
        matches = [line for line in lines if re.search("level", line, re.IGNORECASE)]
        others = [line for line in matches if not re.search(r"setLevel|getLevel|\.level\b", line)]
        assert not others, f"{file}: {others}"
        assert '"rlvcr/' not in file.read_text(), f"{file} names a metric of rlvcr"


@pytest.mark.usefixtures("no_contributions")
def test_contributed_sections_appear_where_declared(run_dir):
    sections.CONTRIBUTIONS.append(WEATHER)
    page = write_report(run_dir).read_text()
    titles = re.findall(r"<h2>(.*?)</h2>", page)
    assert titles[:4] == ["Success", "Weather", "Effort", "Optimisation"]
    assert "What falls from the sky." in page and "rain per day" in page
    health = page.partition("<h2>Health</h2>")[2]
    charts = re.findall("<figcaption>(.*?)</figcaption>", health.partition("</section>")[0])
    assert charts[:2] == ["Engine against trainer", "Hail"]


@pytest.mark.usefixtures("no_contributions")
def test_turns_show_what_a_contribution_declares(run_dir):
    sections.CONTRIBUTIONS.append(WEATHER)
    page = write_report(run_dir).read_text()
    assert index_of(page)["lead"] == "The tables show the skies of the other seasons."
    step = list_trajectories(page, "train-2")[0]["steps"][0]
    assert step["badges"] == [2] and step["flags"] == ["thunder"]
    (table,) = step["tables"]
    assert table["heads"] == ["season", "sky", "drops"] and table["note"] == "hours of sun 4.2"
    lines = [
        (line["number"], line["text"], line["chosen"], line["cells"]) for line in table["lines"]
    ]
    assert lines == [(2, "grey", True, [["7", True]]), (3, "clear", False, [["1", False]])]


@pytest.mark.usefixtures("no_contributions")
def test_executed_returns_are_shown_for_each_alternative(run_dir):
    def executed_returns(directory):
        assert directory == run_dir
        return {(uid, 0): {2: [0.0, 1.0], 3: [1.0, 1.0]}}

    uid = next(jsonl.read(run_dir / "rollouts" / "2.jsonl"))["traj_uid"]
    assert WEATHER.turn_view is not None and WEATHER.turn_view.alternatives is not None
    view = replace(
        WEATHER.turn_view,
        alternatives=replace(WEATHER.turn_view.alternatives, outcomes=executed_returns),
    )
    sections.CONTRIBUTIONS.append(replace(WEATHER, turn_view=view))
    page = write_report(run_dir).read_text()
    first, second = list_trajectories(page, "train-2")[:2]
    (table,) = first["steps"][0]["tables"]
    assert table["heads"][-1] == "executed return, n = 2"
    assert [line["cells"][-1] for line in table["lines"]] == [["0.50", False], ["1.00", True]]
    (table,) = second["steps"][0]["tables"]
    assert table["heads"][-1] == "drops"
    (file,) = (file for file in index_of(page)["files"] if file["name"] == "train-2")
    assert file["audited"] == [1] + [0] * 31


@pytest.mark.usefixtures("no_contributions")
def test_report_without_contributions_shows_no_method(run_dir):
    page = write_report(run_dir).read_text()
    assert "Thinking" not in page and "Weather" not in page
    step = list_trajectories(page, "train-2")[0]["steps"][0]
    assert not {"badges", "flags", "tables"} & set(step) and index_of(page)["lead"] == ""
    assert format_console_metrics({"rlvcr/level_share_1": 1.0, "weather/rain": 1.0}) == {}


@pytest.mark.usefixtures("no_contributions")
def test_console_shows_contributed_figures():
    sections.CONTRIBUTIONS.append(WEATHER)
    metrics = {"weather/rain": 1.5, "episode/reward": 1.0, "critic/score/mean": 2.0}
    assert list(format_console_metrics(metrics).items()) == [
        ("return", "1"),
        ("rain", "1.5 mm"),
        ("score", "2"),
    ]


SEASON_TABLE = MetricTable(
    "Skies of all seasons",
    "weather/by",
    "season",
    (
        MetricColumn("rain", "rain, mm", "{:.1f}", scale=10.0),
        MetricColumn("hail", "hail", "{:.0f}"),
    ),
)
SEASON_METRICS = {
    "weather/by/late_summer/rain": 0.25,
    "weather/by/late_summer/rain_low": 0.2,
    "weather/by/late_summer/rain_high": 0.31,
    "weather/by/winter/hail": 7.0,
    "weather/by/spring/hours": 3.0,
    "weather/bystander/rain": 1.0,
}


def test_table_has_a_line_per_measured_name_with_intervals():
    assert (
        SEASON_TABLE.line_names(SEASON_METRICS) == ["late_summer", "winter"]
        and SEASON_TABLE.line_names({}) == []
    )
    assert SEASON_TABLE.line_cells(SEASON_METRICS, "late_summer") == [
        "late summer",
        "2.5 (2.0 to 3.1)",
        "",
    ]
    assert SEASON_TABLE.line_cells(SEASON_METRICS, "winter") == ["winter", "", "7"]
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(build_metric_table(SEASON_TABLE, SEASON_METRICS))
    text = console.export_text().splitlines()
    assert text[0].strip() == "Skies of all seasons"
    assert [line.split() for line in text[1:3]] == [
        ["season", "rain,", "mm", "hail"],
        ["late", "summer", "2.5", "(2.0", "to", "3.1)"],
    ]


def test_names_in_a_table_are_no_markup_and_no_control_characters():
    names = ["[math]", "[/]", "a\x1b[2Jb"]
    console = Console(width=80, record=True, file=io.StringIO())
    metrics = {f"weather/by/{name}/rain": 1.0 for name in names}
    console.print(build_metric_table(SEASON_TABLE, metrics))
    lines = console.export_text().splitlines()[2:]
    assert [line.split()[0] for line in lines] == ["[math]", "[/]", r"a\x1b[2Jb"]


@pytest.mark.usefixtures("no_contributions")
def test_report_shows_contributed_tables_and_points(run_dir):
    plan = ReportSection(
        "Seasons",
        "One against the other.",
        (
            Scatter(
                "Rain and hail",
                SEASON_TABLE,
                "hail",
                "rain",
                "hail",
                "rain",
                (("winter", "second"),),
            ),
        ),
        tables=(SEASON_TABLE,),
    )
    sections.CONTRIBUTIONS.append(ReportContribution("seasons", sections=(plan,)))
    assert "Seasons" not in write_report(run_dir).read_text(), "nothing was measured"
    jsonl.append(
        run_dir / "metrics.jsonl", {"step": 1, **SEASON_METRICS, "weather/by/winter/rain": 9.0}
    )
    last = {"rain": 3.0, "hail_low": 5.0, "hail_high": 8.0}
    winter = {f"weather/by/winter/{name}": value for name, value in last.items()}
    jsonl.append(run_dir / "metrics.jsonl", {"step": 2, **SEASON_METRICS, **winter})
    section = write_report(run_dir).read_text().partition("<h2>Seasons</h2>")[2]
    section = section.partition("</section>")[0]
    # Late summer has no hail: it is in the table and not among the points.
    assert section.count("<circle") == 1 and ">winter</text>" in section
    # One whisker for hail. The whisker of rain has length 0, because rain has no interval.
    assert section.count('class="whisker c-second"') == 2
    assert 'class="dot c-second"' in section and "Skies of all seasons" in section
    assert '<td>late summer</td><td class="num">2.5 (2.0 to 3.1)</td>' in section
    assert '<td>winter</td><td class="num">30.0</td><td class="num">7 (5 to 8)</td>' in section


def test_method_is_imported_by_name():
    code = "from verl.report_sections import load_contributions as load; print(load()[0].name)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert result.stdout.strip() == "rlvcr", result.stderr


@pytest.mark.usefixtures("no_contributions")
def test_failed_import_of_the_method_is_logged_once(monkeypatch, caplog):
    monkeypatch.setattr(sections, "METHOD_MODULE", "no_such_package.sections")
    with caplog.at_level(logging.WARNING):
        assert load_contributions() == load_contributions() == []
    assert [record.args for record in caplog.records] == [("no_such_package.sections",)]


def test_declarations_need_no_torch():
    code = "import rlvcr.report_sections, sys; print('torch' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=60, cwd=ROOT
    )
    assert result.stdout.strip() == "False", result.stderr


def rows_of(steps: list[list]) -> DataProto:
    """Return rows of one token each, one trajectory per row."""
    count = len(steps)
    columns = {
        "steps": steps,
        "anchor_obs": [[f"state {step.step}" for step in row] for row in steps],
        "uid": [f"g{row}" for row in range(count)],
        "traj_uid": [f"g{row}/0" for row in range(count)],
        "data_source": ["desk"] * count,
        "won": np.array([True] * count),
        "aborted": np.array([False] * count),
        "episode_rewards": np.ones(count),
        "episode_lengths": np.ones(count, dtype=np.int64),
    }
    return DataProto.from_dict({"response_mask": torch.ones(count, 1)}, columns)


FIELDS = {
    "observation": "a desk",
    "response": "look",
    "action": "look",
    "is_action_valid": True,
    "reward": 0.0,
    "done": True,
    "num_tokens": 1,
    "stop_reason": "stop",
    "span": (0, 1),
}


def test_validation_measures_level_shares():
    rows = [
        [
            ThinkingTurnRecord(step=0, level=2, **FIELDS),
            ThinkingTurnRecord(step=1, level=4, **FIELDS),
        ],
        [
            ThinkingTurnRecord(step=0, level=2, **FIELDS),
            ThinkingTurnRecord(step=1, level=None, **FIELDS),
        ],
    ]
    metrics = compute_validation_metrics(rows_of(rows))
    shares = [metrics[f"val/level_share_{level}"] for level in (1, 2, 3, 4)]
    assert shares == pytest.approx([0.0, 2 / 3, 0.0, 1 / 3])
    assert metrics["val/success_rate"] == 1.0


def test_level_information_uses_situations_or_else_states():
    # All observations are equal, there are two states, and the level follows the state: log 2.
    rows = [[ThinkingTurnRecord(step=k, level=1 + k, **FIELDS) for k in (0, 1)] for _ in range(8)]
    metrics = compute_validation_metrics(rows_of(rows))
    assert metrics["val/level_information"] == pytest.approx(math.log(2))
    # Both states have the same situation name, so they count as one.
    same_situation = [[replace(step, situation="a fork") for step in row] for row in rows]
    assert compute_validation_metrics(rows_of(same_situation))["val/level_information"] == 0.0


def test_turns_without_levels_have_no_shares():
    rows = [[StepRecord(step=0, **FIELDS)], [ThinkingTurnRecord(step=0, **FIELDS)]]
    assert rlvcr.report_sections.compute_level_shares(rows_of(rows), "val") == {}


@pytest.mark.usefixtures("no_contributions")
def test_every_contribution_measures_a_batch():
    sections.CONTRIBUTIONS.append(WEATHER)
    assert compute_contributed_metrics(rows_of([[], []]), "val") == {"val/rows": 2.0}
