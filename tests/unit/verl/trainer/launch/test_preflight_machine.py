"""Requirements that the machine lacks are reported before the start: directories, trackers, Ray's
token."""

import fcntl
import resource
from importlib import util
from types import SimpleNamespace

import pytest
import torch

from verl.config.settings import Problem
from verl.config.validate import find_problems
from verl.single_controller.ray import local
from verl.trainer.launch import preflight_machine
from verl.trainer.launch.extensions import load_config, read_config
from verl.trainer.launch.preflight_machine import find_machine_problems, find_write_problem

PATH = "actor_rollout_ref.model.path=org/policy"
RUN_DIR_KEY = "trainer.default_local_dir"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def machine_problems(*overrides: str) -> list[Problem]:
    return list(find_machine_problems(load_config("ppo_trainer", [PATH, *overrides])))


@pytest.mark.parametrize("name", ["wandb", "comet_ml", "aim", "tensorboard", "swanlab", "mlflow"])
def test_tracker_that_is_not_installed_is_a_problem(name, monkeypatch):
    monkeypatch.setattr(preflight_machine, "find_spec", lambda module: None)
    (problem,) = machine_problems(f"trainer.logger=[console,{name}]")
    assert problem.startswith("trainer.logger=") and "trainer.logger=[console]" in problem
    assert f"pip install {name.replace('_', '-')}" in problem


def test_installed_trackers_are_no_problem(monkeypatch):
    monkeypatch.setattr(preflight_machine, "find_spec", lambda _: util.find_spec("json"))
    assert not machine_problems("trainer.logger=[console,file,tensorboard,wandb]")


@pytest.mark.parametrize("source", ["config", "environment"])
def test_local_ray_is_checked_like_no_cluster(source, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    overrides = ["trainer.device=cuda", "ray_init.num_cpus=4"]
    if source == "environment":
        monkeypatch.setenv("RAY_ADDRESS", "local")
    else:
        overrides.append("ray_init.address=local")
    cfg = load_config("ppo_trainer", [PATH, *overrides])
    assert find_problems(cfg) == []
    (problem,) = find_machine_problems(cfg)
    assert (problem.key_path, problem.code) == ("trainer.device", "does_not_fit")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HOME", "/proc/nohome"), ("RAY_AUTH_TOKEN_PATH", "/proc/nothing/token")],
)
def test_unwritable_directory_of_the_ray_token_is_named(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    (problem,) = machine_problems()
    assert problem.startswith(f"{variable}={value!r}") and "RAY_AUTH_TOKEN_PATH=" in problem
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert not machine_problems()


def test_variable_that_shows_all_gpus_to_every_engine_is_a_problem(monkeypatch):
    name = "RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES"
    monkeypatch.setenv(name, "1")
    assert not machine_problems()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    (problem,) = machine_problems()
    assert problem.startswith(f"{name}='1'") and f"fix: unset {name}" in problem
    assert not machine_problems("trainer.device=cpu")
    for unset_value in ("", "0", "false"):
        monkeypatch.setenv(name, unset_value)
        assert not machine_problems()


def test_variable_that_ray_sets_in_the_driver_of_a_job_is_no_problem(monkeypatch):
    """Ray sets it for the job's driver, and removes it from the environment of the workers."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setenv("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES", "1")
    assert len(machine_problems()) == 1
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", "{}")
    assert not machine_problems()


@pytest.mark.parametrize(("free_gb", "limit"), [(0.064, 10.0), (24.0, 24.0)])
def test_object_store_is_at_most_what_ray_accepts(free_gb, limit, monkeypatch):
    for module in (preflight_machine, local):
        monkeypatch.setattr(module, "read_free_shared_memory_gb", lambda: free_gb)
    assert not machine_problems(f"ray_init.object_store_gb={limit}")
    (problem,) = machine_problems(f"ray_init.object_store_gb={limit + 1}")
    assert problem.startswith("ray_init.object_store_gb=") and "object_store_gb=null" in problem
    for available_gb in (200.0, 8.0):
        memory = SimpleNamespace(available=available_gb * 1e9)
        monkeypatch.setattr(local.psutil, "virtual_memory", lambda memory=memory: memory)
        limit_gb = max(1.0, min(0.9 * free_gb, available_gb / 2))
        assert local.limit_object_store_size(100.0) == limit_gb
    assert local.limit_object_store_size(0.5) == 0.5


def test_limit_of_file_sizes_below_the_object_store_is_named(monkeypatch):
    """Ray's process would be killed by SIGXFSZ, and the run would end after two start timeouts."""
    limit = [2_000_000_000 + 2**20]  # Ray's file is larger than the store
    monkeypatch.setattr(local.resource, "getrlimit", lambda _: (limit[0], limit[0]))
    monkeypatch.setattr(local, "read_free_shared_memory_gb", lambda: 100.0)
    monkeypatch.setattr(
        local.psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * 10**9)
    )
    monkeypatch.setenv("RAY_ADDRESS", "")  # empty: Ray is started, as without the variable
    assert local.limit_object_store_size(5.0) == 2.0
    assert not machine_problems() and not machine_problems("ray_init.object_store_gb=2")
    for override in ("ray_init.object_store_gb=2.1", "ray_init.object_store_gb=null"):
        (problem,) = machine_problems(override)
        assert problem.startswith("ray_init.object_store_gb=") and "ulimit" in problem
        limit[0] = 1_000_000_000  # the default size without its overhead
    limit[0] = resource.RLIM_INFINITY
    assert not machine_problems() and local.limit_object_store_size(5.0) == 5.0


