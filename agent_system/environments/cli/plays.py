"""Plays of a check: in worker processes, with deadlines, and word for word as they went."""

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
    """What is played, for how long."""

    name: str
    package: EnvPackage[Any]
    settings: EnvSettings
    tasks: Sequence[tuple[Task, int]]  # each with its environment's seed
    max_steps: int
    all_tasks: bool = False  # there are no others

    def pool(self) -> EnvironmentPool:
        """A fresh process of one environment."""
        return EnvironmentPool(self.name, self.settings, 1, 1, RESET_S, STEP_S, placement="process")


@dataclass(slots=True)
class Play:
    """One play. ``seen`` has the first observation and what every action brought about, as plain
    values; ``broken`` says what the environment died of, where it did.
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
        """The sum of the rewards."""
        return sum(moment["reward"] for moment in self.seen if "reward" in moment)

    @property
    def won(self) -> bool:
        """Whether it ended won."""
        return bool(self.seen) and bool(self.seen[-1].get("won"))

    @property
    def invalid(self) -> int:
        """Actions that were not well formed, or not possible."""
        valid = [bool(moment.get("valid")) for moment in self.seen[1:]]
        return sum(not (a and b) for a, b in zip(self.well_formed, valid, strict=False))


async def play_policy(
    game: CheckedEnvironment,
    pool: EnvironmentPool,
    name: str,
    make: Callable[[Beginning], Policy],
    number: int,
) -> Play:
    """Let a policy play task ``number`` to its end, or for ``max_steps`` actions."""
    task, seed = game.tasks[number]
    play = Play(name, task, seed)
    rng = random.Random(derive_seed("check", name, task["task_id"], seed))
    try:
        # A session each: after a play that broke it, the pool has another process ready.
        async with pool.session() as session:
            observation = await session.reset(task, seed)
            play.seen.append(_seen(observation))
            package = game.package.for_task(task)
            policy = make(Beginning(game.settings, task, observation, rng))
            for _ in range(game.max_steps):
                text = policy(observation)
                known = isinstance(text, Said)
                action, well_formed = (text.action, True) if known else package.project(text)
                play.actions.append(action)
                play.well_formed.append(well_formed)
                observation, done = await _step(play, session, action)
                if done:
                    break
    except EnvFailure as failure:
        play.broken = str(failure)
    return play


async def play_again(pool: EnvironmentPool, old: Play) -> Play:
    """The same task, seed and actions once more."""
    play = Play(old.policy, old.task, old.seed)
    try:
        async with pool.session() as session:
            play.seen.append(_seen(await session.reset(old.task, old.seed)))
            for action in old.actions:
                _, done = await _step(play, session, action)
                if done:
                    break
    except EnvFailure as failure:
        play.broken = str(failure)
    return play


async def _step(play: Play, session: PoolSession, action: str) -> tuple[Observation, bool]:
    observation, reward, done, info = await session.step(action)
    play.seen.append(
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
    """``value`` with lists in place of arrays, which do not compare as a whole."""
    if isinstance(value, dict):
        return {key: _plain(one) for key, one in value.items()}
    return value.tolist() if isinstance(value, np.ndarray) else value
