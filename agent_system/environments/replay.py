"""Whether an environment is determined by task, seed and actions: an episode with actions at
random, written down.
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
    get_package,
    settings_class,
)
from agent_system.environments.experts.episode import now
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings
from verl.config.schema.env import EnvConfig
from verl.utils.seeds import derive_seed

# Keys that say how many tasks there are: a few suffice here, and are soon made.
_COUNTS = re.compile(r"(train|val)_(tasks|games|maps|levels)")
_MOVES = re.compile(r"\[[^\[\]\n]{1,30}\]|\w+")
FEW = 4
MAX_STEPS = 30


@dataclass(frozen=True, slots=True)
class RandomEpisode:
    """What was played: the steps, and a hash of all that was seen."""

    steps: int
    digest: str


def small_settings(name: str) -> EnvSettings:
    """The settings of environment ``name`` with few tasks. Raises what ``env_settings`` raises."""
    counts = [key for key in settings_class(name).model_fields if _COUNTS.fullmatch(key)]
    few = dict.fromkeys(counts, FEW)
    return env_settings(EnvConfig(env_name=name, kwargs=few, max_steps=MAX_STEPS))


def first_task(package: EnvPackage, settings: EnvSettings) -> Task:
    """The first task of training."""
    return package.tasks(settings, "train")[0]


def episode(name: str, seed: int, steps: int) -> RandomEpisode:
    """Play the first task of ``name`` with actions drawn from ``seed``, in an environment of its
    own, for ``steps`` steps at most. Raises what the environment raises.
    """
    package = get_package(name)
    settings = small_settings(name)
    env = package.make(settings)
    try:
        return _played(env, first_task(package, settings), seed, steps)
    finally:
        env.close()


def _played(env: Env, task: Task, seed: int, steps: int) -> RandomEpisode:
    draw = random.Random(derive_seed("replay", seed))
    observation = now(env.reset(task, seed))
    seen: list[Any] = [_told(observation)]
    for _ in range(steps):
        action = _any_action(observation, draw)
        observation, reward, done, info = now(env.step(action))
        seen.append([action, _told(observation), reward, bool(done), _told_info(info)])
        if done:
            break
    text = json.dumps([task, seen], sort_keys=True, default=str)
    return RandomEpisode(len(seen) - 1, hashlib.blake2b(text.encode(), digest_size=8).hexdigest())


def _any_action(observation: Observation, draw: random.Random) -> str:
    """One of the possible actions, or of the moves and words that were read."""
    possible = observation.info.get("admissible_actions") or _MOVES.findall(observation.text)
    return draw.choice(possible) if possible else "1"


def _told(observation: Observation) -> list[Any]:
    return [observation.text, observation.state, _told_info(observation.info)]


def _told_info(info: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) for key, value in info.items()}
