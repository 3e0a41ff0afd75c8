"""Episodes of the command ``check``, which tests the rewards of an environment.

They run in worker processes with deadlines. All observations and rewards are stored.
"""

import contextlib
import random
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from agent_system.environments.cli.policies import (
    Policy,
    PolicyFactory,
    TextWithAction,
    list_constant_action_candidates,
    make_text_with_action,
)
from agent_system.environments.env import EnvFailure, Observation, Task
from agent_system.environments.expert_protocol import EpisodeStart
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool
from agent_system.environments.settings import EnvSettings
from verl.utils.jsonl import to_json_types
from verl.utils.limits import USER_CODE_ERRORS, describe_raised_error
from verl.utils.seeds import derive_seed

# Deadlines of one call of ``reset`` and of ``step``, in seconds.
RESET_TIMEOUT_S = 120.0
STEP_TIMEOUT_S = 60.0
CONSTANT_ACTIONS_TIMEOUT_S = 60.0  # time limit for all constant actions together
SUCCESS_KEY = "won"  # key of the info that an env step returns
# Function from the last observation to (action, whether the text of the policy is well formed).
ActionChoice = Callable[[Observation], tuple[str, bool]]


@dataclass(frozen=True, slots=True)
class CheckedEnvironment:
    """Environment whose rewards are checked, with its tasks and the maximum number of turns."""

    name: str
    package: EnvPackage[Any]
    settings: EnvSettings
    tasks: Sequence[tuple[Task, int]]  # task and environment seed
    max_steps: int
    covers_all_tasks: bool = False  # True if ``tasks`` contains every task of the split

    def create_pool(self) -> EnvironmentPool:
        return EnvironmentPool(
            self.name, self.settings, 1, 1, RESET_TIMEOUT_S, STEP_TIMEOUT_S, placement="process"
        )


@dataclass(slots=True)
class ScriptedEpisode:
    """Episode of a scripted policy.

    ``transcript`` contains the first observation and the result of every action, as plain values.
    ``failure`` is the error message if the environment failed. ``has_hung`` is True if a call of
    the environment exceeded its deadline.
    """

    policy: str
    task: Task
    seed: int
    actions: list[str] = field(default_factory=list)
    well_formed: list[bool] = field(default_factory=list)
    transcript: list[dict[str, Any]] = field(default_factory=list)
    failure: str = ""
    has_hung: bool = False

    @property
    def total_reward(self) -> float:
        """Return of the episode: the sum of its rewards."""
        return sum(record["reward"] for record in self.transcript if "reward" in record)

    @property
    def is_success(self) -> bool:
        """True if the last env step reported a success."""
        return bool(self.transcript) and bool(self.transcript[-1].get("won"))

    @property
    def num_invalid_actions(self) -> int:
        """Number of actions that the parser or the environment found invalid."""
        validity_flags = [bool(record.get("valid")) for record in self.transcript[1:]]
        return sum(not (a and b) for a, b in zip(self.well_formed, validity_flags, strict=False))


async def run_policy(
    checked_env: CheckedEnvironment,
    pool: EnvironmentPool,
    name: str,
    make_policy: PolicyFactory,
    task_number: int,
) -> ScriptedEpisode:
    """Run policy ``name`` on task ``task_number`` and return the episode.

    The episode ends when the environment is done, or after ``max_steps`` actions. Raises
    ``ValueError`` if the policy (such as the expert) or ``project`` of the package raises.
    """
    task, seed = checked_env.tasks[task_number]
    package = checked_env.package.package_for_task(task)

    def create_episode_policy(first_observation: Observation) -> ActionChoice:
        rng = random.Random(derive_seed("check", name, task["task_id"], seed))
        with _name_policy_in_errors(name, task):
            policy = make_policy(EpisodeStart(checked_env.settings, task, first_observation, rng))

        def choose_action(observation: Observation) -> tuple[str, bool]:
            with _name_policy_in_errors(name, task):
                text = policy(observation)
                is_text_with_action = isinstance(text, TextWithAction)
                return (text.action, True) if is_text_with_action else package.project(text)

        return choose_action

    return await _run_episode(
        pool, ScriptedEpisode(name, task, seed), create_episode_policy, checked_env.max_steps
    )


@contextlib.contextmanager
def _name_policy_in_errors(policy_name: str, task: Task) -> Iterator[None]:
    try:
        yield
    except USER_CODE_ERRORS as error:  # boundary to user code
        raise ValueError(
            f"policy {policy_name} has no action on {task['task_id']}: "
            f"{describe_raised_error(error)}; allowed: an action in every turn until the episode "
            "is done; fix: correct the expert, project or the end of the episode"
        ) from error


async def repeat_episode(
    pool: EnvironmentPool, original_episode: ScriptedEpisode
) -> ScriptedEpisode:
    """Repeat the task, seed and actions of ``original_episode`` and return the new episode."""
    episode = ScriptedEpisode(original_episode.policy, original_episode.task, original_episode.seed)
    actions = iter(zip(original_episode.actions, original_episode.well_formed, strict=True))
    max_steps = len(original_episode.actions)
    return await _run_episode(
        pool, episode, lambda _first_observation: lambda _observation: next(actions), max_steps
    )


