"""Episodes of the command ``check``, in worker processes with deadlines. All observations and
rewards are stored.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_system.environments.cli.policies import PolicyFactory, PolicyStart, TextWithAction
from agent_system.environments.env import Observation, Task
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.environments.pool.failure import EnvFailure
from agent_system.environments.settings import EnvSettings
from verl.utils.seeds import derive_seed

RESET_S = 120.0
STEP_S = 60.0
# Maps the last observation to an action, and to True if the text of the policy is well formed.
ActionChoice = Callable[[Observation], tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class CheckedEnvironment:
    """Environment that is checked, its tasks, and the maximum number of turns of an episode."""

    name: str
    package: EnvPackage[Any]
    settings: EnvSettings
    tasks: Sequence[tuple[Task, int]]  # task and environment seed
    max_steps: int
    all_tasks: bool = False  # True if ``tasks`` contains every task of the split

    def create_pool(self) -> EnvironmentPool:
        """Return a new pool of one process with one environment."""
        return EnvironmentPool(self.name, self.settings, 1, 1, RESET_S, STEP_S, placement="process")


@dataclass(slots=True)
class CheckEpisode:
    """Episode of a scripted policy in a check.

    ``transcript`` contains the first observation and the result of every action, as plain values.
    ``failure`` is the message if the environment failed.
    """

    policy: str
    task: Task
    seed: int
    actions: list[str] = field(default_factory=list)
    well_formed: list[bool] = field(default_factory=list)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""

    @property
    def total_reward(self) -> float:
        """Return of the episode: the sum of its rewards."""
        return sum(moment["reward"] for moment in self.transcript if "reward" in moment)

    @property
    def is_success(self) -> bool:
        """True if the last env step reported a success."""
        return bool(self.transcript) and bool(self.transcript[-1].get("won"))

    @property
    def num_invalid_actions(self) -> int:
        """Number of actions that were not well formed or not valid."""
        validity_flags = [bool(moment.get("valid")) for moment in self.transcript[1:]]
        return sum(not (a and b) for a, b in zip(self.well_formed, validity_flags, strict=False))


async def run_policy(
    checked: CheckedEnvironment,
    pool: EnvironmentPool,
    name: str,
    make_policy: PolicyFactory,
    number: int,
) -> CheckEpisode:
    """Run policy ``name``, made by ``make_policy``, on task ``number`` and return the episode.

    It ends when the environment is done, or after ``max_steps`` actions.
    """
    task, seed = checked.tasks[number]
    package = checked.package.package_for_task(task)

    def start_policy(first: Observation) -> ActionChoice:
        rng = random.Random(derive_seed("check", name, task["task_id"], seed))
        policy = make_policy(PolicyStart(checked.settings, task, first, rng))

        def choose_action(observation: Observation) -> tuple[str, bool]:
            text = policy(observation)
            bypasses_project = isinstance(text, TextWithAction)
            return (text.action, True) if bypasses_project else package.project(text)

        return choose_action

    return await _run_episode(pool, CheckEpisode(name, task, seed), start_policy, checked.max_steps)


async def repeat_episode(pool: EnvironmentPool, original: CheckEpisode) -> CheckEpisode:
    """Repeat the task, seed and actions of ``original`` and return the new episode."""
    episode = CheckEpisode(original.policy, original.task, original.seed)
    actions = iter(zip(original.actions, original.well_formed, strict=True))
    max_steps = len(original.actions)
    return await _run_episode(pool, episode, lambda _first: lambda _last: next(actions), max_steps)


async def _run_episode(
    pool: EnvironmentPool,
    episode: CheckEpisode,
    start_policy: Callable[[Observation], ActionChoice],
    max_steps: int,
) -> CheckEpisode:
    try:
        # One session per episode: the pool replaces an environment that failed.
        async with pool.open_session() as session:
            observation = await session.reset(episode.task, episode.seed)
            episode.transcript.append(_observation_fields(observation))
            choose_action = start_policy(observation)
            done = False
            while not done and len(episode.actions) < max_steps:
                action, is_well_formed = choose_action(observation)
                episode.actions.append(action)
                episode.well_formed.append(is_well_formed)
                observation, reward, done, info = await session.step(action)
                episode.transcript.append(
                    {
                        **_observation_fields(observation),
                        "reward": reward,
                        "done": done,
                        "won": bool(info.get("won", False)),
                        "valid": bool(info.get("is_action_valid", True)),
                    }
                )
    except EnvFailure as failure:
        episode.failure = str(failure)
    return episode


def _observation_fields(observation: Observation) -> dict[str, Any]:
    image = observation.image
    return {
        "text": observation.text,
        "anchor": observation.anchor,
        "info": _without_arrays(observation.info),
        "opening": observation.opening,
        "image": None if image is None else _without_arrays(image),
    }


def _without_arrays(value: Any) -> Any:
    """Return ``value`` with lists instead of arrays: ``==`` of two lists is a single bool."""
    if isinstance(value, dict):
        return {key: _without_arrays(item) for key, item in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
