"""Check of the rewards of an environment by scripted policies. Each policy has a condition::

    oracle      actions of a solution      succeeds at every task (if there is an oracle)
    random      admissible actions         solves at most half of the tasks
    empty       empty text                 never succeeds
    repeating   the same action each turn  solves at most half of the tasks
    injecting   texts to deceive a grader  never succeeds
    constant    one frequent action        solves at most half of the tasks

Several policies of the kind ``constant`` are run, each with another action. If only a sample of the
tasks is run, ``is_majority_solved`` decides if a policy solves more than half of all tasks. No
policy may make the environment fail. The empty policy must have a lower return than the oracle. The
same task, seed and actions must give the same transcript in another process, with the episodes in
another order.
"""

import asyncio
import math
import statistics
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from rich.table import Table

from agent_system.environments.cli.check_episodes import (
    SUCCESS_KEY,
    CheckedEnvironment,
    ConstantActionResult,
    ScriptedEpisode,
    check_action_format,
    repeat_episode,
    run_policy,
    try_constant_actions,
)
from agent_system.environments.cli.limits import TimeOrMemoryLimitError, limit_time_and_memory
from agent_system.environments.cli.names import resolve_name
from agent_system.environments.cli.policies import (
    POLICIES_WITHOUT_ORACLE,
    InjectionPolicy,
    PolicyFactory,
    find_oracle,
)
from agent_system.environments.env import Env
from agent_system.environments.env_registry import get_package, read_env_settings
from agent_system.environments.manager import load_tasks
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.environments.tasks import select_validation_set
from verl.config.schema.env import EnvConfig
from verl.config.settings.errors import names_fix
from verl.utils.limits import USER_CODE_ERRORS, describe_error, describe_raised_error

ORACLE_POLICY = "oracle"
INJECTING_POLICY = "injecting"
POLICIES_THAT_MUST_NOT_SUCCEED = ("empty", INJECTING_POLICY)
POLICIES_THAT_MUST_NOT_SOLVE_MOST = ("random", "repeating")
CONTEXT_CHARS = 40  # characters shown before and after the first difference of two transcripts
# Number of tasks that a check uses by default. Episodes of one turn are short, so it uses more.
DEFAULT_TASKS, DEFAULT_SINGLE_TURN_TASKS = 8, 32
# By chance, a value is 2 standard deviations above its mean with a probability of 2.3%.
MAJORITY_STANDARD_DEVIATIONS = 2.0
# Above this multiple of the oracle's mean number of actions, a success is attributed to chance.
MAX_LENGTH_RATIO_TO_ORACLE = 3.0
NO_ORACLE_MESSAGE = (
    "the environment has no oracle, so it is unknown whether its tasks can be solved; fix: add to "
    "the environment a method gold_path(task) -> list[str] that returns the actions of a solution, "
    "or an expert to the package (docs/write_environment.md)"
)


@dataclass(frozen=True, slots=True)
class CheckFindings:
    """Result of a check, with one sentence per violated condition or open question.

    ``episodes`` are those of all policies, without those of constant actions. ``constant`` is the
    constant action that succeeded most often; None if none was tried.
    """

    name: str
    episodes: list[ScriptedEpisode]
    problems: list[str]
    open_questions: list[str]
    constant: ConstantActionResult | None = None


