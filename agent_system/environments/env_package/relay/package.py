"""Relay: an episode of doors, each of which opens for the place so many arrows on.

What a door asks for, 0 to 7 arrows, is how deep one has to think: a policy with few layers follows
about one arrow for each token it writes. So the level that a step needs is known, and differs from
step to step.
"""

from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts, project
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.relay.doors import Door, needed_level
from agent_system.environments.env_package.relay.expert import EXPERT
from agent_system.environments.env_package.relay.prompts import shorten, told
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.env_package.relay.tasks import NAME, tasks
from agent_system.environments.package import EnvPackage

RULES = """\
You pass {doors} doors. At each one arrows lead from place to place: a>b leads from a to b.
Start where you are, follow as many arrows as the door asks for, one after another, and answer with
the place where you arrive. Right opens the door. Wrong, and you are lost.
A thought that helps follows the arrows step by step: 1=c 2=f"""


class Relay:
    """Reward 1.0 for passing the last door, else 0.0; done there, and at the first wrong place.

    What is no place changes nothing and is not valid. ``info`` of an observation says which
    ``situation`` it is (``+3``) and the ``needed_level``.
    """

    placement = "inline"

    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self._doors: list[Door] = []
        self._passed = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Stand before the first of ``task["doors"]``; the seed changes nothing."""
        del seed  # the task says it all
        self._doors = [Door.read(text) for text in task["doors"]]
        self._passed = 0
        return self._look("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Name a place; see the class for rewards and ends."""
        action = action.strip().lower()
        door = self._doors[self._passed]
        if action not in door.places:
            observation = self._look("There is no such place. ")
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        if action != door.goal:
            end = Observation(f"{action} is wrong: you are lost.", anchor="lost")
            return end, 0.0, True, {"won": False, "is_action_valid": True}
        self._passed += 1
        won = self._passed == len(self._doors)
        ahead = Observation("All doors are passed.", anchor="won") if won else self._look("")
        return ahead, float(won), won, {"won": won, "is_action_valid": True}

    def close(self) -> None:
        """Nothing to free."""

    def _look(self, before: str) -> Observation:
        door = self._doors[self._passed]
        text = told(door, self._passed + 1, len(self._doors))
        info = {
            "admissible_actions": door.places,
            "situation": f"+{door.hops}",
            "needed_level": needed_level(door.hops, self.settings.hops),
        }
        return Observation(f"{before}{text}", anchor=door.state, info=info)


def prompts(settings: RelaySettings) -> ChatPrompts | CompactPrompts:
    """Rules, answer format and doors, or the doors alone."""
    if settings.prompt == "compact":
        return CompactPrompts(shorten)
    return ChatPrompts(RULES.format(doors=settings.doors), example="c")


PACKAGE = EnvPackage(
    name=NAME,
    settings=RelaySettings,
    make=Relay,
    tasks=tasks,
    prompts=prompts,
    project=project,
    expert=EXPERT,
)
