"""What a machine lacks is said before anything starts: places, trackers, the token of Ray."""

import fcntl
from importlib import util

import pytest

from verl.config.validate import find_problems
from verl.single_controller.ray import local
from verl.trainer.launch import preflight_machine
from verl.trainer.launch.extensions import load_config, read_config
from verl.trainer.launch.preflight_machine import find_machine_problems

PATH = "actor_rollout_ref.model.path=org/policy"
PLACE = "trainer.default_local_dir"


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    for name in ("RAY_ADDRESS", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH", "RAY_AUTH_MODE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)


def problems(*words: str) -> list[str]:
    return list(find_machine_problems(load_config("ppo_trainer", [PATH, *words])))


@pytest.mark.parametrize("name", ["wandb", "comet_ml", "aim", "tensorboard", "swanlab", "mlflow"])
def test_a_tracker_that_is_not_installed_is_a_problem(name, monkeypatch):
    monkeypatch.setattr(preflight_machine, "find_spec", lambda module: None)
    (problem,) = problems(f"trainer.logger=[console,{name}]")
    assert problem.startswith("trainer.logger=") and "trainer.logger=[console]" in problem
    assert f"pip install {name.replace('_', '-')}" in problem


def test_trackers_that_are_there_are_none(monkeypatch):
    there = lambda module: util.find_spec("json") if module == "tensorboardX" else None  # noqa: E731
    monkeypatch.setattr(preflight_machine, "find_spec", there)
    assert not problems("trainer.logger=[console,file,tensorboard]")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("HOME", "/proc/nohome"), ("RAY_AUTH_TOKEN_PATH", "/proc/nothing/token")],
)
def test_a_place_without_room_for_rays_token_is_named(variable, value, monkeypatch):
    monkeypatch.setenv(variable, value)
    (problem,) = problems()
    assert problem.startswith(f"{variable}={value!r}") and "RAY_AUTH_TOKEN_PATH=" in problem
    monkeypatch.setenv("RAY_AUTH_TOKEN", "secret")
    assert not problems()


@pytest.mark.parametrize("kind", ["file", "link", "other user"])
def test_a_squatted_directory_of_rays_sessions_is_named(kind, tmp_path, monkeypatch):
    place = tmp_path / "verl-user"
    monkeypatch.setattr(local, "PRIVATE_DIRECTORY", place)
    assert not problems()
    if kind == "file":
        place.touch()
    elif kind == "link":
        place.symlink_to(tmp_path / "nowhere")
    else:
        place.mkdir()
        monkeypatch.setattr(local.os, "getuid", lambda: place.stat().st_uid + 1)
    (problem,) = problems()
    assert problem.startswith(f"{place}: ")


PLACES = (
    "/proc/x/y",
    "x" * 300,
    "a/" + "y" * 300 + "/b",
    "file",
    "file/below",
    "~nobody_of_that_name/x",
)


def test_a_run_directory_that_cannot_be_made_is_a_problem(tmp_path):
    (tmp_path / "file").touch()
    cfg = load_config("ppo_trainer", [PATH])
    for name in ("default_local_dir", "rollout_data_dir", "validation_data_dir"):
        for place in PLACES:
            setattr(cfg.trainer, name, place)
            assert [found.partition("=")[0] for found in find_machine_problems(cfg)] == [
                f"trainer.{name}"
            ], place
        setattr(cfg.trainer, name, str(tmp_path / "run"))


def test_a_run_directory_that_another_run_holds_is_a_problem(tmp_path):
    lock = tmp_path / "run" / ".lock"
    lock.parent.mkdir()
    lock.write_text("4711\n")
    assert not problems(f"{PLACE}={lock.parent}")
    with lock.open() as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        (problem,) = problems(f"{PLACE}={lock.parent}")
    assert problem.startswith(f"{PLACE}=") and "4711" in problem


def test_names_of_a_run_make_a_directory_below_runs():
    cfg = load_config("ppo_trainer", [PATH])
    wrong = {
        "project_name": ("../../../etc", "..", "/absolute", "a//b", "", "  ", "a\nb", "a/../b"),
        "default_local_dir": ("", " ", "a\nb", "a\0b"),
    }
    for name, values in wrong.items():
        for value in values:
            setattr(cfg.trainer, name, value)
            found = find_problems(cfg, check_files=False)
            assert [each.partition("=")[0] for each in found] == [f"trainer.{name}"], value
        for value in ("a/b", ".hidden", "mit Leerzeichen und ü"):
            setattr(cfg.trainer, name, value)
            assert not find_problems(cfg, check_files=False)


def test_a_seed_is_one_that_every_generator_takes():
    keys = ("trainer.seed", "env.seed", "actor_rollout_ref.rollout.seed", "env.alfworld.seed")
    load_config("quickstart", [f"{key}={2**31 - 1}" for key in keys])
    for seed in (2**31, 2**80, -1):
        draft = read_config("quickstart", [f"{key}={seed}" for key in keys])
        found = {problem.partition("=")[0] for problem in draft.problems}
        assert found == set(keys) and "<= 2147483647;" in draft.problems[0]