def check_environment(
    name: str,
    kwargs: Mapping[str, Any] | None = None,
    split: str = "val",
    num_tasks: int | None = None,
    max_steps: int = 50,
) -> CheckFindings:
    """Run every policy on tasks of the environment ``name`` and check the rewards.

    ``kwargs`` are keys of its config section. ``num_tasks`` is by default 8, or 32 if episodes
    have one turn. An episode has at most ``max_steps`` actions.

    Raises:
        WorkerStartError: The environment cannot be started.
        TimeOrMemoryLimitError: Listing the tasks takes too much time or memory.
        UnknownEnvironmentError, ConfigError: The name is unknown, or a key is invalid.
        MissingExtraError, InvalidPackageError: A library is missing, or the environment's module
            fails.
    """
    name = resolve_name(name)
    settings = read_env_settings(
        EnvConfig(env_name=name, kwargs=dict(kwargs or {}), max_steps=max_steps)
    )
    package = get_package(name)
    with limit_time_and_memory(name, f"listing the {split} tasks of {name}"):
        split_tasks = load_tasks(name, package, settings, split)
    num_tasks = num_tasks or (
        DEFAULT_SINGLE_TURN_TASKS if settings.is_single_turn else DEFAULT_TASKS
    )
    selected_tasks = select_validation_set(split_tasks, max(num_tasks, DEFAULT_SINGLE_TURN_TASKS))
    checked_env = CheckedEnvironment(
        name,
        package,
        settings,
        selected_tasks[:num_tasks],
        max_steps,
        num_tasks >= len(split_tasks),
    )
    env_with_more_tasks = replace(
        checked_env, tasks=selected_tasks, covers_all_tasks=len(selected_tasks) == len(split_tasks)
    )
    if not checked_env.tasks:
        return CheckFindings(name, [], [f"there are no {split} tasks"], [])
    # Find the oracle outside of the event loop: ``gold_path`` may be a coroutine.
    oracle, oracle_open_questions, oracle_problems = _find_oracle_in_time(checked_env)
    findings = asyncio.run(_collect_findings(checked_env, env_with_more_tasks, oracle))
    return replace(
        findings,
        problems=oracle_problems + findings.problems,
        open_questions=findings.open_questions + oracle_open_questions,
    )


async def _collect_findings(
    checked_env: CheckedEnvironment,
    env_with_more_tasks: CheckedEnvironment,
    oracle: PolicyFactory | None,
) -> CheckFindings:
    policies = POLICIES_WITHOUT_ORACLE
    if oracle is not None:
        policies = {ORACLE_POLICY: oracle, **policies}
    async with checked_env.create_pool() as pool:
        episodes = await _run_policies(checked_env, pool, policies)
        if episodes[-1].has_hung:
            return CheckFindings(checked_env.name, episodes, _describe_failures(episodes), [])
        # Single-turn episodes are cheap, so constant actions are tried on more tasks.
        is_single_turn = all(len(episode.actions) <= 1 for episode in episodes)
        constant_actions_env = env_with_more_tasks if is_single_turn else checked_env
        constant_action, open_questions = await try_constant_actions(
            constant_actions_env, pool, episodes
        )
    # Repeat the first episodes of each policy in another order: an episode must not depend on the
    # episodes before it.
    first_episodes = [
        episode
        for name in (*policies, INJECTING_POLICY)
        for episode in _select_episodes(episodes, name)[: len(checked_env.tasks)]
    ]
    # Add episodes of the best constant action: the random policy may know no valid move of a game.
    if constant_action is not None:
        first_episodes += constant_action.constant_episodes[: len(checked_env.tasks)]
    reversed_episodes = [episode for episode in first_episodes[::-1] if not episode.failure]
    async with checked_env.create_pool() as pool:
        repetition_pairs = [
            (episode, await repeat_episode(pool, episode)) for episode in reversed_episodes
        ]
    format_problems, format_open_questions = check_action_format(
        checked_env.package, _select_episodes(episodes, ORACLE_POLICY)
    )
    problems = [
        *find_reward_problems(episodes, checked_env.covers_all_tasks),
        *_find_constant_action_problem(constant_action, constant_actions_env.covers_all_tasks),
        *format_problems,
        *find_transcript_differences(repetition_pairs[::-1]),
    ]
    open_questions += [
        *format_open_questions,
        *_describe_policies_that_solve_most(episodes, checked_env.covers_all_tasks)[1],
        *_describe_invalid_actions(episodes),
    ]
    return CheckFindings(checked_env.name, episodes, problems, open_questions, constant_action)


async def _run_policies(
    checked_env: CheckedEnvironment, pool: EnvironmentPool, policies: Mapping[str, PolicyFactory]
) -> list[ScriptedEpisode]:
    """Run ``policies`` and the injecting policy. Stop when a call of the environment hangs."""
    episodes: list[ScriptedEpisode] = []
    for name, make_policy in policies.items():
        for task_index in range(len(checked_env.tasks)):
            episodes.append(await run_policy(checked_env, pool, name, make_policy, task_index))
            if episodes[-1].has_hung:
                return episodes
    return episodes + await _run_injection_policy(checked_env, pool)


