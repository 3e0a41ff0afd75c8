"""Check of the rewards of an environment. Each policy has a condition that must hold::

    oracle      actions of a solution      succeeds at every task (if there is an oracle)
    random      admissible actions         does not succeed at most tasks
    empty       empty text                 never succeeds
    repeating   the same action each turn  does not succeed at most tasks
    injecting   tags, orders, code, nan    never succeeds
    constants   frequent answers           none of them succeeds at most tasks

No policy may make the environment fail. The empty policy must have a lower return than the oracle.
The same task, seed and actions must give the same transcript in another process, with the episodes
in another order.
"""

import asyncio
import contextlib
import math
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
NEAR = 40  # characters shown before and after the first difference of two transcripts
TASKS, TASKS_OF_ONE_STEP = 8, 32
WILSON_SE = 2.0  # standard errors of the interval: one-sided level 97.7%
WANDERS = 3.0  # a policy wanders if its episodes are this many times longer than the oracle's
NO_ORACLE = (
    "the environment has no oracle, so it is unknown whether its tasks can be solved; fix: add to "
    "the environment a method gold_path(task) -> list[str] that returns the actions of a solution, "
    "or an expert to the package (docs/write_environment.md)"
)


@dataclass(frozen=True, slots=True)
class Findings:
    """Result of a check.

    Attributes:
        name: Name of the environment.
        episodes: All episodes of the check, except those of constant actions.
        problems: One sentence per violated condition.
        open_questions: One sentence per condition that could not be checked.
        constant: The constant action that succeeded most often; None if none was tried.
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
    """Run every policy on tasks of the environment ``name`` and check the rewards.

    Args:
        name: Name of the environment, in any case.
        kwargs: Keys of its config section.
        split: Split of the tasks.
        tasks: Number of tasks. None: 8, or 32 if episodes have one turn.
        steps: Maximum number of actions of an episode.

    Raises:
        UnknownEnvironment: The name is unknown.
        MissingExtra: A dependency is missing.
        ConfigError: The environment has no such key, or its value is invalid.
        OutOfLimits: Listing the tasks takes too much time or memory.
        WorkerStartError: The worker process does not start.
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
        # Single-turn episodes are cheap, so constants are tried on more tasks.
        tried = wide if all(len(play.actions) <= 1 for play in plays) else game
        constant, left_open = await try_constants(tried, pool, plays)
    # Repeat in another order: an episode must not depend on the episodes before it.
    # For each policy the first episodes are enough.
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
    """Run the injecting policy on every task, and then until every injection was used."""
    injecting = Injecting(game.package)
    plays: list[Play] = []
    while len(plays) < len(game.tasks) or injecting.left > 0:
        number = len(plays) % len(game.tasks)
        left = injecting.left
        plays.append(await play_policy(game, pool, INJECTING, injecting, number))
        if len(plays) >= len(game.tasks) and injecting.left == left:
            break  # the environment failed before the first action
    return plays


def _wins_most(plays: list[Play], all_tasks: bool) -> bool:
    return is_most(sum(play.won for play in plays), len(plays), all_tasks)


def _wanders(plays: list[Play], own: list[Play]) -> bool:
    """Return True if the episodes are far longer than the oracle's.

    In a small environment, random actions reach the goal if an episode is long enough.
    """
    known = _of(plays, ORACLE)
    return bool(known) and _length(own) > WANDERS * _length(known)


def _length(plays: list[Play]) -> float:
    return statistics.mean(len(play.actions) for play in plays)


def _wandering(plays: list[Play], all_tasks: bool) -> list[str]:
    return [
        f"{policy} succeeds at {sum(play.won for play in own)} of {len(own)} tasks, in "
        f"{_length(own):.1f} actions; the oracle needs {_length(_of(plays, ORACLE)):.1f}; "
        "repeat the check with fewer --steps (env.max_steps of a run) to see whether it only "
        "succeeds because episodes are long"
        for policy in MUST_NOT_WIN_MOST
        if _wins_most(own := _of(plays, policy), all_tasks) and _wanders(plays, own)
    ]


def _constant_problem(constant: Constant | None, all_tasks: bool) -> list[str]:
    if constant is None or not is_most(constant.successes, constant.plays, all_tasks):
        return []
    return [
        f"the constant {constant.action!r} succeeds at {constant.successes} of {constant.plays} "
        "tasks: a policy that ignores the observations is rewarded"
    ]


