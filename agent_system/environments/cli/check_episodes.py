"""Episodes of the command ``check``, in worker processes with deadlines. All observations and
rewards are stored.
"""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_system.environments.cli.policies import Policy, PolicyStart, TextWithAction
from agent_system.environments.env import Observation, Task
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool, PoolSession
from agent_system.environments.pool.failure import EnvFailure
from agent_system.environments.settings import EnvSettings
from verl.utils.seeds import derive_seed

RESET_S = 120.0
STEP_S = 60.0


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
    make_policy: Callable[[PolicyStart], Policy],
    number: int,
) -> CheckEpisode:
    """Run policy ``name``, made by ``make``, on task ``number`` and return the episode.

    It ends when the environment is done, or after ``max_steps`` actions.
    """
    task, seed = checked.tasks[number]
    episode = CheckEpisode(name, task, seed)
    try:
        # One session per episode: the pool replaces an environment that failed.
        async with pool.open_session() as session:
            await _run_turns(checked, episode, session, make_policy)
    except EnvFailure as failure:
        episode.failure = str(failure)
    return episode


async def _run_turns(
    checked: CheckedEnvironment,
    episode: CheckEpisode,
    session: PoolSession,
    make_policy: Callable[[PolicyStart], Policy],
) -> None:
    rng = random.Random(derive_seed("check", episode.policy, episode.task["task_id"], episode.seed))
    observation = await session.reset(episode.task, episode.seed)
    episode.transcript.append(_observation_fields(observation))
    package = checked.package.package_for_task(episode.task)
    policy = make_policy(PolicyStart(checked.settings, episode.task, observation, rng))
    for _ in range(checked.max_steps):
        text = policy(observation)
        bypasses_project = isinstance(text, TextWithAction)
        action, well_formed = (text.action, True) if bypasses_project else package.project(text)
        episode.actions.append(action)
        episode.well_formed.append(well_formed)
        observation, done = await _step(episode, session, action)
        if done:
            return


async def repeat_episode(pool: EnvironmentPool, original: CheckEpisode) -> CheckEpisode:
    """Repeat the task, seed and actions of ``original`` and return the new episode."""
    episode = CheckEpisode(original.policy, original.task, original.seed)
    try:
        async with pool.open_session() as session:
            await _repeat_actions(episode, session, original.actions)
    except EnvFailure as failure:
        episode.failure = str(failure)
    return episode


async def _repeat_actions(
    episode: CheckEpisode, session: PoolSession, actions: Sequence[str]
) -> None:
    episode.transcript.append(_observation_fields(await session.reset(episode.task, episode.seed)))
    for action in actions:
        _, done = await _step(episode, session, action)
        if done:
            return


async def _step(
    episode: CheckEpisode, session: PoolSession, action: str
) -> tuple[Observation, bool]:
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
    return observation, done


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