def _find_oracle_in_time(
    checked_env: CheckedEnvironment,
) -> tuple[PolicyFactory | None, list[str], list[str]]:
    """Search for the oracle in a new environment, with limited time and memory.

    Return the oracle, the reason if there is none, and problems of closing the environment.
    """
    package, settings = checked_env.package, checked_env.settings
    tasks = [task for task, _ in checked_env.tasks]
    try:
        env = package.make(settings)
    except USER_CODE_ERRORS as error:  # boundary to user code
        if isinstance(error, ModuleNotFoundError) or names_fix(describe_error(error, str)):
            raise  # the caller reports the extra to install, or the message names the setting
        raise ValueError(
            f"make(settings) of {checked_env.name} raised {describe_raised_error(error)}; allowed: "
            "a function that returns an environment; fix: correct it"
        ) from error
    oracle, reason = None, NO_ORACLE_MESSAGE
    problems: list[str] = []
    try:
        with limit_time_and_memory(checked_env.name, f"the gold_path of {checked_env.name}"):
            oracle = find_oracle(package.expert, env, tasks, settings)
    except TimeOrMemoryLimitError as error:
        reason = f"the tasks were not solved by an oracle: {error}"
    finally:
        problems += _close_env(env)
    return oracle, [] if oracle else [reason], problems


def _close_env(env: Env) -> list[str]:
    try:
        env.close()
    except USER_CODE_ERRORS as error:  # boundary to the environment
        return [
            f"close() of the environment raised {describe_raised_error(error)}; "
            "fix: make it succeed at any time, also before the first reset"
        ]
    return []


async def _run_injection_policy(
    checked_env: CheckedEnvironment, pool: EnvironmentPool
) -> list[ScriptedEpisode]:
    """Run the policy that sends ``INJECTIONS`` on every task.

    Repeat tasks until every text was used. Stop when a call of the environment hangs.
    """
    policy = InjectionPolicy(checked_env.package)
    num_tasks = len(checked_env.tasks)
    episodes: list[ScriptedEpisode] = []
    while len(episodes) < num_tasks or policy.num_unused > 0:
        num_unused_before = policy.num_unused
        task_index = len(episodes) % num_tasks
        episodes.append(await run_policy(checked_env, pool, INJECTING_POLICY, policy, task_index))
        failed_before_first_action = policy.num_unused == num_unused_before
        if episodes[-1].has_hung or (len(episodes) >= num_tasks and failed_before_first_action):
            break
    return episodes


def _count_successes(episodes: list[ScriptedEpisode]) -> int:
    return sum(episode.is_success for episode in episodes)


def _describe_policies_that_solve_most(
    episodes: list[ScriptedEpisode], covers_all_tasks: bool
) -> tuple[list[str], list[str]]:
    """Return (problems, open questions) of policies that wrongly solve over half of the tasks.

    Episodes that are far longer than the oracle's are an open question: they may succeed by chance.
    """
    problems: list[str] = []
    open_questions: list[str] = []
    oracle_lengths = [len(e.actions) for e in _select_episodes(episodes, ORACLE_POLICY)]
    mean_oracle_length = statistics.mean(oracle_lengths) if oracle_lengths else math.inf
    for policy in POLICIES_THAT_MUST_NOT_SOLVE_MOST:
        policy_episodes = _select_episodes(episodes, policy)
        num_successes = _count_successes(policy_episodes)
        if not is_majority_solved(num_successes, len(policy_episodes), covers_all_tasks):
            continue
        result_text = f"{policy} succeeds at {num_successes} of {len(policy_episodes)} tasks"
        mean_length = statistics.mean(len(episode.actions) for episode in policy_episodes)
        if mean_length > MAX_LENGTH_RATIO_TO_ORACLE * mean_oracle_length:
            open_questions.append(
                f"{result_text}, in {mean_length:.1f} actions; the oracle needs "
                f"{mean_oracle_length:.1f}; "
                "repeat the check with fewer --steps (env.max_steps of a run) to see whether it "
                "only succeeds because episodes are long"
            )
        else:
            problems.append(
                f"{result_text}: a policy that ignores the observations is rewarded; fix: harder "
                "tasks, or fewer steps"
            )
    return problems, open_questions


