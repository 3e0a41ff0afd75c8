"""Test the environment in the docstring of ``Env``."""

import textwrap
from typing import Any

import pytest

from agent_system.environments import base
from agent_system.environments.env import Env, Observation


@pytest.fixture
def env():
    example = (Env.__doc__ or "").split("::\n", 1)[1].split("``placement``", 1)[0]
    space: dict[str, Any] = {"Observation": Observation}
    exec(textwrap.dedent(example), space)
    return space["GuessNumber"]()


def test_docstring_example_can_be_solved_and_ends(env):
    assert env.reset({"number": 5}, seed=0).text.startswith("Guess")
    observation, reward, done, info = env.step("3")
    assert (observation.text, reward, done) == ("It is larger.", 0.0, False)
    assert info == {"won": False, "is_action_valid": True}
    _, reward, done, info = env.step("5")
    assert (reward, done, info["won"]) == (1.0, True, True)
    env.reset({"number": 5}, seed=0)
    assert [env.step("x")[2] for _ in range(5)] == [False] * 4 + [True]
    env.close()


def test_old_import_path_has_the_public_names():
    assert base.Env is Env and base.Observation is Observation
    names = (
        "Decision Env EnvPackage EpisodeStart Expert ExpertPolicy Mixture Noise Observation "
        "Prompts Step Task TaskText Thought select_prompts shows_level_prompts"
    )
    assert all(hasattr(base, name) for name in names.split())
