"""Synthetic environment whose steps take 10 milliseconds to one second, log-uniform."""

import asyncio
import math
import random
from typing import Any

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.number_line.package import (
    NumberLinePrompts,
    parse_move,
)
from agent_system.environments.env_package.number_line.settings import LineSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings

MIN_STEP_S, MAX_STEP_S = 0.01, 1.0  # bounds of the duration of an env step, in seconds
STEPS_RANGE = (4, 12)  # minimum and maximum env steps of an episode


class WaitingEnv:
    """Environment that succeeds after the number of steps of its task, whatever the actions are.

    The duration of a step is a function of the task and of all actions of the episode so far.
    """

    placement = "inline"

    def __init__(self, settings: EnvSettings) -> None:  # noqa: ARG002  of EnvPackage.make
        self._remaining_steps = 0
        self._task_and_actions = [""]

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002  of Env
        """Begin ``task``. ``seed`` has no effect."""
        self._remaining_steps = task["steps"]
        self._task_and_actions = [task["task_id"]]
        return self._make_observation()

    async def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Wait, and subtract 1 from the number of remaining steps of the episode."""
        self._task_and_actions.append(action)
        uniform_draw = random.Random("/".join(self._task_and_actions)).random()
        # Log-uniform: 10 to 100 ms is as likely as 100 ms to 1 s.
        await asyncio.sleep(MIN_STEP_S * math.exp(uniform_draw * math.log(MAX_STEP_S / MIN_STEP_S)))
        self._remaining_steps -= 1
        is_success = self._remaining_steps == 0
        return (
            self._make_observation(),
            float(is_success),
            is_success,
            {"won": is_success, "is_action_valid": True},
        )

    def close(self) -> None:
        """Do nothing: there are no resources to free."""

    def _make_observation(self) -> Observation:
        return Observation(f"You are at {self._remaining_steps}. The target is 0.")


def make_tasks(settings: EnvSettings, split: str) -> list[Task]:  # noqa: ARG001  of EnvPackage.tasks
    """Return 200 tasks with random numbers of env steps, the same in every process."""
    task_ids = [f"waiting/{split}/{task_index}" for task_index in range(200)]
    return [
        {
            "task_id": task_id,
            "data_source": "waiting",
            "steps": random.Random(task_id).randint(*STEPS_RANGE),
        }
        for task_id in task_ids
    ]


# Any policy soon samples one of these stop strings, so turns are short and not truncated.
PACKAGE = EnvPackage(
    name="waiting",
    settings=LineSettings,
    make=WaitingEnv,  # pyright: ignore[reportArgumentType]  its step is a coroutine, as Env allows
    tasks=make_tasks,
    prompts=NumberLinePrompts,
    project=parse_move,
    stop=tuple("aeiou .<>"),
)
