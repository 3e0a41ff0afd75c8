"""The same task, seed and actions give the same transcript: thirty environments drawn from all that
play at once. ``scripts/dev/same_transcripts.py`` plays every one of them in two processes.
"""

import dataclasses
import random
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

pytest.importorskip("minigrid")
pytest.importorskip("textarena")

from agent_system.environments.env import Observation
from agent_system.environments.env_registry import get_package, selectable_names
from scripts.dev.same_transcripts import run_random_episode, small_settings

ROOT = Path(__file__).resolve().parents[4]
# The others start a JVM, or make games for seconds before the first episode.
QUICK = (
    "frozen_lake",
    "gymnasium",
    "mixture",
    "number_line",
    "reasoning_gym",
    "relay",
    "search",
    "shop",
    "sokoban",
    "textarena",
    "tools",
    "twenty_questions",
)
SAMPLE = 30


@cache
def names() -> list[str]:
    return [name for package in QUICK for name in selectable_names(package)]


@cache
def sample() -> list[str]:
    return random.Random(0).sample(names(), SAMPLE)


def test_there_are_hundreds_of_names():
    assert len(names()) == len(set(names())) > 400


@pytest.mark.parametrize("number", range(SAMPLE))
def test_a_sampled_environment_repeats_itself(number):
    name = sample()[number]
    first = run_random_episode(name, seed=number, steps=8)
    assert run_random_episode(name, seed=number, steps=8) == first, name


class Moody:
    """Says something else each time."""

    placement = "inline"

    def reset(self, task, seed):
        return Observation(f"feeling {random.random()}")

    def step(self, action):
        return Observation("done"), 0.0, True, {"won": False, "is_action_valid": True}

    def close(self):
        pass


PACKAGE = dataclasses.replace(get_package("number_line"), make=lambda settings: Moody())


def test_an_environment_that_does_not_repeat_itself_is_noticed():
    place = f"{__name__}:PACKAGE"
    assert run_random_episode(place, seed=1, steps=3) != run_random_episode(place, seed=1, steps=3)


def test_few_tasks_are_made():
    settings = small_settings("reasoning_gym/gcd")
    assert settings.known_tasks("train") == 4 and settings.known_tasks("val") == 4


def run_script(*names: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(ROOT / "scripts" / "dev" / "same_transcripts.py"), *names]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_the_script_compares_two_processes_and_names_what_does_not_play():
    done = run_script("number_line", "sokobann")
    assert done.returncode == 1 and "1 of 2 environments repeat themselves" in done.stdout
    assert "sokobann: ! UnknownEnvironment" in done.stdout
    assert run_script("relay").returncode == 0
