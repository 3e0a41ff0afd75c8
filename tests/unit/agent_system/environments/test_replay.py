"""Tests that the same task, seed and actions give the same transcript.

The sample holds thirty of all environments that start quickly. ``scripts/dev/same_transcripts.py``
runs every environment in two processes.
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
from agent_system.environments.env_registry import get_package, list_selectable_names
from scripts.dev.same_transcripts import make_small_settings, run_random_episode

ROOT = Path(__file__).resolve().parents[4]
# The other environments start a JVM or generate games for seconds.
QUICK = (
    "exam",
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
def list_quick_names() -> list[str]:
    return [name for package in QUICK for name in list_selectable_names(package)]


@cache
def sample_names() -> list[str]:
    return random.Random(0).sample(list_quick_names(), SAMPLE)


def test_more_than_400_environments_start_quickly():
    assert len(list_quick_names()) == len(set(list_quick_names())) > 400


@pytest.mark.parametrize("number", range(SAMPLE))
def test_sampled_environment_is_reproducible(number):
    name = sample_names()[number]
    first = run_random_episode(name, seed=number, steps=8)
    assert run_random_episode(name, seed=number, steps=8) == first, name


class RandomText:
    """Environment with a random observation in each episode."""

    placement = "inline"

    def reset(self, task, seed):
        return Observation(f"feeling {random.random()}")

    def step(self, action):
        return Observation("done"), 0.0, True, {"won": False, "is_action_valid": True}

    def close(self):
        pass


PACKAGE = dataclasses.replace(get_package("number_line"), make=lambda settings: RandomText())


def test_irreproducible_environment_is_noticed():
    import_path = f"{__name__}:PACKAGE"
    assert run_random_episode(import_path, seed=1, steps=3) != run_random_episode(
        import_path, seed=1, steps=3
    )


def test_small_settings_make_few_tasks():
    settings = make_small_settings("reasoning_gym/gcd")
    assert (
        settings.count_configured_tasks("train") == 4
        and settings.count_configured_tasks("val") == 4
    )


def run_script(*list_quick_names: str) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        str(ROOT / "scripts" / "dev" / "same_transcripts.py"),
        *list_quick_names,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=200, cwd=ROOT)


def test_script_compares_two_processes_and_names_failures():
    process = run_script("number_line", "sokobann")
    assert process.returncode == 1 and "1 of 2 " in process.stdout
    assert "sokobann: ! UnknownEnvironmentError" in process.stdout
    assert run_script("relay").returncode == 0
