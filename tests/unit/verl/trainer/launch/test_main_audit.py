"""Command line of a credit audit, and the files and metrics it writes."""

import json
import math
from contextlib import nullcontext
from types import SimpleNamespace

import pytest

from rlvcr.report_sections import load_audit_returns
from rlvcr.research.audit import AuditedTurn, AuditResult, ScoreCorrelations
from tests.helpers.jobs import ROOT
from tests.helpers.refusals import fix, has_problem, missing_parts
from tests.helpers.tiny_model import make_tiny_policy
from verl.algos.controllers import PriceController
from verl.config.compose import parse_overrides
from verl.config.load import load_config, to_yaml
from verl.config.settings import ConfigError
from verl.config.validate import find_problems
from verl.records import PRICE_MULTIPLIER
from verl.trainer import main_audit
from verl.trainer.launch.audit import (
    build_audit_args,
    find_audited_reward_problems,
    run_audit,
)
from verl.trainer.launch.audit_record import (
    compute_audit_metrics,
    print_audit_tables,
    write_audit_file,
)
from verl.utils.checkpoint import CheckpointManager

POINT = AuditedTurn(
    "a", 2, 3, True, ((0.0,), (1.0,), (1.0,), (0.0,)), {"logprob": (0.0, 1.0, 2.0, 3.0)}
)
UNKNOWN = (math.nan, math.nan, math.nan)
RESULT = AuditResult(
    points=7,
    rollouts_per_option=3,
    level_effects=((-0.5, -0.6, -0.4), (0.0, -0.1, 0.1), (0.5, 0.4, 0.6), (0.0, -0.1, 0.1)),
    reliability=0.75,
    second_audit=ScoreCorrelations("second_audit", None, None, None, (0.8, 0.7, 0.9)),
    scores=(
        ScoreCorrelations("logprob", (0.4, 0.3, 0.5), (0.6, 0.5, 0.7), UNKNOWN, (0.2, -0.1, 0.5)),
        ScoreCorrelations("gigpo", None, None, None, UNKNOWN),
    ),
)


def test_run_directory_gives_the_config_and_the_newest_policy(tmp_path):
    (tmp_path / "config.yaml").write_text("env: {levels: true}\n")
    arguments = build_audit_args([str(tmp_path), "trainer.seed=3"])
    assert arguments[:4] == ["--config-path", str(tmp_path), "--config-name", "config"]
    assert arguments[-2:] == ["trainer.resume_mode=disable", "trainer.seed=3"]
    assert f"trainer.default_local_dir='{tmp_path / 'audit'}'" in arguments
    assert "trainer.rollout_data_dir=null" in arguments, "the folder of training stays as it is"
    manager = CheckpointManager(tmp_path / "checkpoints")
    for step in (3, 12):
        manager.save(step, lambda path: (path / "weights").write_text("w"), {"global_step": step})
    arguments = build_audit_args([str(tmp_path)])
    assert arguments[-2] == "trainer.resume_mode=resume_path"
    assert arguments[-1].startswith("trainer.resume_from_path=")
    assert arguments[-1].endswith("global_step_12'")


@pytest.mark.parametrize("name", ["lr=1e-4", "a,b", "lr(1)", "x'y", "a b"])
def test_run_directory_may_have_special_characters(tmp_path, name):
    directory = tmp_path / name
    directory.mkdir()
    (directory / "config.yaml").write_text("env: {levels: true}\n")
    override = next(word for word in build_audit_args([str(directory)]) if "default_local" in word)
    (parsed,) = parse_overrides([override])
    assert parsed.value() == str(directory / "audit") and not parsed.is_sweep_override()


def test_every_level_of_every_turn_is_scored(tmp_path):
    (tmp_path / "config.yaml").write_text("env: {levels: true}\n")
    arguments = build_audit_args([str(tmp_path)])
    keys = dict(
        argument.removeprefix("algorithm.rlvcr.").split("=")
        for argument in arguments
        if "=" in argument
    )
    assert (keys["credit"], keys["alternatives"], keys["expand"]) == ("scored", "all", "all")
    assert (keys["step_fraction"], keys["permute"], keys["epsilon_levels"]) == (
        "1.0",
        "false",
        "0.0",
    )


