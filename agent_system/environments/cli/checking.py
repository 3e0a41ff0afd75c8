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
    checked = CheckedEnvironment(
        name, package, settings, panel[:count], steps, count >= len(listed)
    )
    wide = replace(checked, tasks=panel, all_tasks=len(panel) == len(listed))
    if not checked.tasks:
        return Findings(name, [], [f"there are no {split} tasks"], [])
    return asyncio.run(_checked(checked, wide))


async def _checked(checked: CheckedEnvironment, wide: CheckedEnvironment) -> Findings:
    env = checked.package.make(checked.settings)
    try:
        with within_limits(f"the gold_path of {checked.name}"):
            oracle_factory = oracle(
                checked.package.expert, env, [one for one, _ in checked.tasks], checked.settings
            )
    finally:
        env.close()
    policies = {**({ORACLE: oracle_factory} if oracle_factory else {}), **BLIND}
    episodes: list[Play] = []
    async with _started(checked.pool()) as pool:
        for name, make in policies.items():
            for number in range(len(checked.tasks)):
                episodes.append(await play_policy(checked, pool, name, make, number))
        episodes += await _injected(checked, pool)
        # Single-turn episodes are cheap, so constants are tried on more tasks.
        tried = wide if all(len(episode.actions) <= 1 for episode in episodes) else checked
        constant, left_open = await try_constants(tried, pool, episodes)
    # Repeat in another order: an episode must not depend on the episodes before it.
    # For each policy the first episodes are enough.
    to_repeat = [
        one for name in (*policies, INJECTING) for one in _of(episodes, name)[: len(checked.tasks)]
    ]
    reversed_episodes = [episode for episode in reversed(to_repeat) if not episode.broken]
    async with _started(checked.pool()) as pool:
        repeated = [(episode, await play_again(pool, episode)) for episode in reversed_episodes]
    formats, unknown_formats = format_problems(checked.package, _of(episodes, ORACLE))
    problems = [
        *judged(episodes, checked.all_tasks),
        *_constant_problem(constant, tried.all_tasks),
        *formats,
        *differences(repeated[::-1]),
    ]
    left_open += [
        *unknown_formats,
        *_wandering(episodes, checked.all_tasks),
        *_never_valid(episodes),
        *([] if oracle_factory else [NO_ORACLE]),
    ]
    return Findings(checked.name, episodes, problems, left_open, constant)


async def _injected(checked: CheckedEnvironment, pool: EnvironmentPool) -> list[Play]:
    """Run the injecting policy on every task, and then until every injection was used."""
    injecting = Injecting(checked.package)
    episodes: list[Play] = []
    while len(episodes) < len(checked.tasks) or injecting.left > 0:
        number = len(episodes) % len(checked.tasks)
        left = injecting.left
        episodes.append(await play_policy(checked, pool, INJECTING, injecting, number))
        if len(episodes) >= len(checked.tasks) and injecting.left == left:
            break  # the environment failed before the first action
    return episodes


def _wins_most(episodes: list[Play], all_tasks: bool) -> bool:
    return is_most(_count_successes(episodes), len(episodes), all_tasks)


def _count_successes(episodes: list[Play]) -> int:
    return sum(episode.won for episode in episodes)


def _wanders(episodes: list[Play], policy_episodes: list[Play]) -> bool:
    """Return True if the episodes are far longer than the oracle's.

    In a small environment, random actions reach the goal if an episode is long enough.
    """
    known = _of(episodes, ORACLE)
    return bool(known) and _length(policy_episodes) > WANDERS * _length(known)


def _length(episodes: list[Play]) -> float:
    return statistics.mean(len(episode.actions) for episode in episodes)


def _wandering(episodes: list[Play], all_tasks: bool) -> list[str]:
    return [
        f"{policy} succeeds at {_count_successes(policy_episodes)} of {len(policy_episodes)} "
        f"tasks, in {_length(policy_episodes):.1f} actions; the oracle needs "
        f"{_length(_of(episodes, ORACLE)):.1f}; "
        "repeat the check with fewer --steps (env.max_steps of a run) to see whether it only "
        "succeeds because episodes are long"
        for policy in MUST_NOT_WIN_MOST
        if _wins_most(policy_episodes := _of(episodes, policy), all_tasks)
        and _wanders(episodes, policy_episodes)
    ]


def _constant_problem(constant: Constant | None, all_tasks: bool) -> list[str]:
    if constant is None or not is_most(constant.successes, constant.plays, all_tasks):
        return []
    return [
        f"the constant {constant.action!r} succeeds at {constant.successes} of {constant.plays} "
        "tasks: a policy that ignores the observations is rewarded"
    ]


def _never_valid(episodes: list[Play]) -> list[str]:
    """Return a remark if at least 90% of the random policy's actions were invalid."""
    random = _of(episodes, "random")
    actions = sum(len(episode.actions) for episode in random)
    # Up to one in ten may be valid by chance.
    if not actions or sum(episode.invalid for episode in random) < 0.9 * actions:
        return []
    return [
        f"nearly all of the {actions} actions of random were invalid, so its result says little; "
        "fix: list the valid actions in info['admissible_actions'] of observations"
    ]


