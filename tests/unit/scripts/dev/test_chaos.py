"""The harness of faults: its cells, what it calls right and wrong, what it keeps and writes."""

import importlib
import json
import random

import numpy as np
import pytest
from safetensors.numpy import save_file

from scripts.dev.chaos import kills, outcomes
from scripts.dev.chaos.cells import (
    COLLECTOR,
    DRIVER,
    ENGINE,
    KILLED,
    MEMORY,
    NODE,
    RANK,
    ROLLOUT,
    SAVE,
    START,
    Cell,
    iter_cells,
    parse_cell,
)
from scripts.dev.chaos.job import NUM_STEPS, TRAJECTORIES_PER_STEP
from scripts.dev.chaos.matrix import CellResult, EndedJob, compute_verdict, find_error_line
from tests.helpers.refusals import mentions
from verl.utils import jsonl
from verl.utils.checkpoint import CheckpointManager

SAID = """ready after 3.1 s
Traceback (most recent call last):
verl.single_controller.base.errors.WorkerDiedError: the process is gone: actor[rank 0].save: killed
"""


def run_of(place, steps, checkpoints, plays=TRAJECTORIES_PER_STEP):
    for step in steps:
        lines = [
            {"traj_uid": f"{step}/{n}", "aborted": n >= plays, "steps": [{}]}
            for n in range(TRAJECTORIES_PER_STEP)
        ]
        jsonl.write(place / "rollouts" / f"{step}.jsonl", lines)
    jsonl.write(place / "metrics.jsonl", [{"step": step, "time": 1.5 * step} for step in steps])
    manager = CheckpointManager(place / "checkpoints")
    for step in checkpoints:
        manager.save(step, lambda d: (d / "weights").write_bytes(b"abc"), {"n": step})
    return place


def ended(cell, run, status=1, said=SAID, left=()):
    return EndedJob(cell, run, said, status, list(left))


SAVING = Cell(RANK, SAVE, KILLED)
PLAYING = Cell(RANK, ROLLOUT, KILLED)


def test_every_cell_is_there_once_and_found_by_its_key():
    cells = list(iter_cells())
    assert len({cell.cell_key for cell in cells}) == 6 * 5 * 3
    assert all(parse_cell(cell.cell_key) == cell for cell in cells)
    assert {cell.fault for cell in cells if cell.skip_reason} == {MEMORY}
    with pytest.raises(ValueError, check=mentions("'engine/never'")):
        parse_cell("engine/never")


@pytest.mark.parametrize("method", sorted({cell.find_method() for cell in iter_cells()}))
def test_the_method_where_a_fault_happens_exists(method):
    _, import_path, name = method
    module, _, owner = import_path.partition(":")
    assert callable(getattr(getattr(importlib.import_module(module), owner), name))


def test_a_run_that_says_who_failed_ends_as_it_should(tmp_path):
    run = run_of(tmp_path, [], [])
    assert compute_verdict(ended(SAVING, run)) == "ends"
    assert find_error_line(ended(SAVING, run)).startswith(
        "verl.single_controller.base.errors.WorkerDied"
    )


@pytest.mark.parametrize(
    ("changed", "wrong"),
    [
        ({"said": "Traceback\nValueError: oh"}, "no error line names the part"),
        ({"left": ["ray::IDLE"]}, "left: ray::IDLE"),
        ({"status": None}, "it did not end within"),
        ({"status": 0}, r"exit status 0 after steps \[\]"),
    ],
)
def test_anything_else_is_wrong(tmp_path, changed, wrong):
    found = compute_verdict(ended(SAVING, run_of(tmp_path, [], []), **changed))
    assert found.startswith("WRONG: ") and wrong.replace("\\", "") in found


def test_a_struck_save_counts_for_nothing(tmp_path):
    run = run_of(tmp_path, [1], [1])
    assert "the save with the fault left complete checkpoints: [1]" in compute_verdict(
        ended(SAVING, run)
    )
    assert compute_verdict(ended(PLAYING, run)) == "ends"


def test_a_torn_checkpoint_is_wrong(tmp_path):
    run = run_of(tmp_path, [1], [1])
    (run / "checkpoints" / "global_step_1" / "weights").write_bytes(b"abd")
    assert "invalid checkpoints have a final name: [1]" in compute_verdict(ended(PLAYING, run))