def test_plan_states_what_the_audit_generates(tmp_path, capsys):
    policy = make_tiny_policy(tmp_path / "policy")
    arguments = [f"actor_rollout_ref.model.path={policy}", "env.env_name=number_line"]
    arguments += ["algorithm.adv_estimator=rlvcr", "env.val_tasks=5", "env.rollout.n=3"]
    arguments += ["actor_rollout_ref.rollout.name=hf"]
    cfg = load_config("ppo_trainer", arguments)
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    arguments = ["algorithm.rlvcr.audit_points=7", "algorithm.rlvcr.audit_plays=2", "--check"]
    assert main_audit.main([str(tmp_path), *arguments]) == 0
    plan = capsys.readouterr().out
    assert not missing_parts(
        plan, "number_line", "none: ", "5 validation", "3 trajectories", "= 56"
    )
    assert "in all" not in plan and "checkpoints every" not in plan


@pytest.mark.parametrize("arguments", [[], ["--help"]])
def test_without_a_run_directory_help_is_shown(arguments, capsys):
    assert main_audit.main(arguments) == 0
    assert "verl.trainer.main_audit" in capsys.readouterr().out


def test_directory_without_config_is_refused(tmp_path, capsys):
    assert main_audit.main([str(tmp_path)]) == 2
    error_text = capsys.readouterr().err
    assert (
        f"RUN_DIR='{tmp_path}'" in error_text
        and "config.yaml" in error_text
        and "fix:" in error_text
    )


def check_audit(tmp_path, *overrides: str) -> int:
    (tmp_path / "config.yaml").write_text("env: {env_name: number_line, levels: false}\n")
    policy = f"actor_rollout_ref.model.path={ROOT}/experiments/policies/relay"
    fixed = [policy, "actor_rollout_ref.rollout.name=hf", "env.rollout.n=2", "--check"]
    return main_audit.main([str(tmp_path), *fixed, *overrides])


def test_plan_of_an_audit_without_levels_names_actions(tmp_path, capsys):
    settings = ["audit_points=5", "audit_plays=2", "audit_actions=3"]
    assert check_audit(tmp_path, *(f"algorithm.rlvcr.{setting}" for setting in settings)) == 0
    assert "3 actions x 2 trajectories = 30 " in capsys.readouterr().out


def test_scores_that_an_audit_does_not_measure_are_refused(tmp_path, capsys):
    file = tmp_path / "rewards.py"
    file.write_text("def compute_score(data_source, steps, extra_info):\n    return 1.0\n")
    reward = f"custom_reward_function.path={file}"
    assert check_audit(tmp_path, reward) == 2
    assert f"  - custom_reward_function.path='{file}': " in capsys.readouterr().err
    assert check_audit(tmp_path, reward, "custom_reward_function.path=null") == 0


def test_fix_for_a_run_with_a_reward_model_makes_it_auditable(tmp_path):
    """The fix names all keys that must change, also those that the stored config has."""
    judge = ["reward_model.enable=true", "reward_model.model.path=org/judge"]
    cfg = load_config("ppo_trainer", [*judge, "reward_model.weight=0.5"])
    (problem,) = find_audited_reward_problems(cfg)
    assert problem.key_path == "reward_model.enable"
    (tmp_path / "config.yaml").write_text(to_yaml(cfg))
    overrides = fix(problem).partition(": ")[2].split()
    repaired = load_config("config", overrides, config_path=str(tmp_path))
    assert not list(find_audited_reward_problems(repaired))
    assert not [p for p in find_problems(repaired, check_files=False) if "reward_model" in p]


@pytest.mark.parametrize(
    ("key", "line"),
    [
        ("audit_scores_file", '{"traj_uid": "a", "step": 0}'),
        ("audit_trajectories", '{"task_id": "number_line/99-1", "seed": 0, "actions": ["left"]}'),
        ("audit_trajectories", '{"task_id": "number_line/0-1", "seed": 0, "actions": []}'),
    ],
)
def test_invalid_line_of_a_file_is_refused_before_the_start(tmp_path, capsys, key, line):
    file = tmp_path / "file.jsonl"
    file.write_text(f"\n{line}\n")
    assert check_audit(tmp_path, f"algorithm.rlvcr.{key}={file}") == 2
    assert f"{file}, line 2: " in capsys.readouterr().err


def test_missing_file_is_refused(tmp_path, capsys):
    assert check_audit(tmp_path, f"algorithm.rlvcr.audit_scores_file={tmp_path}/none.jsonl") == 2
    assert "none.jsonl" in capsys.readouterr().err


