"""Relay: an episode is a sequence of puzzles ("doors"), such as ``d+3 a>b f>c ...``.

The right answer to this door is the place that is 3 arrows after ``d``. By default, doors ask for 0
to 7 arrows. A policy with few layers follows about one arrow per written token. Therefore the
number of arrows determines the required thinking level of a turn.
"""

from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts, project_action
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.relay.doors import (
    NAME,
    Door,
    compute_needed_level,
    describe_door,
    list_tasks,
    shorten_observation,
)
from agent_system.environments.env_package.relay.expert import EXPERT
from agent_system.environments.env_package.relay.settings import RelaySettings
from agent_system.environments.package import EnvPackage

RULES = """\
You pass {doors} doors. At each one arrows lead from place to place: a>b leads from a to b.
Start where you are, follow as many arrows as the door asks for, one after another, and answer with
the place where you arrive. Right opens the door. Wrong, and you are lost.
A thought that helps follows the arrows step by step: 1=c 2=f"""


class RelayEnv:
    """Environment with reward 1.0 for passing the last door, else 0.0.

    An episode ends after the last door or with the first wrong answer. An unknown place changes
    nothing and is not valid. ``info`` of an observation holds ``needed_level``, and ``situation``,
    such as ``+3`` for a door that asks for 3 arrows.
    """

    placement = "inline"

    def __init__(self, settings: RelaySettings) -> None:
        self.settings = settings
        self._doors: list[Door] = []
        self._passed_doors = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode at the first of ``task["doors"]``."""
        del seed  # nothing is random
        self._doors = [Door.parse(text) for text in task["doors"]]
        self._passed_doors = 0
        return self._make_observation("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Answer the current door (puzzle) with the place ``action``.

        The reward is 1.0 for passing the last door, else 0.0. The episode is done after the last
        door or with a wrong answer.
        """
        action = action.strip().lower()
        door = self._doors[self._passed_doors]
        if action not in door.all_places:
            observation = self._make_observation("There is no such place. ")
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        if action != door.goal_place:
            observation = Observation(f"{action} is wrong: you are lost.", anchor="lost")
            return observation, 0.0, True, {"won": False, "is_action_valid": True}
        self._passed_doors += 1
        if self._passed_doors < len(self._doors):
            return self._make_observation(""), 0.0, False, {"won": False, "is_action_valid": True}
        observation = Observation("All doors are passed.", anchor="won")
        return observation, 1.0, True, {"won": True, "is_action_valid": True}

    def close(self) -> None:
        """Do nothing: no resources are in use."""

    def _make_observation(self, prefix: str) -> Observation:
        door = self._doors[self._passed_doors]
        text = describe_door(door, self._passed_doors + 1, len(self._doors))
        info = {
            "admissible_actions": door.all_places,
            "situation": f"+{door.hops}",
            "needed_level": compute_needed_level(door.hops, self.settings.hops),
        }
        return Observation(f"{prefix}{text}", anchor=door.state, info=info)


def make_prompts(settings: RelaySettings) -> ChatPrompts | CompactPrompts:
    """Return prompts with rules and answer format, or compact prompts with doors only."""
    if settings.prompt == "compact":
        return CompactPrompts(shorten_observation)
    return ChatPrompts(RULES.format(doors=settings.doors), example="c")


PACKAGE = EnvPackage(
    name=NAME,
    settings=RelaySettings,
    make=RelayEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    expert=EXPERT,
)
