"""Fixed environment of three turns, so that the golden trajectory depends on no other code:
find the red door.
"""

import re

from agent_system.environments.env import Observation
from agent_system.environments.package import EnvPackage
from agent_system.environments.settings import EnvSettings

ACTION = re.compile(r"<action>(.*?)</action>")


class TwoDoors:
    """The colour is known after looking. Opening the red door is a success.

    Other actions are not valid.
    """

    placement = "inline"

    def __init__(self, settings) -> None:
        del settings
        self.looked = False

    def reset(self, task, seed):
        del task, seed
        self.looked = False
        return Observation("Two doors.", anchor="start")

    def step(self, action):
        won = action == "open red" and self.looked
        valid = action in ("look", "open red", "open blue")
        self.looked = self.looked or action == "look"
        text = "One is red." if self.looked else "Two doors."
        reward = 1.0 if won else 0.0 if valid else -0.25
        info = {"won": won, "is_action_valid": valid}
        return Observation(text, anchor=text), reward, won, info

    def close(self) -> None:
        """Do nothing: the environment holds no resources."""


class DoorPrompts:
    """Prompts of one line each."""

    asks_for_levels = True

    def __init__(self, settings) -> None:
        del settings

    def system(self, levels):
        return "Level, think, act." if levels else "Act."

    def first(self, observation, levels):
        del levels
        return observation.text

    def turn(self, observation):
        return observation.text

    def window(self, first, history, observation, levels):
        del first, levels
        return "".join(f"{seen} {action}. " for seen, action in history) + observation.text


def tasks(settings, split):
    """Return one task per split."""
    del settings
    return [{"task_id": f"doors-{split}", "data_source": "doors"}]


def project(text):
    """Return the tagged action, or the text itself."""
    match = ACTION.search(text)
    return (match[1], True) if match else (text, False)


PACKAGE = EnvPackage(
    name="two_doors",
    settings=EnvSettings,
    make=TwoDoors,
    tasks=tasks,
    prompts=DoorPrompts,
    project=project,
)