def _never_valid(plays: list[Play]) -> list[str]:
    """Return a remark if at least 90% of the random policy's actions were invalid."""
    random = _of(plays, "random")
    actions = sum(len(play.actions) for play in random)
    # Up to one in ten may be valid by chance.
    if not actions or sum(play.invalid for play in random) < 0.9 * actions:
        return []
    return [
        f"nearly all of the {actions} actions of random were invalid, so its result says little; "
        "fix: list the valid actions in info['admissible_actions'] of observations"
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
    """Return one sentence per policy whose result violates its condition.

    ``all_tasks`` says that the episodes cover all tasks of the environment.
    """
    wrong = [
        f"{play.policy} made the environment fail on {play.task['task_id']} after "
        f"{len(play.seen)} observations: {play.broken}"
        for play in plays
        if play.broken
    ]
    for play in plays:
        if play.policy == ORACLE and not play.won and not play.broken:
            wrong.append(
                f"oracle did not solve {play.task['task_id']}: {len(play.actions)} actions, "
                f"the last {play.actions[-1:]}, return {play.earned:g}"
            )
        if play.policy in MUST_NOT_WIN and play.won:
            wrong.append(
                f"{play.policy} solved {play.task['task_id']} with {_shortened(play.actions[-1])}, "
                f"return {play.earned:g}"
            )
    for policy in MUST_NOT_WIN_MOST:
        own = _of(plays, policy)
        if _wins_most(own, all_tasks) and not _wanders(plays, own):
            wrong.append(
                f"{policy} succeeds at {sum(play.won for play in own)} of {len(own)} tasks: a "
                "policy that ignores the observations is rewarded; fix: harder tasks, or fewer "
                "steps"
            )
    best, nothing = _mean(plays, ORACLE), _mean(plays, "empty")
    if best is not None and nothing is not None and nothing >= best:
        wrong.append(
            f"the mean return of empty is {nothing:g}, that of oracle {best:g}: solving tasks is "
            "not rewarded"
        )
    return wrong


def differences(pairs: list[tuple[Play, Play]]) -> list[str]:
    """Return one sentence per episode whose repetition in another process differs from it."""
    sentences = []
    for play, other in pairs:
        difference = _parting(play, other)
        if difference:
            sentences.append(
                f"the same actions of {play.policy} on {play.task['task_id']} (seed {play.seed}) "
                f"gave another transcript in another process: {difference}"
            )
    return sentences


def _shortened(action: str) -> str:
    cut = f" ... ({len(action)} characters)" if len(action) > 2 * NEAR else ""
    return f"{action[: 2 * NEAR]!r}{cut}"


def _parting(play: Play, other: Play) -> str:
    if other.broken:
        return f"the environment failed there: {other.broken}"
    for number, (here, there) in enumerate(zip(play.seen, other.seen, strict=False)):
        for key, value in here.items():
            if value != there[key]:
                return f"after action {number}, {key} is {_beside(str(value), str(there[key]))}"
    if len(play.seen) != len(other.seen):
        return f"{len(play.actions)} actions here, {len(other.seen) - 1} there"
    return ""


def _beside(one: str, other: str) -> str:
    """Return the parts of both texts around their first difference."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, same - NEAR)
    return f"...{one[start : same + NEAR]!r} and ...{other[start : same + NEAR]!r}"


def _mean(plays: list[Play], policy: str) -> float | None:
    returns = [play.earned for play in plays if play.policy == policy and not play.broken]
    return statistics.mean(returns) if returns else None


def returns_table(findings: Findings) -> Table:
    """Return a table of the results, with one row per policy.

    The columns are the number of episodes, successes, mean, lowest and highest return, mean number
    of actions, share of invalid actions, and failed episodes.
    """
    table = Table(title=findings.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy")
    titles = ("episodes", "success", "return", "lowest", "highest", "actions", "invalid", "failed")
    for title in titles:
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


def is_most(successes: int, plays: int, all_tasks: bool) -> bool:
    """Return True if more than half of all tasks are solved.

    If the episodes cover only some tasks, the lower bound of the Wilson interval must exceed one
    half. This holds from 7 of 8, or 22 of 32.
    """
    if all_tasks or not plays:
        return 2 * successes > plays
    share = successes / plays
    centre = share + WILSON_SE**2 / (2 * plays)
    half = WILSON_SE * math.sqrt(share * (1 - share) / plays + WILSON_SE**2 / (4 * plays**2))
    return (centre - half) / (1 + WILSON_SE**2 / plays) > 0.5
