"""Tests that a run directory describes its run and belongs to one run at a time."""

import json
import logging
import os
import signal
import subprocess
import sys
from dataclasses import dataclass, field

import pytest
import yaml

from tests.helpers.refusals import has_problem
from verl.config.settings import ConfigError
from verl.record.run_dir import RunDirectory, RunDirectoryInUseError


@dataclass
class Inner:
    lr: float = 1e-3
    names: list = field(default_factory=lambda: ["a"])


@dataclass
class Config:
    actor: Inner = field(default_factory=Inner)
    seed: int = 1


def test_open_writes_configuration_and_facts(tmp_path):
    with RunDirectory(tmp_path / "runs" / "p" / "e").open(Config(), seeds={"trainer": 1}) as run:
        assert yaml.safe_load(run.config_path.read_text()) == {
            "actor": {"lr": 1e-3, "names": ["a"]},
            "seed": 1,
        }
        facts = json.loads(run.env_path.read_text())
        assert (
            facts["seeds"] == {"trainer": 1}
            and facts["devices"]["cores"] >= 1
            and "numpy" in facts["packages"]
        )
        assert all(folder.is_dir() for folder in (run.rollouts, run.logs, run.checkpoints))


def test_second_start_logs_changed_keys(tmp_path, caplog):
    RunDirectory(tmp_path).open(Config()).close()
    with caplog.at_level(logging.WARNING), RunDirectory(tmp_path).open(Config(seed=2)) as run:
        assert len(json.loads(run.env_path.read_text())["starts"]) == 2
    assert "seed: 1 -> 2" in caplog.text and "in 1 keys" in caplog.text


def test_plan_file_has_the_changed_keys_without_secrets(tmp_path):
    written = {"trainer": {"device": "auto", "seed": 1}, "llm": {"api_key": None, "url": "a"}}
    config = {"trainer": {"device": "cpu", "seed": 1}, "llm": {"api_key": "sk-1", "url": "b"}}
    with RunDirectory(tmp_path).open(written) as run:
        run.write_plan(written, config)
        plan = yaml.safe_load(run.plan_path.read_text())
    assert plan == {"trainer.device": "cpu", "llm.api_key": "***", "llm.url": "b"}


def test_changed_revision_of_a_model_is_logged(tmp_path, caplog):
    def config(path, device="cpu"):
        return {"trainer": {"device": device}, "critic": {"model": {"path": path}}}

    with caplog.at_level(logging.WARNING), RunDirectory(tmp_path).open(config("a/b")) as run:
        run.write_plan(config("a/b", "auto"), config("a/b@123"))
        run.write_plan(config("a/b"), config("a/b@123", "cuda"))
        run.write_plan(config("a/b@123"), config("a/b@123"))
        assert not caplog.text
        run.write_plan(config("a/b"), config("a/b@123"))
        run.write_plan(config("a/b@456"), config("a/b@456"))
    assert "critic.model.path: a/b@123 -> a/b@456" in caplog.text and "in 1 keys" in caplog.text


def test_omegaconf_nodes_are_resolved(tmp_path):
    from omegaconf import OmegaConf

    with RunDirectory(tmp_path).open(OmegaConf.create({"a": 1, "b": "${a}"})) as run:
        assert yaml.safe_load(run.config_path.read_text()) == {"a": 1, "b": 1}


HOLD = (
    "import sys, time; from verl.record.run_dir import RunDirectory; "
    "r = RunDirectory(sys.argv[1]).open({}); print('held', flush=True); time.sleep(600)"
)


def test_directory_is_locked_until_its_process_ends(tmp_path):
    other = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path)], stdout=subprocess.PIPE, text=True
    )
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "held\n"
        expected = has_problem("file_exists", "trainer.default_local_dir", other.pid)
        with pytest.raises(RunDirectoryInUseError, check=expected):
            RunDirectory(tmp_path).open({})
    finally:
        os.kill(other.pid, signal.SIGKILL)
        other.wait(timeout=10)
    RunDirectory(tmp_path).open({}).close()


def test_rollouts_are_written_completely_or_not_at_all(tmp_path):
    run = RunDirectory(tmp_path)
    assert run.write_rollouts(3, [{"won": True}]).name == "3.jsonl"
    assert run.write_rollouts(3, [{"won": True}] * 2, validation=True).name == "val_3.jsonl"

    def raise_after_one():
        yield {"won": False}
        raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError):
        run.write_rollouts(3, raise_after_one())
    assert run.rollout_path(3).read_text() == '{"won":true}\n'


def test_trajectories_of_repeated_steps_are_removed(tmp_path):
    with RunDirectory(tmp_path).open(Config()) as run:
        for step in (1, 2, 3, 10):
            run.write_rollouts(step, [{"n": step}])
            run.write_tokens(step, [{"n": step}])
        for step in (0, 2, 10):
            run.write_rollouts(step, [{"n": step}], validation=True)
        run.remove_rollouts_after(2)
        assert run.rollout_steps() == [1, 2] and run.rollout_steps(validation=True) == [0, 2]
        assert sorted(path.name for path in run.tokens.iterdir()) == ["1.jsonl", "2.jsonl"]


def test_trajectories_of_an_earlier_run_are_set_aside(tmp_path):
    with RunDirectory(tmp_path).open(Config()) as run:
        for first in (1, 2):
            run.remove_rollouts_after(None)
            run.write_rollouts(first, [{"n": first}])
        assert run.rollout_steps() == [2]
    assert (tmp_path / "rollouts.1" / "1.jsonl").exists()
    assert not (tmp_path / "rollouts.2").exists()


@pytest.mark.parametrize(
    "name",
    ["config.yaml", "run_plan.yaml", "metrics.jsonl", "report.html", "rollouts/1.jsonl"],
)
def test_files_of_other_origin_are_not_replaced(tmp_path, name):
    foreign = tmp_path / "mine" / name
    foreign.parent.mkdir(parents=True)
    foreign.write_text("mine\n")
    with pytest.raises(ConfigError):
        RunDirectory(tmp_path / "mine").open({})
    assert foreign.read_text() == "mine\n" and not (tmp_path / "mine" / ".lock").exists()


def test_directory_with_other_files_can_hold_a_run(tmp_path):
    (tmp_path / "thesis.txt").write_text("mine\n")
    with RunDirectory(tmp_path).open({}):
        pass
    with RunDirectory(tmp_path).open({}):  # the same run again
        pass
    assert (tmp_path / "thesis.txt").read_text() == "mine\n"
