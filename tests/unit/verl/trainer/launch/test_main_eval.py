"""``main_eval`` is ``main_ppo`` restricted to validation."""

import json

import pytest

from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import load_config
from verl.trainer import main_eval
from verl.trainer.launch.level_comparison import print_table_by_data_source


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def run_eval(monkeypatch, *arguments: str):
    """Return the exit status of a command line and the configs that it would evaluate."""
    evaluated = []
    monkeypatch.setattr(main_eval, "run_evaluation", evaluated.append)
    return main_eval.main(list(arguments)), evaluated


def test_eval_only_validates_and_uses_a_separate_directory(monkeypatch, policy):
    arguments = ["--config-name", "quickstart", f"actor_rollout_ref.model.path={policy}"]
    status, (cfg,) = run_eval(monkeypatch, *arguments)
    training = load_config("quickstart")
    assert status == 0 and cfg.trainer.val_only and not cfg.cold_start.enable
    assert cfg.trainer.default_local_dir == training.trainer.default_local_dir + "-eval"
    assert (
        cfg.env == training.env
        and cfg.actor_rollout_ref.rollout == training.actor_rollout_ref.rollout
    )


@pytest.mark.parametrize("key", ["data.val_files", "data.train_files"])
def test_user_policy_is_evaluated_on_the_given_files(monkeypatch, policy, tmp_path, key, capsys):
    """The tasks of the quickstart are for its own policy. Training rows are not needed."""
    rows = [
        {"prompt": f"What is {n}+{n}?", "data_source": f"sums{n % 2}", "ground_truth": str(2 * n)}
        for n in range(6)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    arguments = [f"actor_rollout_ref.model.path={policy}", f"data.val_files={file}"]
    arguments += [
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    ]
    arguments += ["actor_rollout_ref.rollout.val_kwargs.do_sample=true"]
    if key == "data.train_files":
        arguments.append(f"{key}={tmp_path}/train.jsonl")
        (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]))
    status, (cfg,) = run_eval(monkeypatch, *arguments)
    out = capsys.readouterr().out
    assert status == 0 and cfg.env.env_name == "dataset" and cfg.trainer.project_name == "rlvcr"
    assert "6 tasks x 2 = 12 trajectories" in out and "per training step" not in out


def test_default_config_is_that_of_training(monkeypatch, policy):
    _, (cfg,) = run_eval(
        monkeypatch, f"actor_rollout_ref.model.path={policy}", "env.env_name=relay"
    )
    assert cfg.trainer.project_name == "rlvcr" and cfg.algorithm.adv_estimator == "grpo"


def test_success_is_shown_for_each_source(capsys):
    metrics = {"val/success_rate": 0.5, "val/pass@1": 0.5, "val/pass@2": 0.75, "val/tasks": 4.0}
    for name, rate in (("a", 0.25), ("openai/gsm8k", 1.0)):
        metrics |= {f"val/{name}/success_rate": rate, f"val/{name}/episode_reward": rate / 2}
        metrics |= {
            f"val/{name}/pass@1": rate,
            f"val/{name}/pass@2": rate,
            f"val/{name}/maj@2": rate,
        }
    print_table_by_data_source(metrics | {"val/levels/free/success_rate": 0.3})
    lines = capsys.readouterr().out.splitlines()
    assert "pass@2" in lines[1] and "reward" in lines[1] and "maj" not in lines[1]
    assert [line.split() for line in lines[2:4]] == [
        ["a", "25.0%", "0.125", "0.25", "0.25"],
        ["openai/gsm8k", "100.0%", "0.5", "1", "1"],
    ]


def test_user_overrides_have_priority(monkeypatch, policy):
    path = f"actor_rollout_ref.model.path={policy}"
    _, (cfg,) = run_eval(
        monkeypatch, "--config-name", "quickstart_grpo", path, "trainer.default_local_dir=elsewhere"
    )
    assert cfg.trainer.default_local_dir == "elsewhere" and cfg.algorithm.adv_estimator == "grpo"


def test_missing_policy_is_refused(monkeypatch, capsys):
    status, evaluated = run_eval(monkeypatch, "actor_rollout_ref.model.path=no/such/dir/here")
    assert status == 2 and not evaluated
    assert "actor_rollout_ref.model.path='no/such/dir/here': " in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["--help", "env"]])
def test_help_is_shown(monkeypatch, capsys, arguments):
    status, evaluated = run_eval(monkeypatch, *arguments)
    assert status == 0 and not evaluated
    assert (
        "verl.trainer.main_eval" if len(arguments) == 1 else "env.max_steps"
    ) in capsys.readouterr().out
