"""``--check``: everything up to starting, with reward, estimator and loss called once."""

import subprocess
import sys

import pytest
import torch

from tests.helpers.tiny_model import make_tiny_policy
from verl.algos import algorithm_registry as registry
from verl.config.load import load_config
from verl.config.schema import PPOConfig
from verl.names import AdvantageEstimator
from verl.trainer import main_ppo
from verl.trainer.launch.dry_run import inspect_calls


def find_dry_run_problems(cfg: PPOConfig) -> list[str]:
    """The problems that ``inspect_calls`` finds."""
    return list(inspect_calls(cfg).problems)


@pytest.fixture(scope="module")
def words(tmp_path_factory):
    place = tmp_path_factory.mktemp("check")
    policy = make_tiny_policy(place / "policy")
    return [
        f"actor_rollout_ref.model.path={policy}",
        "env.env_name=number_line",
        f"trainer.default_local_dir={place}/run",
    ]


@pytest.fixture
def check(words, monkeypatch, capsys):
    """Exit status and both outputs of ``--check``."""
    monkeypatch.setattr(main_ppo, "train", lambda cfg: pytest.fail("the run was started"))

    def run(*more: str) -> tuple[int, str, str]:
        status = main_ppo.main(["--check", *words, *more])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def test_a_run_that_could_start_is_planned_and_not_started(check, words):
    status, out, err = check()
    assert status == 0 and not err
    assert "trajectories" in out and "checked, nothing was started" in out
    assert load_config("ppo_trainer", words).trainer.default_local_dir.endswith("/run")


def test_every_other_mistake_is_found_as_well(check):
    status, out, err = check("data.max_prompt_length=9", "trainer.seed=one", "env.rollout.n=1")
    assert status == 2 and not out and err.count("  - ") == 2
    status, _, err = check("data.max_prompt_length=9")
    assert status == 2 and err.count("  - ") == 1 and "data.max_prompt_length=" in err


@pytest.mark.parametrize("name", AdvantageEstimator)
def test_every_estimator_that_ships_takes_the_made_up_rows(words, name):
    cfg = load_config("ppo_trainer", [*words, f"algorithm.adv_estimator={name}"])
    assert find_dry_run_problems(cfg) == []


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("return extra_info['answer']", "KeyError: 'answer'"),
        ("return 'good'", "str"),
        ("return float('nan')", "nan"),
    ],
)
def test_a_reward_function_is_called_once(check, tmp_path, body, why):
    (tmp_path / "mine.py").write_text(f"def compute_score(data_source, steps, extra_info): {body}")
    key = f"custom_reward_function.path={tmp_path}/mine.py"
    status, _, err = check(key)
    assert status == 2 and f"custom_reward_function.path='{tmp_path}/mine.py': " in err
    assert why in err and "fix: " in err


@pytest.mark.parametrize(
    ("body", "why"),
    [
        ("raise RuntimeError('not this way')", "RuntimeError: not this way"),
        ("return token_level_rewards / 0, token_level_rewards", "advantages"),
    ],
)
def test_an_estimator_is_called_once(words, monkeypatch, body, why):
    space: dict = {}
    exec(f"def estimator(token_level_rewards): {body}", space)
    monkeypatch.setattr(registry, "ADV_ESTIMATORS", dict(registry.ADV_ESTIMATORS))
    registry.register_adv_est("of_this_test")(space["estimator"])
    cfg = load_config("ppo_trainer", [*words, "algorithm.adv_estimator=of_this_test"])
    (found,) = find_dry_run_problems(cfg)
    assert found.startswith("algorithm.adv_estimator='of_this_test': ") and why in found


def test_a_policy_loss_is_called_once(words, monkeypatch):
    monkeypatch.setattr(registry, "POLICY_LOSSES", dict(registry.POLICY_LOSSES))

    def loss(old_log_prob, log_prob, **_):
        zero = torch.zeros(())
        return (log_prob - old_log_prob).sum() * float("inf"), zero, zero, zero

    registry.register_policy_loss("of_this_test")(loss)
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    (found,) = find_dry_run_problems(load_config("ppo_trainer", [*words, f"{key}=of_this_test"]))
    assert found.startswith(f"{key}='of_this_test': on made-up rows it is -inf")


def test_a_check_starts_no_ray(words):
    code = (
        "import sys\n"
        "from verl.trainer.main_ppo import main\n"
        "status = main(sys.argv[1:])\n"
        "ray = sys.modules.get('ray')\n"
        "sys.exit(status or bool(ray and ray.is_initialized()))\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "--check", *words], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


def test_what_is_shown_does_not_look_like_approval(capsys):
    assert main_ppo.main(["--cfg", "job", "env.rollout.n=1"]) == 0
    assert capsys.readouterr().out.startswith("# composed, not checked: use --check")


@pytest.mark.parametrize("other", [["--cfg", "job"], ["--explain", "env.rollout.n"]])
def test_check_is_not_passed_over_for_something_shown(check, other):
    status, out, err = check(*other)
    assert status == 2 and not out and "--cfg and --explain check nothing" in err
