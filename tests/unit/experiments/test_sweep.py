"""Tests of sweeps: which runs are started, which results are stored, and how arms are compared."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from xml.etree import ElementTree

import pytest

from experiments import sweep
from experiments.sweep_report import format_sweep_report, get_value
from tests.helpers.fake_run import fake_run
from tests.helpers.refusals import has_problem, mentions
from verl.config.settings import ConfigError
from verl.trainer.launch.extensions import load_config
from verl.utils.commands import UsageError

ROOT = Path(__file__).resolve().parents[3]
PLAN = """
config: smoke
words: [trainer.total_training_steps=2]
baseline: grpo
arms:
  grpo: {words: [algorithm.adv_estimator=grpo], seeds: [0, 1]}
  rlvcr: {seeds: [0]}
"""


@pytest.fixture
def plan(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep, "ROOT", tmp_path)
    path = tmp_path / "small.yaml"
    path.write_text(PLAN)
    return path


def make_result(arm, seed, success, tokens, length=8.0):
    return {
        "arm": arm,
        "seed": seed,
        "metrics": {
            "val/success_rate": [0.1, success],
            "val/tokens_per_episode": [99.0, tokens],
            "val/episode_length": [9.0, length],
            "episode/success_rate": [0.2, 0.4],
        },
    }


def test_first_seeds_of_all_arms_run_before_second_seeds(plan):
    settings, runs = sweep.read_plan(plan)
    assert [run.name for run in runs] == ["grpo_s0", "rlvcr_s0", "grpo_s1"]
    assert settings.baseline == "grpo"
    assert runs[0].words == ("trainer.total_training_steps=2", "algorithm.adv_estimator=grpo")
    assert runs[2].result_path == plan.parent / "small" / "grpo_s1.json"
    assert "trainer.seed=1" in runs[2].build_command()


def test_unknown_key_of_a_plan_is_named(plan):
    plan.write_text(PLAN.replace("baseline", "basline"))
    with pytest.raises(ConfigError, check=mentions("basline")):
        sweep.read_plan(plan)
    plan.write_text(PLAN.replace("seeds: [0]", "seed: [0]"))
    with pytest.raises(ConfigError, check=mentions("arms.rlvcr.seed")):
        sweep.read_plan(plan)


def use_fake_runs(monkeypatch, code="pass"):
    """Replace runs by short Python programs, and make their run directories."""

    def command(run):
        fake_run(run.run_directory, steps=4, validate_every=4, rollouts=False)
        return [sys.executable, "-c", code]

    monkeypatch.setattr(sweep.Run, "build_command", command)


def read_counts(capsys) -> list[int]:
    """Return the numbers of finished and remaining runs in the first line of the output."""
    return [int(word) for word in capsys.readouterr().out.splitlines()[0].split() if word.isdigit()]


def test_finished_runs_are_not_repeated(plan, monkeypatch, capsys):
    use_fake_runs(monkeypatch)
    assert sweep.main([str(plan), "--arms", "grpo", "--workers", "2"]) == 0
    assert read_counts(capsys) == [0, 2]
    stored = json.loads((plan.parent / "small" / "grpo_s1.json").read_text())
    assert (stored["arm"], stored["seed"]) == ("grpo", 1)
    assert len(stored["metrics"]["val/success_rate"]) == 2
    assert len(stored["metrics"]["episode/success_rate"]) > 2
    assert sweep.main([str(plan)]) == 0
    assert read_counts(capsys) == [2, 1]


def test_failed_run_has_no_result_and_stops_no_other_run(plan, monkeypatch, capsys):
    use_fake_runs(monkeypatch, "raise SystemExit(3)")
    assert sweep.main([str(plan)]) == 1
    output = capsys.readouterr().out
    assert output.count("status 3") == 3
    assert not list((plan.parent / "small").glob("*.json"))


@pytest.mark.parametrize(
    ("changed", "message"), [(("steps=2", "steps=3"), "steps=3"), (("smoke", "relay"), "relay")]
)
def test_result_of_other_settings_is_refused(plan, monkeypatch, changed, message):
    use_fake_runs(monkeypatch)
    sweep.main([str(plan)])
    plan.write_text(PLAN.replace(*changed))
    with pytest.raises(UsageError, check=has_problem("file_exists", "", message)):
        sweep.main([str(plan)])


def test_result_is_committed_on_request(plan, monkeypatch):
    use_fake_runs(monkeypatch)
    committed = []
    monkeypatch.setattr(sweep, "_commit_result", committed.append)
    sweep.main([str(plan), "--arms", "rlvcr"])
    assert committed == []
    sweep.main([str(plan), "--commit"])
    assert sorted(run.name for run in committed) == ["grpo_s0", "grpo_s1"]


def test_retired_arm_is_reported_and_not_trained(plan, capsys):
    plan.write_text(PLAN.replace("{seeds: [0]}", "{seeds: [0, 1], retired: true}"))
    (plan.parent / "small").mkdir()
    stored = make_result("rlvcr", 0, 0.9, 80.0) | {
        "config": "smoke",
        "words": ["trainer.total_training_steps=2"],
    }
    (plan.parent / "small" / "rlvcr_s0.json").write_text(json.dumps(stored))
    assert sweep.main([str(plan), "--arms", "rlvcr"]) == 0
    assert read_counts(capsys) == [1, 0]
    assert sweep.main([str(plan), "--report"]) == 0
    assert "| rlvcr | 1 |" in capsys.readouterr().out
    retired_run = next(run for run in sweep.read_plan(plan)[1] if run.arm == "rlvcr")
    with pytest.raises(sweep.RunFailedError, check=mentions("rlvcr")):
        sweep.train_run(retired_run, core=0)


def test_interrupted_run_continues_only_if_the_plan_says_so(plan, monkeypatch, capsys):
    assert "trainer.resume_mode=disable" in sweep.read_plan(plan)[1][0].build_command()
    plan.write_text(PLAN + "resume: true\n")
    run = sweep.read_plan(plan)[1][0]
    assert "trainer.resume_mode=auto" in run.build_command()
    fake_run(run.run_directory, steps=4, validate_every=4, rollouts=False)
    (run.run_directory / "checkpoints" / "global_step_2").mkdir()
    use_fake_runs(monkeypatch)
    assert sweep.main([str(plan), "--arms", "grpo"]) == 0
    # The duration of a resumed run is not known.
    seconds = [
        json.loads((plan.parent / "small" / f"grpo_s{seed}.json").read_text())["seconds"]
        for seed in (0, 1)
    ]
    assert seconds[0] is None
    assert isinstance(seconds[1], int)


def test_unknown_arm_is_named(plan):
    with pytest.raises(SystemExit, check=mentions("gpro")):
        sweep.main([str(plan), "--arms", "gpro"])
    with pytest.raises(SystemExit, check=mentions("--baseline", "gpro", "grpo", "rlvcr")):
        sweep.main([str(plan), "--report", "--baseline", "gpro"])


def test_tables_compare_with_the_requested_arm(plan, monkeypatch, capsys):
    monkeypatch.setattr(sweep, "format_sweep_report", lambda results, baseline: f"minus {baseline}")
    sweep.main([str(plan), "--report"])
    assert capsys.readouterr().out == "minus grpo"
    sweep.main([str(plan), "--report", "--baseline", "rlvcr"])
    assert capsys.readouterr().out == "minus rlvcr"


def test_training_success_is_drawn_for_every_arm(plan, tmp_path, capsys):
    (plan.parent / "small").mkdir()
    overrides = {"grpo": ["trainer.total_training_steps=2", "algorithm.adv_estimator=grpo"]}
    for arm, seed in (("grpo", 0), ("grpo", 1), ("rlvcr", 0)):
        stored = make_result(arm, seed, 0.9, 80.0) | {
            "config": "smoke",
            "words": overrides.get(arm, ["trainer.total_training_steps=2"]),
        }
        (plan.parent / "small" / f"{arm}_s{seed}.json").write_text(json.dumps(stored))
    assert sweep.main([str(plan), "--svg", str(tmp_path / "small.svg")]) == 0
    assert capsys.readouterr().out == ""
    drawn = ElementTree.parse(tmp_path / "small.svg")
    paths = [element.get("class", "") for element in drawn.iter() if element.tag.endswith("path")]
    # A faint line per seed, and one line per arm.
    assert len([name for name in paths if "faint" in name]) == 3
    assert len([name for name in paths if "line" in name]) == 2
    texts = [element.text for element in drawn.iter() if element.tag.endswith("text")]
    assert {"grpo", "rlvcr"} <= set(texts)


def test_report_tables_by_hand():
    text = format_sweep_report(
        [
            make_result("grpo", 0, 0.90, 80.0),
            make_result("grpo", 1, 0.92, 84.0),
            make_result("short", 0, 0.91, 72.0),
            make_result("short", 1, 0.92, 63.0),
        ],
        "grpo",
    )
    lines = text.splitlines()
    assert lines[2] == "| grpo | 2 | 0.100 | 0.910 ± 0.014 | 10.25 ± 0.35 |  | 0.300 ± 0.000 |"
    assert lines[3].startswith("| short | 2 | 0.100 | 0.915 ± 0.007 | 8.44 ± 0.80 |")
    differences = lines[-1]
    assert differences.startswith(
        "| short | 2 | +0.005 (+0.000 to +0.010) | -1.81 (-2.62 to -1.00)"
    )
    assert differences.endswith("| -17.5 (-25.0 to -10.0) |")


def test_single_measurement_has_no_value_before_training():
    once = make_result("grpo", 0, 0.90, 80.0)
    once["metrics"]["val/success_rate"] = [0.90]
    assert "| grpo | 1 |  | 0.900 |" in format_sweep_report([once], "grpo")


def test_tokens_are_counted_per_turn():
    assert get_value(make_result("a", 0, 1.0, 40.0, length=4.0), "tokens per turn") == 10.0


def test_report_without_results_says_so():
    assert format_sweep_report([], "grpo") == "no results yet\n"


@pytest.mark.parametrize("path", sorted(ROOT.glob("experiments/*.yaml")), ids=lambda p: p.stem)
def test_plans_of_the_project_have_valid_configs(path):
    plan, runs = sweep.read_plan(path)
    assert plan.baseline in {run.arm for run in runs if not run.is_retired}
    for overrides in {run.words for run in runs if not run.is_retired}:
        load_config(plan.config, list(overrides))
    for retired_run in (run for run in runs if run.is_retired):
        assert sweep.is_finished(retired_run)
        with pytest.raises(ConfigError):
            load_config(plan.config, list(retired_run.words))


@pytest.mark.parametrize(
    "plan",
    [
        "config: relay\n",
        "arms: {}\n",
        "arms: [grpo]\n",
        "arms: {grpo: 3}\n",
        "arms: {grpo: {seeds: [x]}}\n",
        "arms: {grpo: {sedes: [1]}}\n",
        "arms: {../grpo: {}}\n",
        "arms: {grpo: {}}\nthreads: 0\n",
        "arms: {grpo: {}}\nunknown: 1\n",
        "arms: {grpo: {seeds: [0, 0]}}\n",
        "arms: {grpo: {seeds: [-1]}}\n",
        "arms: {grpo: {seeds: [99999999999]}}\n",
        f"arms: {{{'x' * 200}: {{}}}}\n",
        "arms: {grpo: {}}\nbaseline: gpro\n",
    ],
)
def test_plan_with_a_mistake_is_refused(tmp_path, plan):
    path = tmp_path / "plan.yaml"
    path.write_text(plan)
    with pytest.raises((UsageError, ConfigError)):
        sweep.main([str(path)])


@pytest.mark.parametrize("option", ["--workers=0", "--workers=-1", "--workers=x", "--seeds=0"])
def test_counts_below_one_are_refused(tmp_path, option):
    with pytest.raises(SystemExit) as ended:
        sweep.main([str(tmp_path / "plan.yaml"), option])
    assert ended.value.code == 2


def test_override_with_a_mistake_is_refused_before_the_first_run(plan, monkeypatch):
    monkeypatch.setattr(sweep, "run_on_core", lambda *_: pytest.fail("a run was started"))
    plan.write_text(PLAN.replace("rlvcr: {", "rlvcr: {words: [trainer.sede=1], "))
    with pytest.raises(ConfigError, check=mentions("trainer.seed")):
        sweep.main([str(plan)])


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_run_gets_one_sigterm_when_the_sweep_ends(tmp_path, number):
    """It can then save its state. Without the signal it would continue without a sweep."""
    run = (
        "import signal, time\n"
        "signals = []\n"
        "for number in (signal.SIGTERM, signal.SIGINT):\n"
        "    signal.signal(number, lambda number, _: signals.append(number))\n"
        "print('started', flush=True)\n"
        "while not signals: time.sleep(0.01)\n"
        "time.sleep(0.5)\n"
        "print(*map(int, signals), flush=True)\n"
    )
    code = (
        "import sys, types; from pathlib import Path; from experiments import sweep\n"
        "def run(_, core):\n"
        "    sweep.run_on_core([sys.executable, '-c', sys.argv[1]], Path(sys.argv[2]), core)\n"
        "def main():\n"
        "    next(sweep.run_in_parallel([types.SimpleNamespace(name='a')], 1, run))\n"
        "sys.exit(sweep.run_and_report_mistakes(main))\n"
    )
    log = tmp_path / "log.txt"
    command = [sys.executable, "-c", code, run, str(log)]
    with subprocess.Popen(command, cwd=ROOT, start_new_session=True) as process:
        wait_for_text(log, "started\n")
        os.killpg(process.pid, number)
    wait_for_text(log, f"started\n{int(signal.SIGTERM)}\n")


def wait_for_text(file: Path, text: str) -> None:
    deadline = time.monotonic() + 60
    while not file.exists() or file.read_text() != text:
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_runs_without_validation_have_empty_cells(plan, capsys):
    sweep.read_plan(plan)[1][0].result_path.parent.mkdir()
    for run in sweep.read_plan(plan)[1]:
        result = {"arm": run.arm, "seed": run.seed, "config": run.config, "words": run.words}
        run.result_path.write_text(json.dumps(result | {"metrics": {}}))
    assert sweep.main([str(plan), "--report"]) == 0
    assert "| grpo | 2 |  |" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "{}",
        '{"config": "relay"}',
        '{"config": "relay", "words": 5, "metrics": {}}',
        '{"arm": "grpo", "seed": 0, "config": "relay", "words": [], "metrics": []}',
        '{"arm": "grpo", "seed": 0, "config": "relay", "words": [], "metrics": {"a": "x"}}',
    ],
)
def test_torn_result_is_named(tmp_path, text):
    path = tmp_path / "plan.yaml"
    path.write_text("config: relay\narms: {grpo: {seeds: [0]}}\n")
    (tmp_path / "plan").mkdir()
    (tmp_path / "plan" / "grpo_s0.json").write_text(text)
    with pytest.raises(UsageError, check=has_problem("unreadable_file", "", "grpo_s0.json")):
        sweep.main([str(path), "--report"])
