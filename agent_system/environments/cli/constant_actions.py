"""Constant actions: a policy that repeats one action must not solve more than half of the tasks."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.cli.check_episodes import (
    CheckedEnvironment,
    CheckEpisode,
    run_policy,
)
from agent_system.environments.cli.policies import candidate_constants, write_action
from agent_system.environments.env import Observation
from agent_system.environments.package import EnvPackage
from agent_system.environments.pool.environment_pool import EnvironmentPool

SECONDS = 60.0  # time limit for all constants together


@dataclass(frozen=True, slots=True)
class ConstantAction:
    """Action that was repeated in every turn, its episodes and the number of successes."""

    action: str
    episode_list: list[CheckEpisode]

    @property
    def episodes(self) -> int:
        """Number of episodes."""
        return len(self.episode_list)

    @property
    def successes(self) -> int:
        """Number of successful episodes."""
        return sum(episode.is_success for episode in self.episode_list)

    @property
    def _rank(self) -> tuple[int, int]:
        num_actions = sum(len(episode.actions) for episode in self.episode_list)
        num_invalid = sum(episode.num_invalid_actions for episode in self.episode_list)
        return self.successes, num_actions - num_invalid

    def is_better_than(self, other: "ConstantAction") -> bool:
        """Return True if it has more successes, or as many successes and more valid actions."""
        return self._rank > other._rank


async def try_constants(
    checked: CheckedEnvironment, pool: EnvironmentPool, episodes: Sequence[CheckEpisode]
) -> tuple[ConstantAction | None, list[str]]:
    """Run policies that repeat one frequent action in every turn.

    ``episodes`` are those of other policies; their actions and observations determine which actions
    are frequent. Return the action that succeeded most often, and a sentence if the time was too
    short for all candidates.
    """
    oracle_episodes = [episode for episode in episodes if episode.policy == "oracle"]
    first_observations = [
        Observation(episode.transcript[0]["text"], info=episode.transcript[0]["info"])
        for episode in episodes
        if episode.transcript
    ]
    oracle_actions = [action for episode in oracle_episodes for action in episode.actions]
    candidates = candidate_constants(oracle_actions, first_observations)
    best_constant: ConstantAction | None = None
    deadline = time.monotonic() + SECONDS
    for num_tried, action in enumerate(candidates):
        if time.monotonic() > deadline:
            num_untried = len(candidates) - num_tried
            return best_constant, [
                f"{num_untried} of {len(candidates)} constants were not tried within {SECONDS:g} s"
            ]
        result = await _run_constant(checked, pool, action)
        if best_constant is None or result.is_better_than(best_constant):
            best_constant = result
    return best_constant, []


async def _run_constant(
    checked: CheckedEnvironment, pool: EnvironmentPool, action: str
) -> ConstantAction:
    """Repeat ``action`` in every task. Stop when it can no longer succeed at more than half."""
    constant = ConstantAction(action, [])
    for task_index in range(len(checked.tasks)):
        constant.episode_list.append(
            await run_policy(
                checked,
                pool,
                "constant",
                lambda _begin: lambda _observation: write_action(action),
                task_index,
            )
        )
        if 2 * (constant.episodes - constant.successes) >= len(checked.tasks):
            break
    return constant


def check_action_format(
    package: EnvPackage[Any], episodes: Sequence[CheckEpisode]
) -> tuple[list[str], list[str]]:
    """Check that ``package.project`` extracts the oracle's actions from texts of ``format_action``.

    Return the problems, and a sentence if the check is impossible because the package has no
    ``format_action``.
    """
    for episode in episodes:
        task_package = package.package_for_task(episode.task)
        for action in dict.fromkeys(episode.actions):
            text = (
                str(write_action(action))
                if task_package.format_action is None
                else task_package.format_action(action)
            )
            projected = task_package.project(text)
            if projected == (action, True):
                continue
            sentence = f"project({text!r}) is {projected!r}, not {(action, True)!r}"
            if task_package.format_action is not None:
                return [f"{sentence}: a policy cannot write the action of the oracle"], []
            return [], [
                f"{sentence}: the format of answers is unknown; fix: set format_action of the "
                "package, a function from an action to the text in which a model writes it"
            ]
    return [], []
