"""Tests of the level measurement of sweep runs: which runs are measured or repeated, and the
table.
"""

import json

import pytest

from experiments import sweep, sweep_levels
from experiments.sweep import RunFailedError
from experiments.sweep_levels import SUCCESS, format_levels_table, get_levels_path, main
from tests.helpers.refusals import mentions
from verl.utils.checkpoint import CheckpointManager

PLAN = """
config: smoke
arms:
  grpo: {seeds: [0, 1]}
  copo: {seeds: [0, 1]}
"""
LEVELS = {
    "situations": [
        {"needed": 1, "accuracy": [1.0, 1.0, 1.0, 1.0]},
        {"needed": 1, "accuracy": [0.5, 1.0, 0.9, 1.0]},
        {"needed": 2, "accuracy": [0.0, 1.0, 1.0, 1.0]},
        {"needed": 3, "accuracy": [0.1, 0.1, 1.0, 1.0]},
        {"needed": 4, "accuracy": [0.1, 0.1, 0.1, 0.994]},
    ],
    "tokens_by_level": [8.0, 10.04, 12.0, 15.0],
    "episodes": {"free": {"success": 0.5}, "needed": {"success": 0.904}},
    "level_information": 1.304,
}


@pytest.fixture
def plan(tmp_path, monkeypatch):
    """Return a plan whose runs of seed 1 are finished; no run is really started."""
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(PLAN)
    (tmp_path / "small").mkdir()
    for run in sweep.read_plan(path)[1]:
        if run.seed == 1:
            run.result_path.write_text(json.dumps(make_result(run, 0.75)))
    return path


def make_result(run, success):
    metrics = {SUCCESS: [0.1, success]}
    names = {"arm": run.arm, "seed": run.seed, "config": "smoke"}
    return {**names, "words": [], "cpu": "a CPU", "metrics": metrics}


@pytest.fixture
def commands(monkeypatch):
    """Record commands instead of running them. A command with ``--out`` writes its file."""
    commands = []

    def record_command(command, log, core, threads=1):
        commands.append(" ".join(command[1:]))
        if "--out" in command:
            with open(command[-1], "w") as file:
                json.dump(LEVELS, file)

    monkeypatch.setattr(sweep, "run_on_core", record_command)
    return commands


def use_fake_training(monkeypatch, success):
    """Let training end at ``success`` with a checkpoint; return the list of trained runs."""
    runs = []

    def train(run, core):
        runs.append(run.name)
        CheckpointManager(run.run_directory / "checkpoints").save(4, lambda directory: None, {})
        return make_result(run, success)

    monkeypatch.setattr(sweep, "train_run", train)
    return runs


def test_last_policy_is_measured_once(plan, commands, monkeypatch, capsys):
    runs = use_fake_training(monkeypatch, 0.75)
    assert main([str(plan), "--arms", "grpo", "--seed", "1"]) == 0
    assert runs == ["grpo_s1"]
    assert "1 of 1 " in capsys.readouterr().out
    policy = plan.parent / "runs/sweeps/small/grpo_s1/policy"
    checkpoint = policy.parent / "checkpoints/global_step_4"
    assert commands[0].endswith(f"main_export checkpoint={checkpoint} target={policy}")
    assert f"level_matrix.py {policy} --config-name relay --out" in commands[1]
    assert json.loads((plan.parent / "small/levels/grpo_s1.json").read_text()) == LEVELS
    assert main([str(plan), "--arms", "grpo", "--seed", "1"]) == 0
    assert len(commands) == 2


def test_existing_policy_is_not_trained_again(plan, commands, monkeypatch):
    runs = use_fake_training(monkeypatch, 0.75)
    run = next(run for run in sweep.read_plan(plan)[1] if run.name == "copo_s1")
    CheckpointManager(run.run_directory / "checkpoints").save(4, lambda directory: None, {})
    assert main([str(plan), "--arms", "copo", "--seed", "1"]) == 0
    assert runs == [] and get_levels_path(run).exists()


def test_policy_that_differs_from_the_result_is_not_measured(plan, commands, monkeypatch):
    use_fake_training(monkeypatch, 0.5)
    run = next(run for run in sweep.read_plan(plan)[1] if run.name == "grpo_s1")
    with pytest.raises(RunFailedError, check=mentions("0.5", "0.75")):
        sweep_levels.measure_run(run, 0, "relay")
    assert commands == [] and not get_levels_path(run).exists()


def test_runs_without_a_result_are_named(plan):
    with pytest.raises(SystemExit, check=mentions("grpo_s0", "experiments/sweep.py")):
        main([str(plan), "--arms", "grpo", "--seed", "0"])


def test_levels_table_by_hand(plan, capsys):
    lines = format_levels_table({"grpo_s7": LEVELS}).splitlines()
    assert lines[0].startswith("| run | right, required 1 | right, required 2 |")
    assert lines[2] == (
        "| grpo_s7 | 75 100 95 100 | 0 100 100 100 | 10 10 100 100 | 10 10 10 99 "
        "| 8.0 10.0 12.0 15.0 | 50% | 90% | 1.30 |"
    )
    assert main([str(plan), "--report"]) == 0
    assert capsys.readouterr().out.count("\n") == 2, "no run is measured yet"
