"""``--check``: all steps before the start, with one trial call of reward, estimator and loss."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.tiny_model import make_tiny_policy
from verl.algos import algorithm_registry as registry
from verl.config.load import load_config
from verl.config.schema import PPOConfig
from verl.config.settings import Problem
from verl.names import AdvantageEstimator
from verl.trainer import main_ppo
from verl.trainer.cli import CHECKED_NOTE, COMPOSED_NOTE
from verl.trainer.launch.dry_run import perform_dry_run


def find_dry_run_problems(cfg: PPOConfig) -> list[Problem]:
    """Return the problems that ``perform_dry_run`` finds."""
    return list(perform_dry_run(cfg).problems)


@pytest.fixture(scope="module")
def overrides(tmp_path_factory):
    directory = tmp_path_factory.mktemp("check")
    policy = make_tiny_policy(directory / "policy")
    return [
        f"actor_rollout_ref.model.path={policy}",
        "env.env_name=number_line",
        f"trainer.default_local_dir={directory}/run",
    ]


@pytest.fixture
def check(overrides, monkeypatch, capsys):
    """Return a function that runs ``--check`` and returns exit status and both outputs."""
    monkeypatch.setattr(main_ppo, "train", lambda cfg: pytest.fail("the run was started"))

    def run(*extra: str) -> tuple[int, str, str]:
        status = main_ppo.main(["--check", *overrides, *extra])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_valid_run_is_planned_and_not_started(check, overrides):
    status, out, err = check()
    assert status == 0 and not err
    assert "trajectories" in out and CHECKED_NOTE in out
    assert load_config("ppo_trainer", overrides).trainer.default_local_dir.endswith("/run")


def test_all_mistakes_are_reported_together(check):
    status, out, err = check("data.max_prompt_length=9", "trainer.seed=one", "env.rollout.n=1")
    assert status == 2 and not out and err.count("  - ") == 2
    status, _, err = check("data.max_prompt_length=9")
    assert status == 2 and err.count("  - ") == 1 and "data.max_prompt_length=" in err


@pytest.mark.parametrize("name", AdvantageEstimator)
def test_every_shipped_estimator_accepts_the_trial_rows(overrides, name):
    cfg = load_config("ppo_trainer", [*overrides, f"algorithm.adv_estimator={name}"])
    assert find_dry_run_problems(cfg) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return extra_info['answer']", "KeyError('answer')"),
        ("return 'good'", "str"),
        ("return float('nan')", "nan"),
        ("raise SystemExit(0)", "SystemExit(0)"),
    ],
)
def test_reward_function_is_called_once(check, tmp_path, body, why):
    (tmp_path / "mine.py").write_text(f"def compute_score(data_source, steps, extra_info): {body}")
    key = f"custom_reward_function.path={tmp_path}/mine.py"
    status, _, err = check(key)
    assert status == 2 and f"custom_reward_function.path='{tmp_path}/mine.py': " in err
    assert why in err and "fix: " in err


@pytest.mark.parametrize(
    ("body", "why"),
    [
        (
            "raise RuntimeError('not this way')",
            "RuntimeError: not this way in /lab/mine.py, line 1",
        ),
        ("raise SystemExit(0)", "SystemExit: 0"),
        ("return token_level_rewards / 0, token_level_rewards", "advantages"),
    ],
)
def test_estimator_is_called_once(overrides, monkeypatch, body, why):
    namespace: dict = {}
    code = compile(f"def estimator(token_level_rewards): {body}", "/lab/mine.py", "exec")
    exec(code, namespace)
    monkeypatch.setattr(registry, "ADV_ESTIMATORS", dict(registry.ADV_ESTIMATORS))
    registry.register_adv_est("of_this_test")(namespace["estimator"])
    cfg = load_config("ppo_trainer", [*overrides, "algorithm.adv_estimator=of_this_test"])
    (problem,) = find_dry_run_problems(cfg)
    assert (problem.key_path, problem.code) == ("algorithm.adv_estimator", "failed_call")
    assert why in problem


def test_policy_loss_is_called_once(overrides, monkeypatch):
    monkeypatch.setattr(registry, "POLICY_LOSSES", dict(registry.POLICY_LOSSES))

    def loss(old_log_prob, log_prob, **_):
        zero = torch.zeros(())
        return (log_prob - old_log_prob).sum() * float("inf"), zero, zero, zero

    registry.register_policy_loss("of_this_test")(loss)
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    (problem,) = find_dry_run_problems(
        load_config("ppo_trainer", [*overrides, f"{key}=of_this_test"])
    )
    assert (problem.key_path, problem.code) == (key, "failed_call") and "-inf" in problem


def test_check_starts_no_ray(overrides):
    code = (
        "import sys\n"
        "from verl.trainer.main_ppo import main\n"
        "status = main(sys.argv[1:])\n"
        "ray = sys.modules.get('ray')\n"
        "sys.exit(status or bool(ray and ray.is_initialized()))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, "--check", *overrides],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert result.returncode == 0, result.stderr


def test_shown_config_states_that_it_was_not_checked(capsys):
    assert main_ppo.main(["--cfg", "job", "env.rollout.n=1"]) == 0
    assert capsys.readouterr().out.startswith(COMPOSED_NOTE)


@pytest.mark.parametrize("other", [["--cfg", "job"], ["--explain", "env.rollout.n"]])
def test_check_is_refused_together_with_options_that_show(check, other):
    status, out, err = check(*other)
    assert status == 2 and not out and "- --check: " in err
