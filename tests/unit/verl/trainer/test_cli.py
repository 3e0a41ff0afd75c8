"""The shared command line: output, started runs, order of jobs and exit status."""

import os
import subprocess
import sys

import pytest
import yaml

from tests.helpers.refusals import has_problem, mentions, missing_parts, raise_mistakes, suggestion
from verl.algos import algorithm_registry as registry
from verl.config.load import load_config, to_yaml
from verl.config.schema import PPOConfig, SFTConfig
from verl.config.settings import ConfigError
from verl.trainer import cli, main_ppo


@pytest.fixture
def started_configs(monkeypatch):
    """Record the configs that main_ppo would train, instead of training."""
    configs = []
    monkeypatch.setattr(main_ppo, "train", configs.append)
    return configs


def test_cfg_job_prints_the_composed_config_and_starts_nothing(capsys, started_configs):
    assert main_ppo.main(["--cfg", "job", "env.max_steps=9"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["env"]["max_steps"] == 9 and printed["algorithm"]["adv_estimator"] == "rlvcr"
    assert printed["trainer"]["default_local_dir"].startswith("runs/${")
    assert not started_configs


def test_cfg_job_resolved_shows_final_values(capsys):
    assert main_ppo.main(["--cfg", "job", "--resolve"]) == 0
    printed = yaml.safe_load(capsys.readouterr().out)
    assert printed["trainer"]["default_local_dir"] == "runs/quickstart/rlvcr"
    assert printed["actor_rollout_ref"]["rollout"]["max_model_len"] == sum(
        printed["data"][key] for key in ("max_prompt_length", "max_response_length")
    )


def test_help_lists_configs_sections_and_keys(capsys):
    assert main_ppo.main(["--help"]) == 0
    text = capsys.readouterr().out
    assert all(
        entry in text
        for entry in (
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


def test_default_config_depends_on_the_model_path():
    assert main_ppo.choose_config_name(["env.seed=1"]) == "quickstart"
    assert (
        main_ppo.choose_config_name(["env.seed=1", "actor_rollout_ref.model.path=a/b"])
        == "ppo_trainer"
    )


def test_unavailable_tasks_are_a_config_problem_without_traceback(capsys, tmp_path):
    overrides = [
        f"{key}={tmp_path}" for key in ("actor_rollout_ref.model.path", "trainer.default_local_dir")
    ]
    overrides += ["env.textworld.level=31"]
    assert main_ppo.main(["--config-name", "textworld", *overrides]) == 2
    error_text = capsys.readouterr().err
    assert "env.textworld.level=31: " in error_text and "Traceback" not in error_text


def test_run_is_planned_before_it_starts(capsys, started_configs):
    assert main_ppo.main(["trainer.total_training_steps=5"]) == 0
    text = capsys.readouterr().out
    assert not missing_parts(text, "5 training steps", "20 optimizer steps", "quickstart")
    assert [cfg.trainer.total_training_steps for cfg in started_configs] == [5]


def test_config_of_a_user_directory_is_run(tmp_path, started_configs):
    (tmp_path / "mine.yaml").write_text(
        "defaults: [quickstart_grpo, _self_]\ntrainer: {total_training_steps: 7}\n"
    )
    assert (
        main_ppo.main(["--config-path", str(tmp_path), "--config-name", "mine", "env.max_steps=3"])
        == 0
    )
    (cfg,) = started_configs
    assert (cfg.trainer.total_training_steps, cfg.env.max_steps, cfg.algorithm.adv_estimator) == (
        7,
        3,
        "grpo",
    )


@pytest.mark.parametrize(
    "argv",
    [["env.max_stepz=1"], ["env.env_name=alfwrld"], ["-cn", "quickstrat"], ["-cp", "/nowhere"]],
)
def test_refusals_go_to_standard_error_and_start_nothing(argv, capsys, started_configs):
    assert main_ppo.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.err and not captured.out and not started_configs


def test_all_mistakes_are_listed_together(capsys, started_configs):
    overrides = [
        "env.rolout.n=3",
        "algorithm.gamma=abc",
        "algorithm.rlvcr.combine=gate",
        "env.frozen_lake.szie=3",
        "data.train_batch_size=0",
        "env.env_name=alfwrld",
        "trainer.critic_warmup=3",
    ]
    assert main_ppo.main(overrides) == 2
    captured = capsys.readouterr()
    head, *problems = captured.err.strip().splitlines()
    assert head.startswith("7 ") and not captured.out and not started_configs
    for override, hint in zip(
        overrides,
        ["env.rollout.n", "float >= 0", "gated", "env.frozen_lake.size", ">= 1", "alfworld", "0"],
        strict=True,
    ):
        key = override.partition("=")[0]
        (named,) = [problem for problem in problems if problem.startswith(f"  - {key}=")]
        assert hint in named


def test_cross_field_checks_skip_refused_keys(monkeypatch):
    raise_mistakes(monkeypatch)
    with pytest.raises(ConfigError) as refused:
        main_ppo.main(["data.train_batch_size=many", "env.rollout.n=1"])
    assert [(problem.key_path, problem.code) for problem in refused.value.problems] == [
        ("data.train_batch_size", "wrong_type"),
        ("env.rollout.n", "conflicting_keys"),
    ]


def test_environment_section_is_typed_and_has_help(capsys):
    assert main_ppo.main(["--help", "env.frozen_lake"]) == 0
    text = capsys.readouterr().out
    assert "env.frozen_lake.size  (int >= 3 and <= 16; default 4)\n    " in text
    overrides = ["env.env_name=frozen_lake", "env.frozen_lake.frozen=2", "env.kwargs={szie: 3}"]
    expected_range = ("env.frozen_lake.frozen", "float >= 0.6 and <= 0.95")
    with pytest.raises(ConfigError, check=has_problem("out_of_range", *expected_range)) as refused:
        cli.parse(overrides)
    expected_key = has_problem("unknown_key", "env.kwargs.szie", "env.kwargs.size")
    assert expected_key(refused.value)
    assert main_ppo.main(["env.env_name=number_line", "env.number_line.szie=3"]) == 2
    assert suggestion(capsys.readouterr().err) == "env.number_line.size"


def test_external_lib_is_imported_before_names_are_checked(tmp_path, monkeypatch, started_configs):
    (tmp_path / "my_lab_of_this_test.py").write_text(
        "from verl.algos.algorithm_registry import register_adv_est\n"
        "@register_adv_est('my_lab_estimator')\n"
        "def estimator(token_level_rewards, values): ...\n"
    )
    overrides = [
        "algorithm.adv_estimator=my_lab_estimator",
        "actor_rollout_ref.model.external_lib=my_lab_of_this_test",
    ]
    raise_mistakes(monkeypatch)
    lib_key = "actor_rollout_ref.model.external_lib"
    with pytest.raises(ConfigError, check=has_problem("unknown_name", "algorithm.adv_estimator")):
        main_ppo.main(overrides[:1])
    with pytest.raises(ConfigError, check=has_problem("unknown_name", lib_key)):
        main_ppo.main(overrides)
    with pytest.raises(ConfigError, check=has_problem("unknown_name", lib_key, "lab.algorithms")):
        main_ppo.main([f"{lib_key}=./lab/algorithms.py"])
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "leaving_lab_of_this_test.py").write_text("raise SystemExit(0)")
    with pytest.raises(ConfigError, check=has_problem("failed_call", lib_key, "SystemExit(0)")):
        main_ppo.main([f"{lib_key}=leaving_lab_of_this_test"])
    expected = has_problem(
        "conflicting_keys", "algorithm.adv_estimator", "'values'", "critic.enable=true"
    )
    try:
        with pytest.raises(ConfigError, check=expected):
            main_ppo.main(overrides)
        assert main_ppo.main([*overrides, "critic.enable=true"]) == 0 and len(started_configs) == 1
    finally:
        registry.ADV_ESTIMATORS.pop("my_lab_estimator", None)


def test_more_memory_than_the_machine_has_is_refused(capsys, started_configs):
    def run_with_cache(gib: int) -> int:
        return main_ppo.main(["trainer.device=cpu", f"actor_rollout_ref.rollout.kv_cache_gb={gib}"])

    assert run_with_cache(1_000_000) == 2 and not started_configs
    assert "fix:" in capsys.readouterr().err
    assert run_with_cache(1) == 0 and len(started_configs) == 1


def test_multirun_runs_jobs_in_order_with_separate_directories(started_configs):
    assert main_ppo.main(["-m", "trainer.seed=1,2", "algorithm.adv_estimator=grpo,gigpo"]) == 0
    assert [(cfg.trainer.seed, cfg.algorithm.adv_estimator) for cfg in started_configs] == [
        (1, "grpo"),
        (1, "gigpo"),
        (2, "grpo"),
        (2, "gigpo"),
    ]
    assert len({cfg.trainer.default_local_dir for cfg in started_configs}) == 4


def list_job_names(*arguments: str) -> list[str]:
    configs = cli.parse(["-m", *arguments], "quickstart").configs
    assert all(
        cfg.trainer.default_local_dir == f"runs/quickstart/{cfg.trainer.experiment_name}"
        for cfg in configs
    )
    return [cfg.trainer.experiment_name for cfg in configs]


def test_jobs_of_a_multirun_are_named_after_their_swept_values():
    assert list_job_names("trainer.seed=3,4") == ["rlvcr-seed=3", "rlvcr-seed=4"]
    assert list_job_names("trainer.seed=range(4,2,-1)") == ["rlvcr-seed=4", "rlvcr-seed=3"]
    assert list_job_names("+trainer.seed=0,0") == ["rlvcr-seed=0", "rlvcr-seed=0-2"]
    # Equal last names: another section is another name.
    assert list_job_names("actor_rollout_ref.actor.optim.lr=1e-4,1") == [
        "rlvcr-actor.optim.lr=1e-4",
        "rlvcr-actor.optim.lr=1",
    ]
    assert list_job_names("env.alfworld.val_games=4,5", "critic.optim.lr=1,2")[1] == (
        "rlvcr-env.alfworld.val_games=4-critic.optim.lr=2"
    )


def test_names_of_jobs_are_valid_in_paths_and_differ():
    long_path = "x" * 300
    names = list_job_names(f"actor_rollout_ref.model.path=a/b,a_b,a+{long_path},a+{long_path}y")
    assert len(set(names)) == 4 and all("/" not in name and len(name) < 100 for name in names)
    assert names[1] == "rlvcr-actor_rollout_ref.model.path=a_b"


@pytest.mark.parametrize(
    ("schema", "key"),
    [
        (PPOConfig, "trainer.default_local_dir"),
        (PPOConfig, "trainer.rollout_data_dir"),
        (PPOConfig, "trainer.validation_data_dir"),
        (SFTConfig, "model.save_path"),
    ],
)
def test_multirun_refuses_jobs_that_share_a_directory(schema, key):
    config = "quickstart" if schema is PPOConfig else "quickstart_sft"
    with pytest.raises(ConfigError) as error_info:
        cli.parse(["-m", "trainer.seed=1,2", f"{key}=runs/same"], config, schema)
    assert [problem.key_path for problem in error_info.value.problems] == [key]
    distinct = f"{key}=runs/x/${{trainer.experiment_name}}"
    assert len(cli.parse(["-m", "trainer.seed=1,2", distinct], config, schema).configs) == 2
    assert len(cli.parse(["-m", "trainer.seed=1", f"{key}=runs/same"], config, schema).configs) == 1


@pytest.mark.parametrize("option", ["--cfg=job", "--explain=trainer.seed"])
def test_a_multirun_prints_no_config(option):
    with pytest.raises(ConfigError, check=mentions("--multirun")):
        cli.parse(["-m", option, "trainer.seed=1,2"], "quickstart")


def test_a_sweep_over_config_files_is_refused():
    with pytest.raises(ConfigError, check=mentions("trainer.seed=glob(*)")):
        cli.parse(["-m", "trainer.seed=glob(*)"], "quickstart")


def test_masked_values_of_a_stored_config_are_not_used(tmp_path):
    variables = "ray_init.runtime_env.env_vars"
    environment = "{env_vars: {HF_TOKEN: abc, HF_HOME: /shared}}"
    stored = load_config("quickstart", [f"ray_init.runtime_env={environment}"])
    (tmp_path / "config.yaml").write_text(to_yaml(stored))
    arguments = ["-cp", str(tmp_path), "-cn", "config", f"{variables}.HF_TOKEN=abc"]
    with pytest.raises(ConfigError) as error_info:
        cli.parse(arguments)
    (problem,) = error_info.value.problems
    assert (problem.key_path, problem.code) == (f"{variables}.HF_HOME", "missing_key")
    (cfg,) = cli.parse([*arguments, f"{variables}.HF_HOME=/other"]).configs
    assert isinstance(cfg, PPOConfig)
    assert cfg.ray_init.runtime_env["env_vars"] == {"HF_TOKEN": "abc", "HF_HOME": "/other"}


def test_other_entry_points_share_the_command_line():
    command = cli.parse(["trainer.seed=4"], "quickstart_sft", SFTConfig, "verl.trainer.main_sft")
    assert command.configs[0].trainer.seed == 4 and command.config_name == "quickstart_sft"


def test_module_runs_in_any_directory_and_leaves_no_files(tmp_path):
    command = [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job"]
    root = os.path.dirname(os.path.dirname(main_ppo.__file__))
    env = {**os.environ, "PYTHONPATH": os.path.dirname(root)}
    result = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=60
    )
    assert result.returncode == 0, result.stderr
    assert yaml.safe_load(result.stdout)["trainer"]["project_name"] == "quickstart"
    assert list(tmp_path.iterdir()) == []
