"""Tests that metrics are written to the file in all circumstances."""

import io
import json
import logging
import os
from pathlib import Path

import numpy as np
import pytest
import torch
from rich.console import Console
from rich.text import Text

from tests.helpers.refusals import list_logged
from verl.record.console import (
    STEP_WIDTH,
    StepTable,
    TrainingConsole,
    format_console_metrics,
    list_console_metrics,
)
from verl.record.run_dir import flatten_config
from verl.record.tracking import Tracking, TrackingService, read_metrics
from verl.utils import jsonl
from verl.utils.logging import setup_logging
from verl.utils.progress import Progress


def make_tracking(tmp_path, backends=("file",), **kwargs):
    return Tracking("project", "experiment", list(backends), {"a": {"b": 1}}, tmp_path, **kwargs)


def test_every_step_has_one_line_with_all_metrics(tmp_path):
    with make_tracking(tmp_path) as tracking:
        tracking.log(
            {"actor/pg_loss": torch.tensor(0.5), "val/success_rate": np.float32(0.25)}, step=0
        )
        tracking.log({"actor/pg_loss": float("nan"), "episode/length": np.int64(7)}, step=1)
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines] == [0, 1]
    assert lines[0]["actor/pg_loss"] == 0.5 and lines[0]["val/success_rate"] == 0.25
    assert lines[1]["actor/pg_loss"] is None and lines[1]["episode/length"] == 7


def test_resume_drops_later_steps_and_a_torn_line(tmp_path):
    with make_tracking(tmp_path) as tracking:
        for step in range(5):
            tracking.log({"x": step}, step)
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "x"')
    with make_tracking(tmp_path, resume_step=2) as tracking:
        tracking.log({"x": 30}, 3)
    assert [(m["step"], m["x"]) for m in read_metrics(tmp_path)] == [
        (0, 0),
        (1, 1),
        (2, 2),
        (3, 30),
    ]


def test_fresh_start_sets_the_older_file_aside(tmp_path):
    for value in (1, 2, 3):
        with make_tracking(tmp_path) as tracking:
            tracking.log({"x": value}, 0)
    assert read_metrics(tmp_path)[0]["x"] == 3
    assert next(jsonl.read(tmp_path / "metrics.1.jsonl"))["x"] == 1
    assert next(jsonl.read(tmp_path / "metrics.2.jsonl"))["x"] == 2


def test_metrics_of_one_step_are_merged(tmp_path):
    with make_tracking(tmp_path) as tracking:
        tracking.log({"x": 1, "y": 1}, 1)
        tracking.log({"y": 2}, 1)
    (merged,) = read_metrics(tmp_path)
    assert (merged["x"], merged["y"]) == (1, 2)


def test_lines_that_are_no_objects_are_skipped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 0}\nnot json\n[1]\n\xff\n{"step": 1}\n{"step": 2}')
    assert [record["step"] for record in jsonl.read(path)] == [0, 1]


def test_failing_service_never_stops_training(tmp_path, monkeypatch, caplog):
    class FailingService:
        def __init__(self, **kwargs):
            pass

        def start(self):
            pass

        def store_init_configuration(self, values):
            assert values == {"a.b": 1}

        def log(self, _values, step):
            del step
            raise ConnectionError("the service is away")

    import accelerate.tracking

    monkeypatch.setitem(accelerate.tracking.LOGGER_TYPE_TO_CLASS, "wandb", FailingService)
    with caplog.at_level(logging.WARNING), make_tracking(tmp_path, ["wandb"]) as tracking:
        tracking.log({"x": 1}, 0)
        tracking.log({"x": 2}, 1)
    assert [m["x"] for m in read_metrics(tmp_path)] == [1, 2]
    assert [r.message for r in caplog.records].count(
        caplog.records[0].message
    ) == 1 and "wandb" in caplog.text