def test_recorded_trajectories_are_in_the_plan(tmp_path, capsys):
    file = tmp_path / "recorded.jsonl"
    file.write_text('{"task_id": "number_line/1-0", "seed": 0, "actions": ["left"]}\n')
    assert check_audit(tmp_path, f"algorithm.rlvcr.audit_trajectories={file}") == 0
    assert "1 recorded" in capsys.readouterr().out


class AuditStarted(Exception):
    """Ends ``run_audit`` when it has made the tasks."""


def test_audit_uses_the_price_multiplier_of_the_checkpoint(monkeypatch):
    tasks = SimpleNamespace(meta_info={})
    trainer = SimpleNamespace(
        price_controller=PriceController(2.0),
        val_envs=SimpleNamespace(task_list=[{}], gen_batch=lambda _step, _count: tasks),
        workers=None,
    )

    def resume(will_train: bool) -> None:
        assert not will_train
        trainer.price_controller.multiplier = 0.25

    def start(*_: object) -> None:
        raise AuditStarted

    trainer.prepare = resume
    run = SimpleNamespace(trainer=trainer, collector=SimpleNamespace(audit_loop=start))
    monkeypatch.setattr("verl.trainer.launch.ppo.open_run", lambda _cfg: nullcontext(run))
    with pytest.raises(AuditStarted):
        run_audit(load_config("ppo_trainer"))
    assert tasks.meta_info == {PRICE_MULTIPLIER: 0.25}


def test_audit_without_audited_turns_is_refused(monkeypatch):
    """An untrained policy completes no turn."""
    rollout_rows = SimpleNamespace(meta_info={"metrics": {"audit/points_failed": 0}})
    logged = []
    trainer = SimpleNamespace(
        price_controller=PriceController(None),
        val_envs=SimpleNamespace(
            task_list=[{}], gen_batch=lambda *_: SimpleNamespace(meta_info={})
        ),
        workers=None,
        global_step=3,
        prepare=lambda will_train: None,
        journal=SimpleNamespace(log_rollouts=lambda step, rows: logged.append((step, rows))),
    )
    audit_loop = lambda *_: (rollout_rows, None, [])  # noqa: E731
    run = SimpleNamespace(trainer=trainer, collector=SimpleNamespace(audit_loop=audit_loop))
    monkeypatch.setattr("verl.trainer.launch.ppo.open_run", lambda _cfg: nullcontext(run))
    with pytest.raises(ConfigError, check=has_problem("no_rows", "env.max_turn_tokens")):
        run_audit(load_config("ppo_trainer"))
    assert logged == [(3, rollout_rows)]


def test_unknown_values_are_no_metrics():
    metrics = compute_audit_metrics(RESULT)
    assert metrics["audit/points"] == 7.0 and metrics["audit/plays"] == 3.0
    assert metrics["audit/reliability"] == 0.75
    assert [metrics[f"audit/levels/level_3/effect{end}"] for end in ("", "_low", "_high")] == [
        0.5,
        0.4,
        0.6,
    ]
    assert metrics["audit/scores/logprob/all_levels"] == 0.4
    assert metrics["audit/scores/logprob/chosen_low"] == -0.1
    assert metrics["audit/scores/logprob/in_won_high"] == 0.7
    assert metrics["audit/scores/second_audit/chosen"] == 0.8
    assert not [name for name in metrics if "gigpo" in name or "in_lost" in name]


def test_tables_are_printed(capsys):
    print_audit_tables(compute_audit_metrics(RESULT))
    text = capsys.readouterr().out
    assert "level 3" in text and "+0.500 (+0.400 to +0.600)" in text
    assert "logprob" in text and "+0.40 (+0.30 to +0.50)" in text


def test_every_point_is_written(tmp_path):
    written = json.loads(write_audit_file([POINT], RESULT, tmp_path).read_text())
    assert written["points"][0]["returns"] == [[0.0], [1.0], [1.0], [0.0]]
    assert written["audit"]["reliability"] == 0.75
    assert written["audit"]["plays"] == 3
    assert written["audit"]["levels"] == [list(interval) for interval in RESULT.level_effects]
    # JSON has no NaN: an unknown interval is null.
    assert written["audit"]["scores"][0]["in_lost"] == [None, None, None]


def test_report_loads_the_returns_of_levels(tmp_path):
    assert load_audit_returns(tmp_path) == {}
    write_audit_file([POINT], RESULT, tmp_path)
    returns = load_audit_returns(tmp_path)[POINT.traj_uid, POINT.step]
    assert [tuple(returns[level]) for level in (1, 2, 3, 4)] == list(POINT.returns)