def _find_constant_action_problem(
    constant: ConstantActionResult | None, covers_all_tasks: bool
) -> list[str]:
    if constant is None or not is_majority_solved(
        constant.num_successes, constant.num_episodes, covers_all_tasks
    ):
        return []
    return [
        f"the constant {constant.action!r} succeeds at {constant.num_successes} of "
        f"{constant.num_episodes} tasks: a policy that ignores the observations is rewarded"
    ]


def _describe_invalid_actions(episodes: list[ScriptedEpisode]) -> list[str]:
    """Return a remark if at least 90% of the random policy's actions were invalid."""
    random_episodes = _select_episodes(episodes, "random")
    num_actions = sum(len(episode.actions) for episode in random_episodes)
    num_invalid = sum(episode.num_invalid_actions for episode in random_episodes)
    # A share of up to 10% valid actions may be chance.
    if not num_actions or num_invalid < 0.9 * num_actions:
        return []
    return [
        f"nearly all of the {num_actions} actions of random were invalid, so its result says "
        "little; fix: list the valid actions in info['admissible_actions'] of observations"
    ]


def _select_episodes(episodes: Sequence[ScriptedEpisode], policy: str) -> list[ScriptedEpisode]:
    return [episode for episode in episodes if episode.policy == policy]


def find_reward_problems(
    episodes: list[ScriptedEpisode], covers_all_tasks: bool = False
) -> list[str]:
    """Return one sentence per failure of the environment and per wrong result of a policy.

    A result is wrong, for example, if the oracle fails or the policy of empty texts succeeds.
    ``covers_all_tasks`` is True if the episodes cover all tasks of the split.
    """
    problems = _describe_failures(episodes)
    for episode in episodes:
        if episode.policy == ORACLE_POLICY and not episode.is_success and not episode.failure:
            problems.append(
                f"oracle did not solve {episode.task['task_id']}: {len(episode.actions)} actions, "
                f"the last {episode.actions[-1:]}, return {episode.total_reward:g}"
                f"{_describe_missing_success(episode)}"
            )
        if episode.policy in POLICIES_THAT_MUST_NOT_SUCCEED and episode.is_success:
            problems.append(
                f"{episode.policy} solved {episode.task['task_id']} with "
                f"{_shorten_action(episode.actions[-1])}, return {episode.total_reward:g}"
            )
    problems += _describe_policies_that_solve_most(episodes, covers_all_tasks)[0]
    oracle_return = _compute_mean_return(episodes, ORACLE_POLICY)
    empty_return = _compute_mean_return(episodes, "empty")
    if oracle_return is not None and empty_return is not None and empty_return >= oracle_return:
        problems.append(
            f"the mean return of empty is {empty_return:g}, that of oracle {oracle_return:g}: "
            "solving tasks is not rewarded"
        )
    return problems


def _describe_missing_success(episode: ScriptedEpisode) -> str:
    if any(record.get("reports_success") for record in episode.transcript):
        return ""
    return f"; no info has the key {SUCCESS_KEY!r}, which says if an episode is a success"


def _describe_failures(episodes: list[ScriptedEpisode]) -> list[str]:
    """Return one sentence per failure, with the first episode and counts of others.

    Failures with the same exception and source lines count as one: their messages may quote
    observations.
    """
    episodes_by_failure: dict[tuple[str, ...], list[ScriptedEpisode]] = {}
    for episode in episodes:
        if episode.failure:
            first_line, *source_lines = episode.failure.splitlines()
            exception = first_line.partition("(")[0] if source_lines else first_line
            key = (exception, *source_lines)
            episodes_by_failure.setdefault(key, []).append(episode)
    sentences: list[str] = []
    for first_episode, *other_episodes in episodes_by_failure.values():
        counts_by_policy = Counter(episode.policy for episode in other_episodes)
        count_text = ", ".join(f"{policy} {count}" for policy, count in counts_by_policy.items())
        others_text = (
            f", and in {len(other_episodes)} more episodes ({count_text})" if other_episodes else ""
        )
        sentences.append(
            f"{first_episode.policy} made the environment fail on "
            f"{first_episode.task['task_id']} after "
            f"{len(first_episode.transcript)} observations{others_text}: {first_episode.failure}"
        )
    return sentences


