"""Tests of the chaos harness: its cells, verdicts, records and pages."""

import importlib
import json
import random
import re

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.dev.chaos import kills, outcomes
from scripts.dev.chaos.cells import (
    COLLECTOR,
    DRIVER,
    ENGINE,
    KILLED,
    NODE,
    OUT_OF_MEMORY,
    RANK,
    ROLLOUT,
    SAVE,
    START,
    Cell,
    iter_cells,
    parse_cell,
)
from scripts.dev.chaos.job import NUM_STEPS, TRAJECTORIES_PER_STEP
from scripts.dev.chaos.matrix import (
    EXIT_TIMEOUT_S,
    CellResult,
    JobAfterFault,
    compute_verdict,
    find_error_line,
)
from tests.helpers.refusals import mentions, missing_parts
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager

OUTPUT = """ready after 3.1 s
Traceback (most recent call last):
verl.single_controller.base.errors.WorkerDiedError: the process is gone: actor[rank 0].save: killed
"""


def make_run(directory, steps, checkpoints, num_completed=TRAJECTORIES_PER_STEP):
    for step in steps:
        lines = [
            {"traj_uid": f"{step}/{n}", "aborted": n >= num_completed, "steps": [{}]}
            for n in range(TRAJECTORIES_PER_STEP)
        ]
        jsonl.write(directory / "rollouts" / f"{step}.jsonl", lines)
    jsonl.write(directory / "metrics.jsonl", [{"step": step, "time": 1.5 * step} for step in steps])
    manager = CheckpointManager(directory / "checkpoints")
    for step in checkpoints:
        manager.save(step, lambda d: (d / "weights").write_bytes(b"abc"), {"n": step})
    return directory


def make_ended_job(cell, run, status=1, output=OUTPUT, left_processes=()):
    return JobAfterFault(cell, run, output, status, list(left_processes))


IN_SAVE = Cell(RANK, SAVE, KILLED)
IN_ROLLOUT = Cell(RANK, ROLLOUT, KILLED)


def test_every_cell_exists_once_and_is_parsed_from_its_key():
    cells = list(iter_cells())
    assert len({cell.cell_key for cell in cells}) == 6 * 5 * 3
    assert all(parse_cell(cell.cell_key) == cell for cell in cells)
    assert {cell.fault for cell in cells if cell.skip_reason} == {OUT_OF_MEMORY}
    with pytest.raises(ValueError, check=mentions("'engine/never'")):
        parse_cell("engine/never")


@pytest.mark.parametrize("method", sorted({cell.get_injection_point() for cell in iter_cells()}))
def test_method_where_a_fault_is_injected_exists(method):
    _, import_path, name = method
    module, _, owner = import_path.partition(":")
    assert callable(getattr(getattr(importlib.import_module(module), owner), name))


def test_run_that_names_the_failed_part_ends_correctly(tmp_path):
    run = make_run(tmp_path, [], [])
    assert compute_verdict(make_ended_job(IN_SAVE, run)) == "ends"
    assert find_error_line(make_ended_job(IN_SAVE, run)).startswith(
        "verl.single_controller.base.errors.WorkerDied"
    )


@pytest.mark.parametrize(
    ("changed", "expected"),
    [
        ({"output": "Traceback\nValueError: oh"}, ""),
        ({"left_processes": ["ray::IDLE"]}, "ray::IDLE"),
        ({"status": None}, f"{EXIT_TIMEOUT_S:g} s"),
        ({"status": 0}, "[]"),
    ],
)
def test_other_ends_are_wrong(tmp_path, changed, expected):
    verdict = compute_verdict(make_ended_job(IN_SAVE, make_run(tmp_path, [], []), **changed))
    assert verdict.startswith("WRONG: ") and expected in verdict


def test_save_with_a_fault_must_leave_no_checkpoint(tmp_path):
    run = make_run(tmp_path, [1], [1])
    verdict = compute_verdict(make_ended_job(IN_SAVE, run))
    assert verdict.startswith("WRONG: ") and "[1]" in verdict
    assert compute_verdict(make_ended_job(IN_ROLLOUT, run)) == "ends"


def test_torn_checkpoint_is_wrong(tmp_path):
    run = make_run(tmp_path, [1], [1])
    (run / "checkpoints" / "global_step_1" / "weights").write_bytes(b"abd")
    verdict = compute_verdict(make_ended_job(IN_ROLLOUT, run))
    assert verdict.startswith("WRONG: ") and "[1]" in verdict


def test_run_that_continues_must_reach_its_end(tmp_path):
    whole = make_run(tmp_path / "a", range(1, NUM_STEPS + 1), range(1, NUM_STEPS + 1))
    assert compute_verdict(make_ended_job(IN_ROLLOUT, whole, status=0, output="")) == "continues"
    repeated_step = make_run(
        tmp_path / "b", [1, 1, *range(2, NUM_STEPS + 1)], range(1, NUM_STEPS + 1)
    )
    verdict = compute_verdict(make_ended_job(IN_ROLLOUT, repeated_step, status=0))
    assert verdict.startswith("WRONG: ") and "[1, 1, 2" in verdict
    short_step = make_run(
        tmp_path / "c",
        range(1, NUM_STEPS + 1),
        range(1, NUM_STEPS + 1),
        num_completed=TRAJECTORIES_PER_STEP - 1,
    )
    verdict = compute_verdict(make_ended_job(IN_ROLLOUT, short_step, status=0, output=""))
    numbers = (TRAJECTORIES_PER_STEP - 1, TRAJECTORIES_PER_STEP)
    assert not missing_parts(verdict, f"step {NUM_STEPS}", *numbers)