def _of(episodes: Sequence[Play], policy: str) -> list[Play]:
    return [episode for episode in episodes if episode.policy == policy]


@contextlib.asynccontextmanager
async def _started(pool: EnvironmentPool) -> AsyncIterator[EnvironmentPool]:
    await pool.start()
    try:
        yield pool
    finally:
        await pool.close()


def judged(episodes: list[Play], all_tasks: bool = False) -> list[str]:
    """Return one sentence per policy whose result violates its condition.

    ``all_tasks`` says that the episodes cover all tasks of the environment.
    """
    problems = [
        f"{episode.policy} made the environment fail on {episode.task['task_id']} after "
        f"{len(episode.seen)} observations: {episode.broken}"
        for episode in episodes
        if episode.broken
    ]
    for episode in episodes:
        if episode.policy == ORACLE and not episode.won and not episode.broken:
            problems.append(
                f"oracle did not solve {episode.task['task_id']}: {len(episode.actions)} actions, "
                f"the last {episode.actions[-1:]}, return {episode.earned:g}"
            )
        if episode.policy in MUST_NOT_WIN and episode.won:
            problems.append(
                f"{episode.policy} solved {episode.task['task_id']} with "
                f"{_shortened(episode.actions[-1])}, return {episode.earned:g}"
            )
    for policy in MUST_NOT_WIN_MOST:
        policy_episodes = _of(episodes, policy)
        if _wins_most(policy_episodes, all_tasks) and not _wanders(episodes, policy_episodes):
            problems.append(
                f"{policy} succeeds at {_count_successes(policy_episodes)} of "
                f"{len(policy_episodes)} tasks: a policy that ignores the observations is "
                "rewarded; fix: harder tasks, or fewer steps"
            )
    best, nothing = _mean(episodes, ORACLE), _mean(episodes, "empty")
    if best is not None and nothing is not None and nothing >= best:
        problems.append(
            f"the mean return of empty is {nothing:g}, that of oracle {best:g}: solving tasks is "
            "not rewarded"
        )
    return problems


def differences(pairs: list[tuple[Play, Play]]) -> list[str]:
    """Return one sentence per episode whose repetition in another process differs from it."""
    sentences = []
    for episode, other in pairs:
        difference = _parting(episode, other)
        if difference:
            sentences.append(
                f"the same actions of {episode.policy} on {episode.task['task_id']} "
                f"(seed {episode.seed}) gave another transcript in another process: {difference}"
            )
    return sentences


def _shortened(action: str) -> str:
    cut = f" ... ({len(action)} characters)" if len(action) > 2 * NEAR else ""
    return f"{action[: 2 * NEAR]!r}{cut}"


def _parting(episode: Play, other: Play) -> str:
    if other.broken:
        return f"the environment failed there: {other.broken}"
    for number, (here, there) in enumerate(zip(episode.seen, other.seen, strict=False)):
        for key, value in here.items():
            if value != there[key]:
                return f"after action {number}, {key} is {_beside(str(value), str(there[key]))}"
    if len(episode.seen) != len(other.seen):
        return f"{len(episode.actions)} actions here, {len(other.seen) - 1} there"
    return ""


def _beside(one: str, other: str) -> str:
    """Return the parts of both texts around their first difference."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), 0)
    start = max(0, same - NEAR)
    return f"...{one[start : same + NEAR]!r} and ...{other[start : same + NEAR]!r}"


def _mean(episodes: list[Play], policy: str) -> float | None:
    returns = [
        episode.earned for episode in episodes if episode.policy == policy and not episode.broken
    ]
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
    for policy in dict.fromkeys(episode.policy for episode in findings.plays):
        episodes = [episode for episode in findings.plays if episode.policy == policy]
        returns = [episode.earned for episode in episodes]
        actions = sum(len(episode.actions) for episode in episodes)
        table.add_row(
            policy,
            str(len(episodes)),
            str(_count_successes(episodes)),
            f"{statistics.mean(returns):.3f}",
            f"{min(returns):.3f}",
            f"{max(returns):.3f}",
            f"{actions / len(episodes):.1f}",
            f"{sum(episode.invalid for episode in episodes) / max(1, actions):.0%}",
            str(sum(bool(episode.broken) for episode in episodes)),
        )
    return table


def is_most(successes: int, episodes: int, all_tasks: bool) -> bool:
    """Return True if more than half of all tasks are solved.

    If the episodes cover only some tasks, the lower bound of the Wilson interval must exceed one
    half. This holds from 7 of 8, or 22 of 32.
    """
    if all_tasks or not episodes:
        return 2 * successes > episodes
    share = successes / episodes
    centre = share + WILSON_SE**2 / (2 * episodes)
    half = WILSON_SE * math.sqrt(share * (1 - share) / episodes + WILSON_SE**2 / (4 * episodes**2))
    return (centre - half) / (1 + WILSON_SE**2 / episodes) > 0.5
