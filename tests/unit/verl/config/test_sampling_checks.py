"""Validation whose plays cannot differ is refused; sampling keys without effect are named."""

import pytest

from verl.config.load import load_config
from verl.config.plan_notes import iterate_plan_notes
from verl.config.validate import find_problems

VAL = "actor_rollout_ref.rollout.val_kwargs"


def config(*words: str):
    return load_config("ppo_trainer", [f"{VAL}.{word}" for word in words])


def repeated(cfg) -> list[str]:
    return [found for found in find_problems(cfg, check_files=False) if found.startswith(VAL)]


@pytest.mark.parametrize(
    "words",
    [
        ("n=4",),
        ("n=2", "temperature=0.7"),
        ("n=4", "temperature=0.7", "top_p=0.9"),
        ("n=2", "do_sample=true"),
        ("n=2", "do_sample=true", "temperature=0"),
        ("n=2", "do_sample=true", "temperature=1", "top_k=1"),
    ],
)
def test_several_greedy_plays_of_a_task_are_refused(words):
    (problem,) = repeated(config(*words))
    assert problem.startswith(f"{VAL}.{words[0]}") and f"{VAL}.do_sample=true" in problem


@pytest.mark.parametrize(
    "words", [("n=1",), ("n=4", "do_sample=true", "temperature=0.7"), ("do_sample=true",)]
)
def test_plays_that_differ_and_single_ones_are_not(words):
    assert repeated(config(*words)) == []


@pytest.mark.parametrize(
    "words, named",
    [
        ((), []),
        (("temperature=0.7",), ["temperature=0.7"]),
        (("top_p=0.9", "top_k=5"), ["top_p=0.9", "top_k=5"]),
        (("do_sample=true", "top_p=0.9"), ["top_p=0.9"]),
        (("do_sample=true", "temperature=0.7", "top_p=0.9"), []),
        (("do_sample=true", "temperature=0.7", "top_k=1"), ["temperature=0.7"]),
    ],
)
def test_keys_that_change_nothing_are_named(words, named):
    said = [note for note in iterate_plan_notes(config(*words)) if "has no effect" in note]
    assert [note.split()[0] for note in said] == [f"{VAL}.{name}" for name in named]
