"""The shared command line: what it shows, what it runs, in which order, with which exit status."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.helpers.refusals import mentions, suggestion
from verl.algos import algorithm_registry as registry
from verl.config.schema import SFTConfig
from verl.config.settings import ConfigError
from verl.trainer import cli, main_ppo


@pytest.fixture
def ran(monkeypatch):
    """Configs that main_ppo would have trained."""
    configs = []
    monkeypatch.setattr(main_ppo, "train", configs.append)
    return configs


def test_cfg_job_prints_the_composed_config_and_runs_nothing(capsys, ran):
    assert main_ppo.main(["--cfg", "job", "env.max_steps=9"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["env"]["max_steps"] == 9 and shown["algorithm"]["adv_estimator"] == "rlvcr"
    assert shown["trainer"]["default_local_dir"].startswith("runs/${")
    assert not ran


def test_cfg_job_resolved_shows_final_values(capsys):
    assert main_ppo.main(["--cfg", "job", "--resolve"]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["trainer"]["default_local_dir"] == "runs/quickstart/rlvcr"
    assert shown["actor_rollout_ref"]["rollout"]["max_model_len"] == sum(
        shown["data"][key] for key in ("max_prompt_length", "max_response_length")
    )


def test_help_lists_configs_sections_and_keys(capsys):
    assert main_ppo.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        word in text
        for word in (
            "--config-name",
            "--multirun",
            "quickstart_grpo",
            "actor_rollout_ref",
            "cold_start",
        )
    )
    assert main_ppo.main(["--help", "algorithm.rlvcr"]) == 0
    text = capsys.readouterr().out
    assert (
        "algorithm.rlvcr.step_advantage_w  (float >= 0; default 1.0)" in text
        and "algorithm.gamma" not in text
    )
    assert main_ppo.main(["--help", "algoritm"]) == 2
    assert suggestion(capsys.readouterr().err) == "algorithm"


def test_default_config_depends_on_whether_a_policy_is_named():
    assert main_ppo.choose_config_name(["env.seed=1"]) == "quickstart"
    assert (
        main_ppo.choose_config_name(["env.seed=1", "actor_rollout_ref.model.path=a/b"])
        == "ppo_trainer"
    )


def test_tasks_that_cannot_be_had_are_a_problem_of_the_config_and_no_traceback(capsys, tmp_path):
    words = [
        f"{key}={tmp_path}" for key in ("actor_rollout_ref.model.path", "trainer.default_local_dir")
    ]
    words += ["env.textworld.level=31"]
    assert main_ppo.main(["--config-name", "textworld", *words]) == 2
    said = capsys.readouterr().err
    assert "env.textworld.level=31: " in said and "Traceback" not in said


def test_a_run_is_planned_before_it_starts(capsys, ran):
    assert main_ppo.main(["trainer.total_training_steps=5"]) == 0
    text = capsys.readouterr().out
    assert "5 training steps, 20 optimizer steps" in text and "(config quickstart)" in text
    assert [cfg.trainer.total_training_steps for cfg in ran] == [5]


def test_a_named_config_of_ones_own_directory(tmp_path, ran):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart_grpo, _self_]\ntrainer: {total_training_steps: 7}\n"
    )
    assert (
        main_ppo.main(["--config-path", str(tmp_path), "--config-name", "mine", "env.max_steps=3"])
        == 0
    )
    (cfg,) = ran
    assert (cfg.trainer.total_training_steps, cfg.env.max_steps, cfg.algorithm.adv_estimator) == (
        7,
        3,
        "grpo",
    )


@pytest.mark.parametrize(
    "argv",
    [["env.max_stepz=1"], ["env.env_name=alfwrld"], ["-cn", "quickstrat"], ["-cp", "/nowhere"]],
)
def test_refusals_go_to_standard_error_and_start_nothing(argv, capsys, ran):
    assert main_ppo.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err and not captured.out and not ran


def test_one_list_names_every_mistake(capsys, ran):
    words = [
        "env.rolout.n=3",
        "algorithm.gamma=abc",
        "algorithm.rlvcr.combine=gate",
        "env.frozen_lake.szie=3",
        "data.train_batch_size=0",
        "env.env_name=alfwrld",
        "trainer.critic_warmup=3",
    ]
    assert main_ppo.main(words) == 2
    captured = capsys.readouterr()
    head, *problems = captured.err.strip().splitlines()
    assert head == "7 problems in the configuration:" and not captured.out and not ran
    for word, hint in zip(
        words,
        ["env.rollout.n", "float >= 0", "gated", "env.frozen_lake.size", ">= 1", "alfworld", "0"],
        strict=True,
    ):
        key = word.partition("=")[0]
        (found,) = [problem for problem in problems if problem.startswith(f"  - {key}=")]
        assert hint in found


def test_checks_across_keys_pass_over_what_was_refused(capsys):
    assert main_ppo.main(["data.train_batch_size=many", "env.rollout.n=1"]) == 2
    said = capsys.readouterr().err
    assert said.count("  - ") == 2 and "compares the trajectories of one task" in said


def test_the_section_of_an_environment_is_typed_and_has_help(capsys):
    assert main_ppo.main(["--help", "env.frozen_lake"]) == 0
    text = capsys.readouterr().out
    assert "env.frozen_lake.size  (int >= 3 and <= 16; default 4)\n    cells per side" in text
    words = ["env.env_name=frozen_lake", "env.frozen_lake.frozen=2", "env.kwargs={szie: 3}"]
    assert main_ppo.main(words) == 2
    said = capsys.readouterr().err
    assert "env.frozen_lake.frozen=2: not allowed; allowed: float >= 0.6 and <= 0.95" in said
    assert "env.kwargs.szie=3: unknown key; did you mean env.kwargs.size?" in said
    assert main_ppo.main(["env.env_name=number_line", "env.number_line.szie=3"]) == 2
    assert suggestion(capsys.readouterr().err) == "env.number_line.size"


def test_external_lib_is_imported_before_names_are_checked(tmp_path, monkeypatch, capsys, ran):
    (tmp_path / "my_lab_of_this_test.py").write_text(
        "from verl.algos.algorithm_registry import register_adv_est\n"
        "@register_adv_est('my_lab_estimator')\n"
        "def estimator(token_level_rewards, values): ...\n"
    )
    words = [
        "algorithm.adv_estimator=my_lab_estimator",
        "actor_rollout_ref.model.external_lib=my_lab_of_this_test",
    ]
    assert main_ppo.main(words[:1]) == 2
    assert "unknown name" in capsys.readouterr().err
    assert main_ppo.main(words) == 2
    assert "external_lib='my_lab_of_this_test': No module named" in capsys.readouterr().err
    monkeypatch.syspath_prepend(tmp_path)
    try:
        assert main_ppo.main(words) == 2
        refusal = capsys.readouterr().err
        assert (
            "needs 'values', which the batch will lack" in refusal
            and "fix: critic.enable=true" in refusal
        )
        assert main_ppo.main([*words, "critic.enable=true"]) == 0 and len(ran) == 1
    finally:
        registry.ADV_ESTIMATORS.pop("my_lab_estimator", None)


def test_what_the_machine_cannot_hold_is_refused(capsys, ran):
    def engines_with(gib: int) -> int:
        return main_ppo.main(["trainer.device=cpu", f"actor_rollout_ref.rollout.kv_cache_gb={gib}"])

    assert engines_with(1_000_000) == 2 and not ran
    assert "fix:" in capsys.readouterr().err
    assert engines_with(1) == 0 and len(ran) == 1


def test_multirun_runs_one_job_after_the_other_under_names_of_their_own(ran):
    assert main_ppo.main(["-m", "trainer.seed=1,2", "algorithm.adv_estimator=grpo,gigpo"]) == 0
    assert [(cfg.trainer.seed, cfg.algorithm.adv_estimator) for cfg in ran] == [
        (1, "grpo"),
        (1, "gigpo"),
        (2, "grpo"),
        (2, "gigpo"),
    ]
    assert len({cfg.trainer.default_local_dir for cfg in ran}) == 4


def test_multirun_refuses_jobs_that_share_a_run_directory():
    with pytest.raises(ConfigError, check=mentions("default_local_dir")):
        cli.parse(["-m", "trainer.seed=1,2", "trainer.default_local_dir=runs/same"])


def test_other_entry_points_share_it():
    command = cli.parse(["trainer.seed=4"], "quickstart_sft", SFTConfig, "verl.trainer.main_sft")
    assert command.configs[0].trainer.seed == 4 and command.config_name == "quickstart_sft"


def test_as_a_module_from_any_directory_it_leaves_nothing_behind(tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job"]
    root = os.path.dirname(os.path.dirname(main_ppo.__file__))
    env = {**os.environ, "PYTHONPATH": os.path.dirname(root)}
    done = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 0, done.stderr
    assert yaml.safe_load(done.stdout)["trainer"]["project_name"] == "quickstart"
    assert list(tmp_path.iterdir()) == []
