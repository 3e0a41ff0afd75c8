"""Constant actions: a policy that says one of them in every turn must not succeed at most tasks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.cli.plays import CheckedEnvironment, Play, play_policy
from agent_system.environments.cli.policies import constants, said
from agent_system.environments.env import Observation
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool

SECONDS = 60.0  # for all constants together


@dataclass(frozen=True, slots=True)
class Constant:
    """An action, how many tasks it was played at, and how many of these it succeeded at."""

    action: str
    plays: int
    successes: int


async def try_constants(
    game: CheckedEnvironment, pool: EnvironmentPool, plays: Sequence[Play]
) -> tuple[Constant | None, list[str]]:
    """Play frequent actions as constants; return the one that succeeded most often, and what could
    not be tried. ``plays`` are those of other policies, which tell what is frequent.
    """
    own = [play for play in plays if play.policy == "oracle"]
    first = [
        Observation(play.seen[0]["text"], info=play.seen[0]["info"]) for play in plays if play.seen
    ]
    candidates = constants([action for play in own for action in play.actions], first)
    best: Constant | None = None
    ends = time.monotonic() + SECONDS
    for number, action in enumerate(candidates):
        if time.monotonic() > ends:
            left = len(candidates) - number
            return best, [f"{left} of {len(candidates)} constants were not tried: no time was left"]
        found = await _played(game, pool, action)
        if best is None or found.successes > best.successes:
            best = found
    return best, []


async def _played(game: CheckedEnvironment, pool: EnvironmentPool, action: str) -> Constant:
    """Play ``action`` at every task, or until it can no longer succeed at most of them."""
    successes = 0
    for number in range(len(game.tasks)):
        play = await play_policy(
            game, pool, "constant", lambda _begin: lambda _observation: said(action), number
        )
        successes += play.won
        if 2 * (number + 1 - successes) >= len(game.tasks):
            return Constant(action, number + 1, successes)
    return Constant(action, len(game.tasks), successes)


def format_problems(package: EnvPackage[Any], plays: Sequence[Play]) -> tuple[list[str], list[str]]:
    """Compare actions of the oracle with what ``project`` reads of a text that holds them.

    Returns what is wrong, and what could not be checked because the package has no
    ``format_action``.
    """
    for play in plays:
        own = package.for_task(play.task)
        for action in dict.fromkeys(play.actions):
            text = str(said(action)) if own.format_action is None else own.format_action(action)
            read = own.project(text)
            if read == (action, True):
                continue
            sentence = f"project({text!r}) is {read!r}, not {(action, True)!r}"
            if own.format_action is not None:
                return [f"{sentence}: a policy cannot say what the oracle does"], []
            return [], [
                f"{sentence}: the format of answers is not known; fix: give the package "
                "format_action, a function from an action to the text in which a model writes it"
            ]
    return [], []
