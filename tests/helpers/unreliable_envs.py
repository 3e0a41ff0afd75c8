"""Environments with unreliable rewards. ``fault`` selects the kind of error."""

import builtins
import os
import time
from dataclasses import replace
from typing import Literal

from agent_system.environments.env_package.number_line import package as number_line
from agent_system.environments.env_package.number_line.package import NumberLineEnv
from agent_system.environments.env_package.number_line.settings import LineSettings
from agent_system.environments.expert_protocol import Expert
from agent_system.environments.package import EnvPackage


class DoubtfulSettings(LineSettings):
    """Settings of the number line, with a fault."""

    fault: Literal[
        "none",
        "pays for nothing",
        "reads tags",
        "unwinnable",
        "breaks",
        "raises",
        "hangs",
        "no won",
        "other",
        "leaks",
    ]
    """name of the fault"""
    close_error: Literal["", "ValueError", "SystemExit"] = ""
    """class of the error that closing the environment raises; empty: none"""
    no_gold: bool = False
    """True if the package has no expert"""


class DoubtfulEnv(NumberLineEnv):
    """Number line with a fault."""

    placement = "process"
    # Shared by all instances of a process.
    played = 0

    def __init__(self, settings: DoubtfulSettings) -> None:
        super().__init__(settings)
        self.fault = settings.fault
        self.close_error = settings.close_error

    def reset(self, task, seed):
        DoubtfulEnv.played += 1
        return super().reset(task, seed)

    def step(self, action):
        if self.fault == "breaks" and "__import__" in action:
            raise ValueError("evaluated what was said")
        if self.fault == "raises":
            raise ValueError(f"no step succeeds: {action} at {self.position}")
        if self.fault == "hangs":
            time.sleep(1000)
        observation, _, done, info = super().step(action)
        won = self.position == self.target
        if self.fault == "pays for nothing":
            won = True
        elif self.fault == "reads tags":
            won = won or "reward" in action
        elif self.fault == "unwinnable":
            won = False
        elif self.fault == "other":
            observation = replace(observation, text=f"{observation.text} {os.getpid()}")
        elif self.fault == "leaks":
            observation = replace(observation, text=f"{observation.text} {DoubtfulEnv.played}")
        if self.fault == "no won":
            return observation, float(won), done or won, {}
        return observation, float(won), done or won, {**info, "won": won}

    def close(self):
        if self.close_error:
            raise getattr(builtins, self.close_error)("the engine is gone")


class AsyncGoldEnv(DoubtfulEnv):
    """Version whose solutions come from a coroutine."""

    async def gold_path(self, task):
        direction = "right" if task["target"] > task["start"] else "left"
        return [direction] * abs(task["target"] - task["start"])


class FaultyExpert:
    """Expert whose first action raises ``IndexError``."""

    def __init__(self, episode):
        self.planned_actions = []

    def act(self):
        return self.planned_actions[0]

    def observe(self, action, observation):
        pass


PACKAGE = replace(number_line.PACKAGE, settings=DoubtfulSettings, make=DoubtfulEnv)
ASYNC_GOLD = replace(PACKAGE, make=AsyncGoldEnv)
FAULTY_EXPERT = replace(PACKAGE, expert=Expert(FaultyExpert))
MAKE_WITHOUT_SETTINGS = replace(PACKAGE, make=lambda: None)
WITHOUT_EXPERT: EnvPackage = replace(PACKAGE, expert=None)
