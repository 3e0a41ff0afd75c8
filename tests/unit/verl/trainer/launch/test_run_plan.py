"""Paths and models are named so that processes in other directories or on other nodes find them."""

import socket
from pathlib import Path

import pytest

from verl.config.settings import value_at_path
from verl.config.validate import find_problems
from verl.models import hub
from verl.trainer.launch.extensions import load_config
from verl.trainer.launch.preflight_machine import find_machine_problems
from verl.trainer.launch.run_plan import RunPlan, collect_absolute_paths

COMMIT = "0123456789abcdef0123456789abcdef01234567"
RUN_DIR_KEY = "trainer.default_local_dir"


def config(*overrides: str):
    return load_config("ppo_trainer", ["actor_rollout_ref.model.path=owner/model", *overrides])


def test_plan_adds_values_and_keeps_the_written_config():
    written = config("trainer.device=auto").as_frozen()
    plan = RunPlan(written, {"trainer.device": "cuda", "trainer.default_local_dir": "/runs/a"})
    later_plan = plan.with_values({"trainer.device": "cpu"})
    assert (plan.config.trainer.device, later_plan.config.trainer.device) == ("cuda", "cpu")
    assert later_plan.config.trainer.default_local_dir == "/runs/a"
    assert later_plan.written_config is written and written.trainer.device == "auto"


def test_relative_paths_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/somebody")
    cfg = config(
        "trainer.default_local_dir=runs/a",
        "trainer.rollout_data_dir='~/rollouts'",
        "trainer.resume_from_path=/runs/b",
        "env.env_name=alfworld",
        "env.alfworld.data_dir=games",
    )
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert cfg.trainer.default_local_dir == f"{tmp_path}/runs/a"
    assert cfg.trainer.rollout_data_dir == "/home/somebody/rollouts"
    assert cfg.trainer.resume_from_path == "/runs/b"
    assert cfg.trainer.validation_data_dir is None and cfg.custom_reward_function.path is None
    assert value_at_path(cfg, "env.alfworld.data_dir") == f"{tmp_path}/games"
    assert value_at_path(cfg, "env.alfworld.task_types") == value_at_path(
        config(), "env.alfworld.task_types"
    )


def test_data_files_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = config("env.env_name=dataset", "env.dataset.train_files=[a.parquet,/b.parquet]")
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert value_at_path(cfg, "env.dataset.train_files") == [f"{tmp_path}/a.parquet", "/b.parquet"]
    assert value_at_path(cfg, "env.dataset.val_files") == []


@pytest.mark.parametrize(
    "name, key",
    [
        ("dataset", "reward"),
        ("dataset", "custom_cls"),
        ("tools", "reward"),
        ("textarena", "opponent"),
        ("gymnasium", "describe"),
    ],
)
def test_function_files_of_environments_become_absolute(name, key, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = config(f"env.env_name={name}", f"env.{name}.{key}.path=mine.py")
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert value_at_path(cfg, f"env.{name}.{key}.path") == f"{tmp_path}/mine.py"
    cfg = config(f"env.env_name={name}", f"env.kwargs.{key}.path=mine.py")
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert cfg.env.kwargs == {key: {"path": f"{tmp_path}/mine.py"}}


def test_tool_files_become_absolute_and_modules_stay(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = config("env.env_name=tools", "env.tools.functions=[my/tools.py:add,math:sqrt]")
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert value_at_path(cfg, "env.tools.functions") == [f"{tmp_path}/my/tools.py:add", "math:sqrt"]


def test_agent_file_becomes_absolute_and_task_module_stays(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = [
        "env.env_name=agent",
        "env.agent.path=my/agent.py:run_episode",
        "env.agent.tasks=my.agent:all",
    ]
    cfg = config(*overrides)
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert value_at_path(cfg, "env.agent.path") == f"{tmp_path}/my/agent.py:run_episode"
    assert value_at_path(cfg, "env.agent.tasks") == "my.agent:all"


def test_paths_of_mixture_parts_become_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    cfg = config(
        "env.env_name=mixture",
        "env.mixture.parts={dataset: 1, gymnasium: 1}",
        "env.dataset.train_files=[a.jsonl]",
        "env.dataset.reward.path=grade.py",
        "env.mixture.kwargs={gymnasium: {describe: {path: say.py}, max_steps: 3}}",
    )
    cfg = cfg.with_values(collect_absolute_paths(cfg))
    assert value_at_path(cfg, "env.dataset.train_files") == [f"{tmp_path}/a.jsonl"]
    assert value_at_path(cfg, "env.dataset.reward.path") == f"{tmp_path}/grade.py"
    gymnasium = {"describe": {"path": f"{tmp_path}/say.py"}, "max_steps": 3}
    assert value_at_path(cfg, "env.mixture.kwargs") == {"gymnasium": gymnasium}


@pytest.mark.parametrize("source", ["config", "environment"])
def test_relative_run_directory_is_refused_on_a_cluster(source, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    overrides = ["env.env_name=number_line"]
    assert list(find_machine_problems(config(*overrides))) == []
    with socket.create_server(("127.0.0.1", 0)) as head:
        address = f"127.0.0.1:{head.getsockname()[1]}"
        if source == "environment":
            monkeypatch.setenv("RAY_ADDRESS", address)
        else:
            overrides.append(f"ray_init.address='{address}'")
        (problem,) = find_machine_problems(config(*overrides))
        assert problem.startswith(RUN_DIR_KEY) and address in problem
        assert f"{RUN_DIR_KEY}={Path.cwd()}/runs" in problem
        assert list(find_machine_problems(config(*overrides, f"{RUN_DIR_KEY}=/tmp/run"))) == []


def test_hub_name_is_pinned_to_its_commit_for_workers(tmp_path, monkeypatch):
    import huggingface_hub

    downloads = []

    def snapshot(name, revision, allow_patterns):
        downloads.append((name, revision))
        directory = tmp_path / name.replace("/", "--") / "snapshots" / (revision or COMMIT)
        directory.mkdir(parents=True, exist_ok=True)
        return str(directory)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", snapshot)
    monkeypatch.chdir(tmp_path)
    assert hub.pin_revision("owner/model") == f"owner/model@{COMMIT}"
    # a worker on another node resolves it to the snapshot
    assert hub.model_directory(f"owner/model@{COMMIT}").endswith(f"snapshots/{COMMIT}")
    assert downloads == [("owner/model", None), ("owner/model", COMMIT)]
    (tmp_path / "policy").mkdir()
    assert hub.pin_revision("policy") == str(tmp_path / "policy")


def test_model_revision_is_no_local_path():
    for path in ("owner/model@main", f"owner/model@{COMMIT}", "model@refs/pr/3"):
        overrides = ["env.env_name=number_line", f"actor_rollout_ref.model.path='{path}'"]
        assert find_problems(load_config("ppo_trainer", overrides)) == []
    overrides[-1] = "actor_rollout_ref.model.path=a/b/c@main"
    problems = find_problems(load_config("ppo_trainer", overrides))
    keys = [(problem.key_path, problem.code) for problem in problems]
    assert ("actor_rollout_ref.model.path", "missing_file") in keys
