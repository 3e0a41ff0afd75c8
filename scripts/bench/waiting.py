"""A synthetic environment whose steps take as long as a task says: from 10 milliseconds to a second, log-uniform."""

import asyncio
import math
import random
from typing import Any

from agent_system.environments.base import EnvPackage, Observation, Task
from agent_system.environments.env_package.number_line.package import NumberLinePrompts, project

SHORTEST_S, LONGEST_S = 0.01, 1.0
STEPS = (4, 12)  # fewest and most of an episode


class WaitingEnv:
    """Waits, and is won after as many steps as the task has times; what the policy does changes nothing."""

    placement = "inline"

    def __init__(self, section: dict[str, Any]) -> None:
        self._left: list[float] = []

    def reset(self, task: Task, seed: int) -> Observation:
        """Take the times of ``task``, in seconds."""
        self._left = list(task["seconds"])
        return self._look()

    async def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Wait the next time."""
        await asyncio.sleep(self._left.pop(0))
        won = not self._left
        return self._look(), float(won), won, {"won": won, "is_action_valid": True}

    def close(self) -> None:
        """Nothing to free."""

    def _look(self) -> Observation:
        return Observation(f"You are at {len(self._left)}. The target is 0.")


def tasks(section: dict[str, Any], split: str) -> list[Task]:
    """200 tasks, the same in every process."""
    made = []
    for number in range(200):
        rng = random.Random(f"{split}/{number}")
        seconds = [
            SHORTEST_S * math.exp(rng.random() * math.log(LONGEST_S / SHORTEST_S)) for _ in range(rng.randint(*STEPS))
        ]
        made.append({"task_id": f"waiting/{split}/{number}", "data_source": "waiting", "seconds": seconds})
    return made


# Any policy says one of these soon, so that turns are short and none is cut.
PACKAGE = EnvPackage("waiting", WaitingEnv, tasks, NumberLinePrompts, project, stop=tuple("aeiou .<>"))