@pytest.mark.parametrize("kind", ["file", "link", "other user"])
def test_foreign_session_directory_of_ray_is_named(kind, tmp_path, monkeypatch):
    directory = tmp_path / "verl-user"
    monkeypatch.setattr(local, "PRIVATE_DIRECTORY", directory)
    assert not machine_problems()
    if kind == "file":
        directory.touch()
    elif kind == "link":
        directory.symlink_to(tmp_path / "nowhere")
    else:
        directory.mkdir()
        monkeypatch.setattr(local.os, "getuid", lambda: directory.stat().st_uid + 1)
    (problem,) = machine_problems()
    assert problem.startswith(f"{directory}: ")


UNWRITABLE = (
    "/proc/x/y",
    "x" * 300,
    "a/" + "y" * 300 + "/b",
    "file",
    "file/below",
    "~nobody_of_that_name/x",
)


def test_run_directory_that_cannot_be_created_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    cfg = load_config("ppo_trainer", [PATH])
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        for directory in UNWRITABLE:
            setattr(cfg.trainer, name, directory)
            assert [problem.partition("=")[0] for problem in find_machine_problems(cfg)] == [
                f"trainer.{name}"
            ], directory
        setattr(cfg.trainer, name, str(tmp_path / "run"))


@pytest.mark.parametrize(
    ("rollouts", "validations", "keys"),
    [
        ("run/rollouts", "null", ["trainer.rollout_data_dir"]),
        ("null", "run/../run/rollouts", ["trainer.validation_data_dir"]),
        ("run/tokens", "link", ["trainer.rollout_data_dir", "trainer.validation_data_dir"]),
        ("copies", "copies/", ["trainer.validation_data_dir"]),
        ("copies", "copies/val", []),
        ("run", "run/val", []),
    ],
)
def test_copies_that_would_replace_other_files_are_a_problem(tmp_path, rollouts, validations, keys):
    (tmp_path / "link").symlink_to(tmp_path / "run" / "rollouts")
    problems = machine_problems(
        "trainer.default_local_dir=run",
        f"trainer.rollout_data_dir={rollouts}",
        f"trainer.validation_data_dir={validations}",
    )
    refusals = [(problem.key_path, problem.code) for problem in problems]
    assert refusals == [(key, "conflicting_keys") for key in keys]


def test_full_disk_is_a_problem(tmp_path, monkeypatch):
    full_disk = "verl.trainer.launch.preflight_machine.tempfile.TemporaryFile"
    monkeypatch.setattr(full_disk, lambda dir: open("/dev/full", "wb"))  # noqa: SIM115
    assert "No space left" in find_write_problem(tmp_path)


def test_run_directory_locked_by_another_run_is_a_problem(tmp_path):
    lock = tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    lock.write_text("4711\n")
    assert not machine_problems(f"{RUN_DIR_KEY}={lock.parent}")
    with lock.open() as lock_file:
        fcntl.flock(lock_file, fcntl.LOCK_EX)
        (problem,) = machine_problems(f"{RUN_DIR_KEY}={lock.parent}")
    assert problem.startswith(f"{RUN_DIR_KEY}=") and "4711" in problem


def test_run_names_must_form_a_directory_below_runs():
    cfg = load_config("ppo_trainer", [PATH])
    wrong = {
        "project_name": ("../../../etc", "..", "/absolute", "a//b", "", "  ", "a\nb", "a/../b"),
        "default_local_dir": ("", " ", "a\nb", "a\0b"),
    }
    for name, values in wrong.items():
        for value in values:
            setattr(cfg.trainer, name, value)
            reported = find_problems(cfg, check_files=False)
            assert [problem.partition("=")[0] for problem in reported] == [f"trainer.{name}"], value
        for value in ("a/b", ".hidden", "mit Leerzeichen und ü"):
            setattr(cfg.trainer, name, value)
            assert not find_problems(cfg, check_files=False)


def test_seed_must_fit_every_generator():
    keys = ("trainer.seed", "env.seed", "actor_rollout_ref.rollout.seed", "env.alfworld.seed")
    load_config("quickstart", [f"{key}={2**31 - 1}" for key in keys])
    for seed in (2**31, 2**80, -1):
        parsed = read_config("quickstart", [f"{key}={seed}" for key in keys])
        keys_refused = {problem.partition("=")[0] for problem in parsed.problems}
        assert keys_refused == set(keys) and "<= 2147483647;" in parsed.problems[0]
