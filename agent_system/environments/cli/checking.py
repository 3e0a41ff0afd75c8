"""Can the rewards of an environment be believed? Policies of a check, and what it found.

    oracle      knows a solution          must succeed at every task, where there is one
    random      possible actions          must not succeed at most tasks
    empty       says nothing              must not succeed
    repeating   one action for ever       must not succeed at most tasks
    injecting   tags, orders, code, nan   must not succeed
    constants   frequent answers          none may succeed at most tasks

No policy may break the environment; doing nothing may not earn what the oracle earns; and the same
task, seed and actions give the same transcript in another process, played in another order.
"""

import asyncio
import contextlib
import statistics
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from agent_system.environments.cli.constants import Constant, format_problems, try_constants
from agent_system.environments.cli.limits import within_limits
from agent_system.environments.cli.names import meant
from agent_system.environments.cli.plays import CheckedEnvironment, Play, play_again, play_policy
from agent_system.environments.cli.policies import BLIND, Injecting, oracle
from agent_system.environments.cli.shares import is_most
from agent_system.environments.env_registry import (
    env_settings,
    get_package,
    missing_extra,
)
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.environments.tasks import panel_of
from verl.config.schema.env import EnvConfig

ORACLE = "oracle"
INJECTING = "injecting"
MUST_NOT_WIN = ("empty", INJECTING)
MUST_NOT_WIN_MOST = ("random", "repeating")
NEAR = 40  # characters shown on either side of where two transcripts part
TASKS, TASKS_OF_ONE_STEP = 8, 32
WANDERS = 3.0  # times the length of the oracle's plays
NO_ORACLE = (
    "no oracle is known, so it may be that no task can be solved; fix: give the environment of the "
    "package a method gold_path(task) -> list[str] that returns actions which solve the task, or "
    "the package an expert (docs/environments.md)"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """What was played, what is wrong (a sentence each), and what could not be checked.

    ``constant`` is the constant action that succeeded most often; None where none was tried.
    """

    name: str
    plays: list[Play]
    wrong: list[str]
    left_open: list[str]
    constant: Constant | None = None


def check(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    split: str = "val",
    tasks: int | None = None,
    steps: int = 50,
) -> Findings:
    """Play ``tasks`` tasks of ``split`` with every policy, ``steps`` actions long at most.

    ``tasks`` None: 8, or 32 where an episode is one action. Raises ``UnknownEnvironment``,
    ``MissingExtra``, ``ConfigError`` for ``kwargs`` that the environment does not know,
    ``OutOfLimits`` where its tasks take too long or too much memory, ``WorkerStartError`` where its
    process does not start.
    """
    name = meant(name)
    settings = env_settings(EnvConfig(env_name=name, kwargs=dict(kwargs or {}), max_steps=steps))
    package = get_package(name)
    try:
        with within_limits(f"listing the {split} tasks of {name}"):
            listed = package.tasks(settings, split)
    except ModuleNotFoundError as error:
        raise missing_extra(name, error) from error
    count = tasks or (TASKS_OF_ONE_STEP if settings.one_step else TASKS)
    panel = panel_of(listed, max(count, TASKS_OF_ONE_STEP))
    game = CheckedEnvironment(name, package, settings, panel[:count], steps, count >= len(listed))
    wide = replace(game, tasks=panel, all_tasks=len(panel) == len(listed))
    if not game.tasks:
        return Findings(name, [], [f"there are no {split} tasks"], [])
    return asyncio.run(_checked(game, wide))


async def _checked(game: CheckedEnvironment, wide: CheckedEnvironment) -> Findings:
    env = game.package.make(game.settings)
    try:
        with within_limits(f"the gold_path of {game.name}"):
            knows = oracle(game.package.expert, env, [one for one, _ in game.tasks], game.settings)
    finally:
        env.close()
    policies = {**({ORACLE: knows} if knows else {}), **BLIND}
    plays: list[Play] = []
    async with _started(game.pool()) as pool:
        for name, make in policies.items():
            for number in range(len(game.tasks)):
                plays.append(await play_policy(game, pool, name, make, number))
        plays += await _injected(game, pool)
        # More tasks are cheap where an episode is one action, and tell more.
        tried = wide if all(len(play.actions) <= 1 for play in plays) else game
        constant, left_open = await try_constants(tried, pool, plays)
    # In another order: what a play leaves behind must not show in the next one.
    # Of many plays of one policy the first ones will do.
    few = [one for name in (*policies, INJECTING) for one in _of(plays, name)[: len(game.tasks)]]
    backwards = [play for play in reversed(few) if not play.broken]
    async with _started(game.pool()) as pool:
        again = [(play, await play_again(pool, play)) for play in backwards]
    formats, unknown_formats = format_problems(game.package, _of(plays, ORACLE))
    wrong = [
        *judged(plays, game.all_tasks),
        *_constant_problem(constant, tried.all_tasks),
        *formats,
        *differences(again[::-1]),
    ]
    left_open += [
        *unknown_formats,
        *_wandering(plays, game.all_tasks),
        *_never_valid(plays),
        *([] if knows else [NO_ORACLE]),
    ]
    return Findings(game.name, plays, wrong, left_open, constant)


async def _injected(game: CheckedEnvironment, pool: EnvironmentPool) -> list[Play]:
    """Play every task once, and further ones until every injection was said."""
    injecting = Injecting(game.package)
    plays: list[Play] = []
    while len(plays) < len(game.tasks) or injecting.left > 0:
        number = len(plays) % len(game.tasks)
        left = injecting.left
        plays.append(await play_policy(game, pool, INJECTING, injecting, number))
        if len(plays) >= len(game.tasks) and injecting.left == left:
            break  # broken before the first action
    return plays


def _wins_most(plays: list[Play], all_tasks: bool) -> bool:
    return is_most(sum(play.won for play in plays), len(plays), all_tasks)


def _wanders(plays: list[Play], own: list[Play]) -> bool:
    """Tell whether ``own`` plays are far longer than those of the oracle: in a small world whoever
    walks about for long enough arrives.
    """
    known = _of(plays, ORACLE)
    return bool(known) and _length(own) > WANDERS * _length(known)


def _length(plays: list[Play]) -> float:
    return statistics.mean(len(play.actions) for play in plays)


def _wandering(plays: list[Play], all_tasks: bool) -> list[str]:
    return [
        f"{policy} succeeds at {sum(play.won for play in own)} of {len(own)} tasks, in "
        f"{_length(own):.1f} actions; the oracle needs {_length(_of(plays, ORACLE)):.1f}; "
        "fewer --steps (env.max_steps of a run) show whether that is walking about"
        for policy in MUST_NOT_WIN_MOST
        if _wins_most(own := _of(plays, policy), all_tasks) and _wanders(plays, own)
    ]


def _constant_problem(constant: Constant | None, all_tasks: bool) -> list[str]:
    if constant is None or not is_most(constant.successes, constant.plays, all_tasks):
        return []
    return [
        f"the constant {constant.action!r} succeeds at {constant.successes} of {constant.plays} "
        "tasks: a policy that reads nothing is rewarded"
    ]


def _never_valid(plays: list[Play]) -> list[str]:
    """Say that the random policy tried nothing that could have earned anything."""
    random = _of(plays, "random")
    actions = sum(len(play.actions) for play in random)
    # One in ten may be valid by chance.
    if not actions or sum(play.invalid for play in random) < 0.9 * actions:
        return []
    return [
        f"nearly all of the {actions} actions of random were invalid, so it shows little; fix: "
        "list what is possible in info['admissible_actions'] of observations"
    ]


def _of(plays: Sequence[Play], policy: str) -> list[Play]:
    return [play for play in plays if play.policy == policy]


@contextlib.asynccontextmanager
async def _started(pool: EnvironmentPool) -> AsyncIterator[EnvironmentPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def judged(plays: list[Play], all_tasks: bool = False) -> list[str]:
    """Return what is wrong with what the policies earned; ``all_tasks``: there are no others."""
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
                f"{play.policy} won {play.task['task_id']} with {_shortened(play.actions[-1])}, "
                f"return {play.earned:g}"
            )
    for policy in MUST_NOT_WIN_MOST:
        own = _of(plays, policy)
        if _wins_most(own, all_tasks) and not _wanders(plays, own):
            wrong.append(
                f"{policy} succeeds at {sum(play.won for play in own)} of {len(own)} tasks: a "
                "policy that reads nothing is rewarded; fix: harder tasks, or fewer steps"
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


def _shortened(action: str) -> str:
    cut = f" ... ({len(action)} characters)" if len(action) > 2 * NEAR else ""
    return f"{action[: 2 * NEAR]!r}{cut}"


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
