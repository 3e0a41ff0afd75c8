"""``main_eval`` is ``main_ppo`` with nothing but the validation left."""

import pytest

from tests.helpers.tiny_model import make_tiny_policy
from verl.trainer import main_eval
from verl.trainer.config.load import load_config


@pytest.fixture(scope="module")
def policy(tmp_path_factory):
    return make_tiny_policy(tmp_path_factory.mktemp("policy"))


def run(monkeypatch, *words: str):
    """The configs that a command line would evaluate, and its exit status."""
    seen = []
    monkeypatch.setattr(main_eval, "run_evaluation", seen.append)
    return main_eval.main(list(words)), seen


def test_it_validates_only_in_a_directory_of_its_own(monkeypatch, policy):
    status, (cfg,) = run(monkeypatch, f"actor_rollout_ref.model.path={policy}")
    training = load_config("quickstart")
    assert status == 0 and cfg.trainer.val_only and not cfg.cold_start.enable
    assert cfg.trainer.default_local_dir == training.trainer.default_local_dir + "-eval"
    assert (
        cfg.env == training.env
        and cfg.actor_rollout_ref.rollout == training.actor_rollout_ref.rollout
    )


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