def find_transcript_differences(
    episode_pairs: list[tuple[ScriptedEpisode, ScriptedEpisode]],
) -> list[str]:
    """Return one sentence per pair (episode, repetition) whose observations or rewards differ.

    The repetition ran in another process.
    """
    return [
        f"the same actions of {episode.policy} on {episode.task['task_id']} "
        f"(seed {episode.seed}) gave another transcript in another process: {difference}"
        for episode, repetition in episode_pairs
        if (difference := _describe_difference(episode, repetition))
    ]


def _shorten_action(action: str) -> str:
    length_remark = f" ... ({len(action)} characters)" if len(action) > 2 * CONTEXT_CHARS else ""
    return f"{action[: 2 * CONTEXT_CHARS]!r}{length_remark}"


def _describe_difference(episode: ScriptedEpisode, repetition: ScriptedEpisode) -> str:
    if repetition.failure:
        return f"the environment failed there: {repetition.failure}"
    record_pairs = zip(episode.transcript, repetition.transcript, strict=False)
    for num_actions, (record, repeated_record) in enumerate(record_pairs):
        for key, value in record.items():
            if value != repeated_record[key]:
                quoted_texts = _quote_texts_at_difference(str(value), str(repeated_record[key]))
                return f"after action {num_actions}, {key} is {quoted_texts}"
    if len(episode.transcript) != len(repetition.transcript):
        return f"{len(episode.actions)} actions here, {len(repetition.transcript) - 1} there"
    return ""


def _quote_texts_at_difference(text: str, other_text: str) -> str:
    difference_index = next(
        (i for i, (a, b) in enumerate(zip(text, other_text, strict=False)) if a != b), 0
    )
    shown_range = slice(max(0, difference_index - CONTEXT_CHARS), difference_index + CONTEXT_CHARS)
    return f"...{text[shown_range]!r} and ...{other_text[shown_range]!r}"


def _compute_mean_return(episodes: list[ScriptedEpisode], policy: str) -> float | None:
    returns = [
        episode.total_reward
        for episode in _select_episodes(episodes, policy)
        if not episode.failure
    ]
    return statistics.mean(returns) if returns else None


def build_results_table(findings: CheckFindings) -> Table:
    """Return a table of the results, with one row per policy."""
    table = Table(title=findings.name, title_justify="left", box=None, pad_edge=False)
    table.add_column("policy")
    titles = ("episodes", "success", "return", "lowest", "highest", "actions", "invalid", "failed")
    for title in titles:
        table.add_column(title, justify="right")
    for policy in dict.fromkeys(episode.policy for episode in findings.episodes):
        episodes = _select_episodes(findings.episodes, policy)
        returns = [episode.total_reward for episode in episodes]
        num_actions = sum(len(episode.actions) for episode in episodes)
        table.add_row(
            policy,
            str(len(episodes)),
            str(_count_successes(episodes)),
            f"{statistics.mean(returns):.3f}",
            f"{min(returns):.3f}",
            f"{max(returns):.3f}",
            f"{num_actions / len(episodes):.1f}",
            f"{sum(episode.num_invalid_actions for episode in episodes) / max(1, num_actions):.0%}",
            str(sum(bool(episode.failure) for episode in episodes)),
        )
    return table


def is_majority_solved(num_successes: int, num_episodes: int, covers_all_tasks: bool) -> bool:
    """Return True if more than half of all tasks are solved.

    If the episodes cover only some tasks, the successes above one half must be more than
    ``MAJORITY_STANDARD_DEVIATIONS`` of as many fair coin tosses. This is equivalent to a Wilson
    interval above one half. Examples: at least 7 successes in 8 episodes, or 22 in 32.
    """
    standard_deviation = 0.0 if covers_all_tasks else math.sqrt(num_episodes) / 2
    margin = MAJORITY_STANDARD_DEVIATIONS * standard_deviation
    return num_successes - num_episodes / 2 > margin
