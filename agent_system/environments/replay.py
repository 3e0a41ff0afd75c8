"""Episodes of random actions, each with a hash of its observations and rewards.

If two processes get equal hashes, then task, seed and actions determine an episode.
"""

import hashlib
import json
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env import Env, Observation, Task
from agent_system.environments.env_registry import (
    env_settings,
    find_settings_class,
    get_package,
)
from agent_system.environments.experts.episode import await_if_needed
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from verl.config.schema.env import EnvConfig
from verl.utils.seeds import derive_seed

# Config keys that set a number of tasks. They get the value ``FEW_TASKS``, so that making the tasks
# takes little time.
_TASK_COUNT_KEY = re.compile(r"(train|val)_(tasks|games|maps|levels)")
_MOVE_OR_WORD = re.compile(r"\[[^\[\]\n]{1,30}\]|\w+")
FEW_TASKS = 4
MAX_STEPS = 30


@dataclass(frozen=True, slots=True)
class RandomEpisode:
    """Number of env steps of an episode, and a hash of its observations and rewards."""

    steps: int
    digest: str


def small_settings(name: str) -> EnvSettings:
    """Return settings of ``name`` with few tasks. Raises what ``env_settings`` raises."""
    counts = [
        key for key in find_settings_class(name).model_fields if _TASK_COUNT_KEY.fullmatch(key)
    ]
    task_counts = dict.fromkeys(counts, FEW_TASKS)
    return env_settings(EnvConfig(env_name=name, kwargs=task_counts, max_steps=MAX_STEPS))


def first_training_task(package: EnvPackage, settings: EnvSettings) -> Task:
    """Return the first task of the training split."""
    return package.tasks(settings, "train")[0]


def run_random_episode(name: str, seed: int, steps: int) -> RandomEpisode:
    """Run the first training task of ``name`` with random actions, for at most ``steps`` env steps.

    ``seed`` determines the actions. The environment is new. Raises what the environment raises.
    """
    package = get_package(name)
    settings = small_settings(name)
    env = package.make(settings)
    try:
        return _run_episode(env, first_training_task(package, settings), seed, steps)
    finally:
        env.close()


def _run_episode(env: Env, task: Task, seed: int, steps: int) -> RandomEpisode:
    rng = random.Random(derive_seed("replay", seed))
    observation = await_if_needed(env.reset(task, seed))
    transcript: list[Any] = [_list_fields(observation)]
    for _ in range(steps):
        action = _draw_action(observation, rng)
        observation, reward, done, info = await_if_needed(env.step(action))
        transcript.append(
            [action, _list_fields(observation), reward, bool(done), _info_texts(info)]
        )
        if done:
            break
    text = json.dumps([task, transcript], sort_keys=True, default=str)
    return RandomEpisode(
        len(transcript) - 1, hashlib.blake2b(text.encode(), digest_size=8).hexdigest()
    )


def _draw_action(observation: Observation, rng: random.Random) -> str:
    """Return a random admissible action, or else a random move or word of the observation."""
    possible = observation.info.get("admissible_actions") or _MOVE_OR_WORD.findall(observation.text)
    return rng.choice(possible) if possible else "1"


def _list_fields(observation: Observation) -> list[Any]:
    return [observation.text, observation.state, _info_texts(observation.info)]


def _info_texts(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in info.items()}
