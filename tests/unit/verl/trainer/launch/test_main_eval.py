"""``main_eval`` is ``main_ppo`` with nothing but the validation left."""

import json

import pytest

from tests.helpers.tiny_model import make_tiny_policy
from verl.config.load import load_config
from verl.trainer import main_eval
from verl.trainer.launch.level_comparison import print_source_table


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def run(monkeypatch, *words: str):
    """The configs that a command line would evaluate, and its exit status."""
    seen = []
    monkeypatch.setattr(main_eval, "run_evaluation", seen.append)
    return main_eval.main(list(words)), seen


def test_it_validates_only_in_a_directory_of_its_own(monkeypatch, policy):
    words = ["--config-name", "quickstart", f"actor_rollout_ref.model.path={policy}"]
    status, (cfg,) = run(monkeypatch, *words)
    training = load_config("quickstart")
    assert status == 0 and cfg.trainer.val_only and not cfg.cold_start.enable
    assert cfg.trainer.default_local_dir == training.trainer.default_local_dir + "-eval"
    assert (
        cfg.env == training.env
        and cfg.actor_rollout_ref.rollout == training.actor_rollout_ref.rollout
    )


@pytest.mark.parametrize("key", ["data.val_files", "data.train_files"])
def test_a_policy_of_ones_own_is_judged_on_what_the_words_name(
    monkeypatch, policy, tmp_path, key, capsys
):
    """The quickstart's tasks are for its own policy; rows to train on are not needed."""
    rows = [
        {"prompt": f"What is {n}+{n}?", "data_source": f"sums{n % 2}", "ground_truth": str(2 * n)}
        for n in range(6)
    ]
    file = tmp_path / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    words = [f"actor_rollout_ref.model.path={policy}", f"data.val_files={file}"]
    words += [
        "actor_rollout_ref.rollout.val_kwargs.n=2",
        "actor_rollout_ref.rollout.val_kwargs.temperature=1.0",
    ]
    words += ["actor_rollout_ref.rollout.val_kwargs.do_sample=true"]
    if key == "data.train_files":
        words.append(f"{key}={tmp_path}/train.jsonl")
        (tmp_path / "train.jsonl").write_text(json.dumps(rows[0]))
    status, (cfg,) = run(monkeypatch, *words)
    out = capsys.readouterr().out
    assert status == 0 and cfg.env.env_name == "dataset" and cfg.trainer.project_name == "rlvcr"
    assert "6 tasks x 2 = 12 trajectories" in out and "per training step" not in out


def test_the_default_config_is_that_of_training(monkeypatch, policy):
    _, (cfg,) = run(monkeypatch, f"actor_rollout_ref.model.path={policy}", "env.env_name=relay")
    assert cfg.trainer.project_name == "rlvcr" and cfg.algorithm.adv_estimator == "grpo"


def test_what_is_earned_is_shown_for_each_source(capsys):
    metrics = {"val/success_rate": 0.5, "val/pass@1": 0.5, "val/pass@2": 0.75, "val/tasks": 4.0}
    for name, rate in (("a", 0.25), ("b", 1.0)):
        metrics |= {f"val/{name}/success_rate": rate, f"val/{name}/episode_reward": rate / 2}
        metrics |= {
            f"val/{name}/pass@1": rate,
            f"val/{name}/pass@2": rate,
            f"val/{name}/maj@2": rate,
        }
    print_source_table(metrics | {"val/levels/free/success_rate": 0.3})
    lines = capsys.readouterr().out.splitlines()
    assert "pass@2" in lines[1] and "reward" in lines[1] and "maj" not in lines[1]
    assert [line.split() for line in lines[2:4]] == [
        ["a", "25.0%", "0.125", "0.25", "0.25"],
        ["b", "100.0%", "0.5", "1", "1"],
    ]


def test_the_users_words_win(monkeypatch, policy):
    path = f"actor_rollout_ref.model.path={policy}"
    _, (cfg,) = run(
        monkeypatch, "--config-name", "quickstart_grpo", path, "trainer.default_local_dir=elsewhere"
    )
    assert cfg.trainer.default_local_dir == "elsewhere" and cfg.algorithm.adv_estimator == "grpo"


def test_a_missing_policy_is_refused_rather_than_trained(monkeypatch, capsys):
    status, seen = run(monkeypatch, "actor_rollout_ref.model.path=no/such/dir/here")
    assert status == 2 and not seen
    assert "no such directory" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--help"], ["--help", "env"]])
def test_help_is_not_swallowed(monkeypatch, capsys, words):
    status, seen = run(monkeypatch, *words)
    assert status == 0 and not seen
    assert (
        "verl.trainer.main_eval" if len(words) == 1 else "env.max_steps"
    ) in capsys.readouterr().out