def test_tensorboard_receives_the_numbers(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    service = TrackingService("tensorboard", "project", "experiment", tmp_path, {"a": {"b": 1}})
    service.log({"actor/pg_loss": 0.5}, 3)
    service.log_texts("val/trajectories", ["task", "trajectory"], [["t1", "> door\n\nopen"]], 3)
    service.finish()
    events = EventAccumulator(str(tmp_path / "experiment")).Reload()
    assert [(e.step, e.value) for e in events.Scalars("actor/pg_loss")] == [(3, 0.5)]
    (text,) = events.Tensors("val/trajectories/0/text_summary")
    assert text.tensor_proto.string_val[0] == b"t1\n\n> door\n\nopen"


def test_tensorboard_hides_the_steps_that_training_repeats(tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    def run(resume_step, steps, value, **options):
        options |= {"resume_step": resume_step}
        with Tracking("p", "e", ["tensorboard"], {}, tmp_path, **options) as tracking:
            for step in steps:
                tracking.log({"x": value}, step)
        events = EventAccumulator(str(tmp_path / "logs" / "e")).Reload()
        return [(event.step, event.value) for event in events.Scalars("x")]

    assert run(None, (1, 2, 3), 1.0) == [(1, 1.0), (2, 1.0), (3, 1.0)]
    # A measurement of the checkpoint of step 1 keeps the later steps.
    measured = run(1, (), 0.0, keeps_later_steps=True)
    assert measured == [(1, 1.0), (2, 1.0), (3, 1.0)]
    assert run(1, (2,), 2.0) == [(1, 1.0), (2, 2.0)]
    assert [m["step"] for m in read_metrics(tmp_path)] == [1, 2]
    assert run(None, (1,), 3.0) == [(1, 3.0)]


METRICS = {
    "val/success_rate": 0.5,
    "episode/success_rate": 0.251,
    **{f"rlvcr/level_share_{k}": k / 10 for k in (1, 2, 3, 4)},
    "timing_s/step": 2.345,
}


def test_summary_shows_available_figures():
    assert format_console_metrics(METRICS) == {
        "held-out success": "50.0%",
        "train success": "25.1%",
        "levels 1-4": "10% 20% 30% 40%",
        "s/step": "2.3",
    }
    assert format_console_metrics({"rlvcr/level_share_1": 1.0, "val/success_rate": None}) == {}


def test_plain_lines_are_logged_without_a_terminal(caplog):
    with caplog.at_level(logging.INFO):
        TrainingConsole(total_steps=3, console=Console(force_terminal=False)).step(2, METRICS)
    figures = [" ".join(item) for item in format_console_metrics(METRICS).items()]
    assert list_logged(caplog, TrainingConsole.__module__, 2, *figures)


def test_terminal_shows_a_table_and_a_bar(tmp_path):
    with (tmp_path / "screen").open("w+") as file:
        console = TrainingConsole(3, console=Console(file=file, force_terminal=True, width=120))
        console.step(1, METRICS)
        console.step(2, METRICS)
        console.close()
        console.close()
        file.seek(0)
        screen = file.read()
    assert screen.count("held-out") == 1 and screen.count("50.0%") == 2


def make_all_console_metrics(value: float) -> dict[str, float]:
    shares = {f"rlvcr/level_share_{k}": 1.0 for k in (1, 2, 3, 4)}
    return {
        name: value for console_metric in list_console_metrics() for name in console_metric.metrics
    } | shares


@pytest.mark.parametrize("width", [40, 80, 100, 200])
def test_row_of_all_figures_fits_the_terminal(width):
    file = io.StringIO()
    console = TrainingConsole(10**5, console=Console(file=file, force_terminal=True, width=width))
    for step, value in ((1, 0.123456), (99999, -98765.4321), (100000, 1e-9)):
        console.step(step, make_all_console_metrics(value))
    console.close()
    lines = [Text.from_ansi(line).plain for line in file.getvalue().splitlines()]
    rows = [line for line in lines if line.lstrip().startswith(("1 ", "99999 ", "100000 "))]
    assert len(rows) == 3
    assert max(map(len, lines)) <= min(width, STEP_WIDTH)


def test_last_figures_are_dropped_if_they_do_not_fit():
    figures = {"held-out success": "50.0%", "tokens/episode": "210", "s/step": "2.3"}
    header, row = StepTable(100).format_step(3, figures)
    assert header == ["      held-out  tokens/        ", "step   success  episode  s/step"]
    assert row == "   3     50.0%      210     2.3"
    header, row = StepTable(23).format_step(3, figures)
    assert header == ["      held-out  tokens/", "step   success  episode"]
    assert row == "   3     50.0%      210"


def test_header_is_repeated_if_columns_change():
    table = StepTable(100)
    headers = [
        table.format_step(step, figures)[0]
        for step, figures in enumerate(
            [{"return": "1"}, {"return": "0.0123"}, {"return": "0.01234"}, {"loss": "1"}]
        )
    ]
    assert [bool(header) for header in headers] == [True, False, True, True]


@pytest.fixture
def restored_log():
    """Restore the root logger after the test."""
    root = logging.getLogger()
    before = list(root.handlers), root.level
    yield
    for handler in root.handlers[:]:
        if handler not in before[0]:
            root.removeHandler(handler)
            handler.close()
    root.setLevel(before[1])


def test_log_lines_are_printed_above_the_bars(restored_log, monkeypatch):
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=100)
    monkeypatch.setattr("verl.utils.logging.get_console", lambda: console)
    setup_logging()
    with Progress("brewing", 3, "potions", console=console):
        logging.getLogger("verl.test").info("hello")
    above, _, below = file.getvalue().partition("hello")
    assert "INFO" in above and "brewing" in below


def test_log_is_written_to_the_file_once(tmp_path, restored_log):
    for _ in range(2):
        setup_logging(tmp_path / "logs" / "main.log")
    logging.getLogger("verl.test").info("hello")
    assert (tmp_path / "logs" / "main.log").read_text().count("INFO verl.test: hello") == 1


def test_flattened_configuration_holds_plain_values():
    assert flatten_config({"a": {"b": 1, "c": {"d": None}}, "e": [1, 2]}) == {
        "a.b": 1,
        "a.c.d": "None",
        "e": "[1, 2]",
    }


@pytest.mark.parametrize(
    "variables",
    [
        {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1"},
        {"PMI_RANK": "1", "PMI_SIZE": "2"},
        {"OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2"},
    ],
)
def test_variables_of_a_launcher_do_not_stop_the_trackers(monkeypatch, variables):
    """accelerate would wait for rank 0, or log nothing because this is not rank 0."""
    seen = []

    class State:
        def __init__(self, cpu):
            seen.append({name for name in variables if name in os.environ})
            raise RuntimeError("no tracker is needed")

    monkeypatch.setattr("accelerate.PartialState", State)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    TrackingService("tensorboard", "project", "experiment", Path(), {})
    assert seen == [set()] and all(os.environ[name] == variables[name] for name in variables)


def test_services_get_the_names_of_project_and_run(monkeypatch, tmp_path):
    arguments = {}

    def record(name):
        def start(**kwargs):
            arguments[name] = kwargs
            raise RuntimeError("no tracker is needed")

        return start

    names = ("wandb", "trackio", "clearml", "dvclive")
    monkeypatch.setattr(
        "accelerate.tracking.LOGGER_TYPE_TO_CLASS", {name: record(name) for name in names}
    )
    monkeypatch.setenv("CLEARML_TASK", "task of the user")
    for name in names:
        TrackingService(name, "project", "experiment", tmp_path, {})
    assert (arguments["wandb"]["run_name"], arguments["wandb"]["name"]) == ("project", "experiment")
    assert arguments["trackio"] == {"run_name": "project", "name": "experiment"}
    assert arguments["clearml"] == {"project_name": "project", "task_name": "task of the user"}
    assert arguments["dvclive"] == {"dir": str(tmp_path)}
