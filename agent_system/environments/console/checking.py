"""Can the rewards of an environment be believed? What a check plays, and what it found.

    oracle      who knows how to win      must win every task, where there is one
    random      possible actions          shown
    empty       says nothing              must not win
    repeating   one action for ever       shown
    injecting   tags, tokens, orders      must not win

No policy may break the environment; doing nothing may not earn what the oracle earns; and the same
task, seed and actions give the same transcript in another process, played in another order.
"""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.table import Table

from agent_system.environments.console.names import meant
from agent_system.environments.console.plays import Game, Play, play_again, play_policy
from agent_system.environments.console.policies import BLIND, oracle
from agent_system.environments.env_registry import (
    NamedChoice,
    env_settings,
    get_package,
    missing_extra,
)
from agent_system.environments.pool import EnvironmentPool
from agent_system.environments.tasks import panel_of

ORACLE = "oracle"
MUST_NOT_WIN = ("empty", "injecting")
NEAR = 40  # characters shown on either side of where two transcripts part


@dataclass(frozen=True, slots=True)
class Findings:
    """What was played, what is wrong (a sentence each), and what could not be checked."""

    name: str
    plays: list[Play]
    wrong: list[str]
    left_open: list[str]


def check(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    split: str = "val",
    tasks: int = 8,
    steps: int = 50,
) -> Findings:
    """Play ``tasks`` tasks of ``split`` with every policy, ``steps`` actions long at most.

    Raises ``UnknownEnvironment``, ``MissingExtra``, ``ConfigError`` for ``kwargs`` that the
    environment does not know, ``WorkerStartError`` where its process does not start.
    """
    name = meant(name)
    settings = env_settings(NamedChoice(name, kwargs or {}, steps))
    package = get_package(name)
    try:
        listed = package.tasks(settings, split)
    except ModuleNotFoundError as error:
        raise missing_extra(name, error) from error
    game = Game(name, package, settings, panel_of(listed, tasks), steps)
    if not game.tasks:
        return Findings(name, [], [f"there are no {split} tasks"], [])
    return asyncio.run(_checked(game))


async def _checked(game: Game) -> Findings:
    env = game.package.make(game.settings)
    try:
        knows = oracle(game.package.expert, env, [task for task, _ in game.tasks])
    finally:
        env.close()
    policies = {**({ORACLE: knows} if knows else {}), **BLIND}
    plays: list[Play] = []
    async with _started(game.pool()) as pool:
        for name, make in policies.items():
            for number in range(len(game.tasks)):
                plays.append(await play_policy(game, pool, name, make, number))
    # In another order: what a play leaves behind must not show in the next one.
    backwards = [play for play in reversed(plays) if not play.broken]
    async with _started(game.pool()) as pool:
        again = [(play, await play_again(pool, play)) for play in backwards]
    wrong = [*judged(plays), *differences(again[::-1])]
    left_open = [] if knows else ["nobody knows how to win it: it may be one that cannot be won"]
    return Findings(game.name, plays, wrong, left_open)


@contextlib.asynccontextmanager
async def _started(pool: EnvironmentPool) -> AsyncIterator[EnvironmentPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def judged(plays: list[Play]) -> list[str]:
    """What is wrong with what the policies earned."""
    wrong = [
        f"{play.policy} broke it on {play.task['task_id']} after {len(play.seen)} answers: "
        f"{play.broken}"
        for play in plays
        if play.broken
    ]
    for play in plays:
        if play.policy == ORACLE and not play.won and not play.broken:
            wrong.append(
                f"oracle did not win {play.task['task_id']}: {len(play.actions)} actions, "
                f"the last {play.actions[-1:]}, return {play.earned:g}"
            )
        if play.policy in MUST_NOT_WIN and play.won:
            wrong.append(
                f"{play.policy} won {play.task['task_id']} with {play.actions[-1]!r}, "
                f"return {play.earned:g}"
            )
    best, nothing = _mean(plays, ORACLE), _mean(plays, "empty")
    if best is not None and nothing is not None and nothing >= best:
        wrong.append(
            f"empty earns {nothing:g} on average, oracle {best:g}: nothing is to be gained"
        )
    return wrong


def differences(pairs: list[tuple[Play, Play]]) -> list[str]:
    """Where a play and its repetition in another process part."""
    found = []
    for play, other in pairs:
        parts = _parting(play, other)
        if parts:
            found.append(
                f"the same actions of {play.policy} on {play.task['task_id']} (seed {play.seed}) "
                f"went another way in another process: {parts}"
            )
    return found


def _parting(play: Play, other: Play) -> str:
    if other.broken:
        return f"there it broke: {other.broken}"
    for number, (here, there) in enumerate(zip(play.seen, other.seen, strict=False)):
        for key, value in here.items():
            if value != there[key]:
                return f"after action {number}, {key} is {_beside(str(value), str(there[key]))}"
    if len(play.seen) != len(other.seen):
        return f"{len(play.actions)} actions long here, {len(other.seen) - 1} there"
    return ""


def _beside(one: str, other: str) -> str:
    """Both texts around the first place where they differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, same - NEAR)
    return f"...{one[start : same + NEAR]!r} and ...{other[start : same + NEAR]!r}"


def _mean(plays: list[Play], policy: str) -> float | None:
    returns = [play.earned for play in plays if play.policy == policy and not play.broken]
    return statistics.mean(returns) if returns else None


def returns_table(findings: Findings) -> Table:
    """A line per policy: plays, won, return, length, actions that were not possible, broken."""
    table = Table(title=findings.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy")
    for title in ("plays", "won", "return", "lowest", "highest", "actions", "invalid", "broken"):
        table.add_column(title, justify="right")
    for policy in dict.fromkeys(play.policy for play in findings.plays):
        plays = [play for play in findings.plays if play.policy == policy]
        returns = [play.earned for play in plays]
        actions = sum(len(play.actions) for play in plays)
        table.add_row(
            policy,
            str(len(plays)),
            str(sum(play.won for play in plays)),
            f"{statistics.mean(returns):.3f}",
            f"{min(returns):.3f}",
            f"{max(returns):.3f}",
            f"{actions / len(plays):.1f}",
            f"{sum(play.invalid for play in plays) / max(1, actions):.0%}",
            str(sum(bool(play.broken) for play in plays)),
        )
    return table
