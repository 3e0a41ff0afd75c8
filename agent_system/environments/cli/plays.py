"""Episodes of a check, in worker processes with deadlines, with their complete transcripts."""

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from agent_system.environments.cli.policies import Beginning, Policy, Said
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
    """Environment of a check, with its tasks and the maximum length of an episode."""

    name: str
    package: EnvPackage[Any]
    settings: EnvSettings
    tasks: Sequence[tuple[Task, int]]  # task and environment seed
    max_steps: int
    all_tasks: bool = False  # ``tasks`` are all tasks of the split

    def pool(self) -> EnvironmentPool:
        """Return a new pool of one process with one environment."""
        return EnvironmentPool(self.name, self.settings, 1, 1, RESET_S, STEP_S, placement="process")


@dataclass(slots=True)
class Play:
    """Episode of a check.

    ``transcript`` contains the first observation and the result of every action, as plain values.
    ``failure`` is the message if the environment failed.
    """

    policy: str
    task: Task
    seed: int
    actions: list[str] = field(default_factory=list)
    well_formed: list[bool] = field(default_factory=list)
    seen: list[dict[str, Any]] = field(default_factory=list)
    broken: str = ""

    @property
    def earned(self) -> float:
        """Return of the episode: the sum of its rewards."""
        return sum(moment["reward"] for moment in self.seen if "reward" in moment)

    @property
    def won(self) -> bool:
        """True if the last env step reported a success."""
        return bool(self.seen) and bool(self.seen[-1].get("won"))

    @property
    def invalid(self) -> int:
        """Number of actions that were not well formed or not valid."""
        valid = [bool(moment.get("valid")) for moment in self.seen[1:]]
        return sum(not (a and b) for a, b in zip(self.well_formed, valid, strict=False))


async def play_policy(
    checked: CheckedEnvironment,
    pool: EnvironmentPool,
    name: str,
    make: Callable[[Beginning], Policy],
    number: int,
) -> Play:
    """Run a policy on task ``number`` until the episode is done, or for ``max_steps`` actions."""
    task, seed = checked.tasks[number]
    episode = Play(name, task, seed)
    try:
        # One session per episode: the pool replaces an environment that failed.
        async with pool.session() as session:
            await _run_turns(checked, episode, session, make)
    except EnvFailure as failure:
        episode.broken = str(failure)
    return episode


async def _run_turns(
    checked: CheckedEnvironment,
    episode: Play,
    session: PoolSession,
    make: Callable[[Beginning], Policy],
) -> None:
    rng = random.Random(derive_seed("check", episode.policy, episode.task["task_id"], episode.seed))
    observation = await session.reset(episode.task, episode.seed)
    episode.seen.append(_seen(observation))
    package = checked.package.for_task(episode.task)
    policy = make(Beginning(checked.settings, episode.task, observation, rng))
    for _ in range(checked.max_steps):
        text = policy(observation)
        known = isinstance(text, Said)
        action, well_formed = (text.action, True) if known else package.project(text)
        episode.actions.append(action)
        episode.well_formed.append(well_formed)
        observation, done = await _step(episode, session, action)
        if done:
            return


async def play_again(pool: EnvironmentPool, old: Play) -> Play:
    """Repeat the task, seed and actions of ``old`` and return the new episode."""
    episode = Play(old.policy, old.task, old.seed)
    try:
        async with pool.session() as session:
            await _repeat_actions(episode, session, old.actions)
    except EnvFailure as failure:
        episode.broken = str(failure)
    return episode


async def _repeat_actions(episode: Play, session: PoolSession, actions: Sequence[str]) -> None:
    episode.seen.append(_seen(await session.reset(episode.task, episode.seed)))
    for action in actions:
        _, done = await _step(episode, session, action)
        if done:
            return


async def _step(episode: Play, session: PoolSession, action: str) -> tuple[Observation, bool]:
    observation, reward, done, info = await session.step(action)
    episode.seen.append(
        {
            **_seen(observation),
            "reward": reward,
            "done": done,
            "won": bool(info.get("won", False)),
            "valid": bool(info.get("is_action_valid", True)),
        }
    )
    return observation, done


def _seen(observation: Observation) -> dict[str, Any]:
    image = observation.image
    return {
        "text": observation.text,
        "anchor": observation.anchor,
        "info": _plain(observation.info),
        "opening": observation.opening,
        "image": None if image is None else _plain(image),
    }


def _plain(value: Any) -> Any:
    """Return ``value`` with lists instead of arrays, which ``==`` compares by element."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