def test_killed_driver_needs_no_error_line(tmp_path):
    run = make_run(tmp_path, [], [])
    assert (
        compute_verdict(make_ended_job(Cell(DRIVER, START, KILLED), run, status=-9, output=""))
        == "ends"
    )
    assert (
        compute_verdict(
            make_ended_job(Cell(DRIVER, START, OUT_OF_MEMORY), run, status=1, output="")
        )
        != "ends"
    )


def test_table_shows_all_known_results(tmp_path):
    results = {
        "engine/start/killed": CellResult("engine/start/killed", "ends", 4.4, 1, "gone"),
        "collector/save/hung": CellResult("collector/save/hung", "continues"),
    }
    outcomes.write_results(results, tmp_path / "matrix.json")
    assert outcomes.read_results(tmp_path / "matrix.json") == results
    assert outcomes.read_results(tmp_path / "nothing.json") == {}
    rows = outcomes.format_table(results).splitlines()
    assert len(rows) == 2 + 6 * 5
    assert rows[2] == f"| {ENGINE} | start | ends after 4 s, status 1 | not run | not run |"
    (row,) = [row for row in rows if row.startswith(f"| {COLLECTOR} | {SAVE}")]
    assert row.endswith("| not run | continues | (asks for no memory then) |")
    assert f"| {NODE} | {START} | not run | not run | (" in "\n".join(rows)


def test_table_replaces_the_marked_part_of_the_page(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{outcomes.TABLE_BEGIN}old\n{outcomes.TABLE_END}after\n")
    for _ in range(2):
        outcomes.write_page({}, page)
        assert page.read_text() == (
            f"before\n{outcomes.TABLE_BEGIN}{outcomes.format_table({})}{outcomes.TABLE_END}after\n"
        )
    page.write_text("no marks")
    with pytest.raises(ValueError):
        outcomes.write_page({}, page)


def write_finished_run(directory, loss=1.0, weights=b"abc", steps=kills.NUM_STEPS):
    records = [{"step": n, "time": float(n), "timing_s/gen": n * loss} for n in range(1, steps + 1)]
    records[-1]["loss"] = loss
    jsonl.write(directory / "metrics.jsonl", records)
    manager = CheckpointManager(directory / "checkpoints")

    def write(directory):
        save_file({"lm": np.frombuffer(weights, dtype=np.uint8)}, directory / "a.safetensors")

    manager.save(kills.NUM_STEPS, write, {})
    return directory


def test_runs_that_differ_only_in_times_are_equal(tmp_path):
    one = write_finished_run(tmp_path / "one")
    later = write_finished_run(tmp_path / "later")
    text = (later / "metrics.jsonl").read_text().replace('"timing_s/gen":3.0', '"timing_s/gen":9')
    (later / "metrics.jsonl").write_text(text)
    assert list(kills.find_differences(one, later)) == []


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({"loss": 1.0000001}, [f"step {kills.NUM_STEPS}", "loss"]),
        ({"weights": b"abd"}, ["a.safetensors: lm"]),
        ({"steps": 3}, ["[1, 2, 3]"]),
    ],
)
def test_differences_are_named(tmp_path, other, expected):
    one = write_finished_run(tmp_path / "one")
    (difference,) = kills.find_differences(one, write_finished_run(tmp_path / "other", **other))
    assert not missing_parts(difference, *expected)


def test_kill_times_follow_the_pace_of_the_reference(tmp_path):
    reference = write_finished_run(tmp_path / "reference", loss=0.5)
    text = (reference / "metrics.jsonl").read_text().replace("timing_s/gen", "timing_s/step")
    (reference / "metrics.jsonl").write_text(text)
    (tmp_path / "reference.txt").write_text("INFO: ready after 30.0 s; run directory")
    verdict = [kills.draw_kill(number, reference, random.Random(number)) for number in range(200)]
    assert verdict == [kills.draw_kill(n, reference, random.Random(n)) for n in range(200)]
    early = [kill for kill in verdict if kill.early]
    late = [kill for kill in verdict if not kill.early]
    assert 20 <= len(early) <= 60 and 15 < max(kill.after_s for kill in early) <= 30
    assert {kill.num_new_steps for kill in late} == {0, 1, 2}
    assert 1.0 < max(kill.after_s for kill in late) <= 1.75, "the median step took 1.75 s"
    assert sum(kill.kills_all_processes for kill in verdict) == 100


def test_kills_are_recorded_and_summarised(tmp_path):
    one = kills.Kill(
        0, kills_all_processes=True, early=False, num_new_steps=1, after_s=2.0, step=3, next_s=1.5
    )
    late = kills.Kill(
        1, False, early=True, num_new_steps=0, after_s=2.0, problems=["left: ray::IDLE"]
    )
    record = kills.KillRecord([one, late], [[], ["step 2 differs in loss"]])
    record.write(tmp_path / "kills.json")
    assert kills.KillRecord.read(tmp_path / "kills.json") == record
    assert (
        json.loads((tmp_path / "kills.json").read_text())["kills"][0]["kills_all_processes"] is True
    )
    summary = kills.format_summary(record)
    first, *_, last = summary.splitlines()
    assert re.findall(r"\d+", first)[:4] == ["2", "1", "1", "1"]
    assert re.findall(r"\d+", last) == ["2"]
    assert "kill 1: left: ray::IDLE" in summary and "round 1: step 2 differs in loss" in summary
    assert summary.count("1.5 s") == 2
