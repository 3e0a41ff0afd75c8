"""Constant actions: a policy that repeats one of them must not succeed at most tasks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.cli.plays import CheckedEnvironment, Play, play_policy
from agent_system.environments.cli.policies import constants, said
from agent_system.environments.env import Observation
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool

SECONDS = 60.0  # time limit for all constants together


@dataclass(frozen=True, slots=True)
class Constant:
    """Result of an action that was repeated in every turn: episodes, and successes among them."""

    action: str
    plays: int
    successes: int


async def try_constants(
    checked: CheckedEnvironment, pool: EnvironmentPool, episodes: Sequence[Play]
) -> tuple[Constant | None, list[str]]:
    """Run frequent actions as constants.

    ``episodes`` are those of other policies; their actions and observations determine which actions
    are frequent. Return the constant that succeeded most often, and a sentence if the time was too
    short for all of them.
    """
    oracle_episodes = [episode for episode in episodes if episode.policy == "oracle"]
    first = [
        Observation(episode.seen[0]["text"], info=episode.seen[0]["info"])
        for episode in episodes
        if episode.seen
    ]
    oracle_actions = [action for episode in oracle_episodes for action in episode.actions]
    candidates = constants(oracle_actions, first)
    best: Constant | None = None
    ends = time.monotonic() + SECONDS
    for number, action in enumerate(candidates):
        if time.monotonic() > ends:
            left = len(candidates) - number
            return best, [
                f"{left} of {len(candidates)} constants were not tried within {SECONDS:g} s"
            ]
        result = await _played(checked, pool, action)
        if best is None or result.successes > best.successes:
            best = result
    return best, []


async def _played(checked: CheckedEnvironment, pool: EnvironmentPool, action: str) -> Constant:
    """Repeat ``action`` in every task. Stop when it cannot succeed at most tasks any more."""
    successes = 0
    for number in range(len(checked.tasks)):
        episode = await play_policy(
            checked, pool, "constant", lambda _begin: lambda _observation: said(action), number
        )
        successes += episode.won
        if 2 * (number + 1 - successes) >= len(checked.tasks):
            return Constant(action, number + 1, successes)
    return Constant(action, len(checked.tasks), successes)


def format_problems(
    package: EnvPackage[Any], episodes: Sequence[Play]
) -> tuple[list[str], list[str]]:
    """Check that ``project`` reads the actions of the oracle from texts that contain them.

    Return problems, and a sentence if the check is impossible because the package has no
    ``format_action``.
    """
    for episode in episodes:
        part = package.for_task(episode.task)
        for action in dict.fromkeys(episode.actions):
            text = str(said(action)) if part.format_action is None else part.format_action(action)
            read = part.project(text)
            if read == (action, True):
                continue
            sentence = f"project({text!r}) is {read!r}, not {(action, True)!r}"
            if part.format_action is not None:
                return [f"{sentence}: a policy cannot write the action of the oracle"], []
            return [], [
                f"{sentence}: the format of answers is unknown; fix: set format_action of the "
                "package, a function from an action to the text in which a model writes it"
            ]
    return [], []