async def _run_episode(
    pool: EnvironmentPool,
    episode: ScriptedEpisode,
    create_episode_policy: Callable[[Observation], ActionChoice],
    max_steps: int,
) -> ScriptedEpisode:
    try:
        # One session per episode: the pool replaces an environment that failed.
        async with pool.open_session() as session:
            observation = await session.reset(episode.task, episode.seed)
            episode.transcript.append(_build_observation_record(observation))
            choose_action = create_episode_policy(observation)
            done = False
            while not done and len(episode.actions) < max_steps:
                action, is_well_formed = choose_action(observation)
                episode.actions.append(action)
                episode.well_formed.append(is_well_formed)
                observation, reward, done, info = await session.step(action)
                episode.transcript.append(
                    {
                        **_build_observation_record(observation),
                        "reward": reward,
                        "done": done,
                        "won": bool(info.get(SUCCESS_KEY, False)),
                        "reports_success": SUCCESS_KEY in info,
                        "valid": bool(info.get("is_action_valid", True)),
                    }
                )
    except EnvFailure as failure:
        episode.failure = str(failure)
        episode.has_hung = failure.kind == "timeout"
    return episode


def _build_observation_record(observation: Observation) -> dict[str, Any]:
    # Convert arrays to lists, so that ``==`` gives a single bool.
    return to_json_types(asdict(observation))


@dataclass(frozen=True, slots=True)
class ConstantActionResult:
    """Action that a policy repeated in every turn, with the episodes of that policy."""

    action: str
    constant_episodes: list[ScriptedEpisode]

    @property
    def num_episodes(self) -> int:
        return len(self.constant_episodes)

    @property
    def num_successes(self) -> int:
        return sum(episode.is_success for episode in self.constant_episodes)

    @property
    def comparison_key(self) -> tuple[int, int]:
        """Number of successes, then of valid actions: larger for a better action."""
        num_actions = sum(len(episode.actions) for episode in self.constant_episodes)
        num_invalid = sum(episode.num_invalid_actions for episode in self.constant_episodes)
        return self.num_successes, num_actions - num_invalid


async def try_constant_actions(
    checked_env: CheckedEnvironment, pool: EnvironmentPool, episodes: Sequence[ScriptedEpisode]
) -> tuple[ConstantActionResult | None, list[str]]:
    """Run policies that repeat one action in every turn, for several frequent actions.

    Candidates are actions of the oracle, and those that the first observations name. Return the
    action that succeeded most often, and a sentence if the time limit ended the trials.
    """
    first_records = [episode.transcript[0] for episode in episodes if episode.transcript]
    first_observations = [
        Observation(record["text"], info=record["info"]) for record in first_records
    ]
    oracle_episodes = [episode for episode in episodes if episode.policy == "oracle"]
    oracle_actions = [action for episode in oracle_episodes for action in episode.actions]
    candidates = list_constant_action_candidates(oracle_actions, first_observations)
    best_constant: ConstantActionResult | None = None
    deadline = time.monotonic() + CONSTANT_ACTIONS_TIMEOUT_S
    for num_tried_actions, action in enumerate(candidates):
        if time.monotonic() > deadline:
            untried_count_text = (
                f"{len(candidates) - num_tried_actions} of {len(candidates)} constants"
            )
            return best_constant, [
                f"{untried_count_text} were not tried within {CONSTANT_ACTIONS_TIMEOUT_S:g} s"
            ]
        result = await _run_constant_action(checked_env, pool, action)
        if best_constant is None or result.comparison_key > best_constant.comparison_key:
            best_constant = result
    return best_constant, []


async def _run_constant_action(
    checked_env: CheckedEnvironment, pool: EnvironmentPool, action: str
) -> ConstantActionResult:
    """Repeat ``action`` in every turn of every task, and return the result.

    Stop early when the action can no longer succeed at more than half of the tasks.
    """

    def make_policy(_start: EpisodeStart[Any]) -> Policy:
        return lambda _observation: make_text_with_action(action)

    result = ConstantActionResult(action, [])
    num_tasks = len(checked_env.tasks)
    for task_index in range(num_tasks):
        episode = await run_policy(checked_env, pool, "constant", make_policy, task_index)
        result.constant_episodes.append(episode)
        if 2 * (result.num_episodes - result.num_successes) >= num_tasks:
            break
    return result


def check_action_format(
    package: EnvPackage[Any], episodes: Sequence[ScriptedEpisode]
) -> tuple[list[str], list[str]]:
    """Check that the parser reads the actions in ``episodes`` as ``format_action`` writes them.

    Return (problems, open questions). Without ``format_action`` the actions are written in
    ``<action>`` tags. If the parser cannot read these, the format of the package is an open
    question.
    """
    for episode in episodes:
        task_package = package.package_for_task(episode.task)
        for action in dict.fromkeys(episode.actions):
            format_action = task_package.format_action or make_text_with_action
            text = str(format_action(action))
            extracted_action = task_package.project(text)
            if extracted_action == (action, True):
                continue
            sentence = f"project({text!r}) is {extracted_action!r}, not {(action, True)!r}"
            if task_package.format_action is not None:
                return [f"{sentence}: a policy cannot write the action of the oracle"], []
            return [], [
                f"{sentence}: the format of answers is unknown; fix: set format_action of the "
                "package, a function from an action to the text in which a model writes it"
            ]
    return [], []