def test_a_run_that_goes_on_reaches_its_end(tmp_path):
    whole = run_of(tmp_path / "a", range(1, NUM_STEPS + 1), range(1, NUM_STEPS + 1))
    assert compute_verdict(ended(PLAYING, whole, status=0, said="")) == "continues"
    twice = run_of(tmp_path / "b", [1, 1, *range(2, NUM_STEPS + 1)], range(1, NUM_STEPS + 1))
    assert "exit status 0 after" in compute_verdict(ended(PLAYING, twice, status=0))
    broken = run_of(
        tmp_path / "c",
        range(1, NUM_STEPS + 1),
        range(1, NUM_STEPS + 1),
        plays=TRAJECTORIES_PER_STEP - 1,
    )
    found = compute_verdict(ended(PLAYING, broken, status=0, said=""))
    missing = f"{TRAJECTORIES_PER_STEP - 1} trajectories, not {TRAJECTORIES_PER_STEP}"
    assert f"step {NUM_STEPS} was trained on {missing}" in found


def test_who_is_killed_says_nothing(tmp_path):
    run = run_of(tmp_path, [], [])
    assert compute_verdict(ended(Cell(DRIVER, START, KILLED), run, status=-9, said="")) == "ends"
    assert compute_verdict(ended(Cell(DRIVER, START, MEMORY), run, status=1, said="")) != "ends"


def test_the_table_has_what_is_known(tmp_path):
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


def test_the_table_is_put_into_its_place(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(f"before\n{outcomes.BEGIN}old\n{outcomes.END}after\n")
    for _ in range(2):
        outcomes.write_page({}, page)
        assert page.read_text() == (
            f"before\n{outcomes.BEGIN}{outcomes.format_table({})}{outcomes.END}after\n"
        )
    page.write_text("no place")
    with pytest.raises(ValueError, match="has no lines"):
        outcomes.write_page({}, page)


def finished(place, loss=1.0, weights=b"abc", steps=kills.STEPS):
    records = [{"step": n, "time": float(n), "timing_s/gen": n * loss} for n in range(1, steps + 1)]
    records[-1]["loss"] = loss
    jsonl.write(place / "metrics.jsonl", records)
    manager = CheckpointManager(place / "checkpoints")

    def write(directory):
        save_file({"lm": np.frombuffer(weights, dtype=np.uint8)}, directory / "a.safetensors")

    manager.save(kills.STEPS, write, {})
    return place


def test_runs_that_differ_in_their_times_alone_are_equal(tmp_path):
    one = finished(tmp_path / "one")
    later = finished(tmp_path / "later")
    text = (later / "metrics.jsonl").read_text().replace('"timing_s/gen":3.0', '"timing_s/gen":9')
    (later / "metrics.jsonl").write_text(text)
    assert list(kills.find_differences(one, later)) == []


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"loss": 1.0000001}, [f"step {kills.STEPS} differs in loss"]),
        ({"weights": b"abd"}, ["the last checkpoint differs in a.safetensors: lm"]),
        ({"steps": 3}, ["steps [1, 2, 3]"]),
    ],
)
def test_what_differs_is_named(tmp_path, other, said):
    one = finished(tmp_path / "one")
    assert list(kills.find_differences(one, finished(tmp_path / "other", **other))) == said


def test_moments_follow_the_pace_of_the_reference(tmp_path):
    reference = finished(tmp_path / "reference", loss=0.5)
    text = (reference / "metrics.jsonl").read_text().replace("timing_s/gen", "timing_s/step")
    (reference / "metrics.jsonl").write_text(text)
    (tmp_path / "reference.txt").write_text("INFO: ready after 30.0 s; run directory")
    found = [kills.draw_kill(number, reference, random.Random(number)) for number in range(200)]
    assert found == [kills.draw_kill(n, reference, random.Random(n)) for n in range(200)]
    early = [kill for kill in found if kill.early]
    late = [kill for kill in found if not kill.early]
    assert 20 <= len(early) <= 60 and 15 < max(kill.after_s for kill in early) <= 30
    assert {kill.further for kill in late} == {0, 1, 2}
    assert 1.0 < max(kill.after_s for kill in late) <= 1.75, "the median step took 1.75 s"
    assert sum(kill.whole for kill in found) == 100


def test_kills_are_kept_and_told(tmp_path):
    one = kills.Kill(0, whole=True, early=False, further=1, after_s=2.0, step=3, next_s=1.5)
    late = kills.Kill(1, False, early=True, further=0, after_s=2.0, wrong=["left: ray::IDLE"])
    record = kills.KillRecord([one, late], [[], ["step 2 differs in loss"]])
    record.write(tmp_path / "kills.json")
    assert kills.KillRecord.read(tmp_path / "kills.json") == record
    assert json.loads((tmp_path / "kills.json").read_text())["kills"][0]["whole"] is True
    told = kills.format_summary(record)
    begins = "2 kills (1 of the whole tree, 1 of the driver; 1 before the run was ready)"
    assert told.startswith(begins)
    assert "kill 1: left: ray::IDLE" in told and "round 1: step 2 differs in loss" in told
    assert "median 1.5 s, longest 1.5 s" in told and told.endswith("2 problems\n")
