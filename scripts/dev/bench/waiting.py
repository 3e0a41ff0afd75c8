"""A synthetic environment whose steps take 10 milliseconds to a second, log-uniform."""

import asyncio
import math
import random
from typing import Any

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.number_line.package import NumberLinePrompts, project
from agent_system.environments.env_package.number_line.settings import LineSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings

SHORTEST_S, LONGEST_S = 0.01, 1.0
STEPS = (4, 12)  # fewest and most of an episode


class WaitingEnv:
    """Waits, and is won after the steps that its task asks for, whatever the policy does.

    How long a step takes follows from the task and all actions so far: the members of a group wait
    at different times, and who says the same again waits as long again.
    """

    placement = "inline"

    def __init__(self, settings: EnvSettings) -> None:  # noqa: ARG002  of EnvPackage.make
        self._left = 0
        self._said = [""]

    def reset(self, task: Task, seed: int) -> Observation:  # noqa: ARG002  of Env
        """Begin ``task``; there is nothing that ``seed`` could change."""
        self._left = task["steps"]
        self._said = [task["task_id"]]
        return self._look()

    async def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Wait."""
        self._said.append(action)
        drawn = random.Random("/".join(self._said)).random()
        # Log-uniform: each factor of ten between the two ends is as likely as another.
        await asyncio.sleep(SHORTEST_S * math.exp(drawn * math.log(LONGEST_S / SHORTEST_S)))
        self._left -= 1
        won = self._left == 0
        return self._look(), float(won), won, {"won": won, "is_action_valid": True}

    def close(self) -> None:
        """Nothing to free."""

    def _look(self) -> Observation:
        return Observation(f"You are at {self._left}. The target is 0.")


def tasks(settings: EnvSettings, split: str) -> list[Task]:  # noqa: ARG001  of EnvPackage.tasks
    """200 tasks, the same in every process."""
    names = [f"waiting/{split}/{number}" for number in range(200)]
    return [
        {"task_id": name, "data_source": "waiting", "steps": random.Random(name).randint(*STEPS)}
        for name in names
    ]


# Any policy says one of these soon, so that turns are short and none is cut.
PACKAGE = EnvPackage(
    name="waiting",
    settings=LineSettings,
    make=WaitingEnv,  # pyright: ignore[reportArgumentType]  its step is a coroutine, as Env allows
    tasks=tasks,
    prompts=NumberLinePrompts,
    project=project,
    stop=tuple("aeiou .<>"),
)
