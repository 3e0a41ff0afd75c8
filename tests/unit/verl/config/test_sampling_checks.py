"""Validation with several identical trajectories is refused, and sampling keys without effect are
named."""

import pytest

from verl.config.load import load_config
from verl.config.plan_notes import iterate_plan_notes
from verl.config.validate import find_problems

VAL = "actor_rollout_ref.rollout.val_kwargs"


def config(*overrides: str):
    return load_config("ppo_trainer", [f"{VAL}.{override}" for override in overrides])


def val_kwargs_problems(cfg) -> list[str]:
    return [problem for problem in find_problems(cfg, check_files=False) if problem.startswith(VAL)]


@pytest.mark.parametrize(
    "overrides",
    [
        ("n=4",),
        ("n=2", "temperature=0.7"),
        ("n=4", "temperature=0.7", "top_p=0.9"),
        ("n=2", "do_sample=true"),
        ("n=2", "do_sample=true", "temperature=0"),
        ("n=2", "do_sample=true", "temperature=1", "top_k=1"),
    ],
)
def test_several_greedy_trajectories_of_a_task_are_refused(overrides):
    (problem,) = val_kwargs_problems(config(*overrides))
    assert problem.startswith(f"{VAL}.{overrides[0]}") and f"{VAL}.do_sample=true" in problem


@pytest.mark.parametrize(
    "overrides", [("n=1",), ("n=4", "do_sample=true", "temperature=0.7"), ("do_sample=true",)]
)
def test_sampled_or_single_trajectories_are_accepted(overrides):
    assert val_kwargs_problems(config(*overrides)) == []


@pytest.mark.parametrize(
    "overrides, expected",
    [
        ((), []),
        (("temperature=0.7",), ["temperature=0.7"]),
        (("top_p=0.9", "top_k=5"), ["top_p=0.9", "top_k=5"]),
        (("do_sample=true", "top_p=0.9"), ["top_p=0.9"]),
        (("do_sample=true", "temperature=0.7", "top_p=0.9"), []),
        (("do_sample=true", "temperature=0.7", "top_k=1"), ["temperature=0.7"]),
    ],
)
def test_keys_that_change_nothing_are_expected(overrides, expected):
    notes = [note for note in iterate_plan_notes(config(*overrides)) if note.startswith(VAL)]
    assert [note.split()[0] for note in notes] == [f"{VAL}.{name}" for name in expected]
