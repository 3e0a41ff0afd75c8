"""The ``env.scienceworld`` section."""

from typing import Annotated, Literal, get_args

from annotated_types import Ge
from pydantic import field_validator

from agent_system.environments.env_package.scienceworld.variations import VARIATIONS
from agent_system.environments.settings import EnvSettings
from verl.config.settings.hints import did_you_mean

Simplification = Literal[
    "",
    "easy",
    "teleportAction",
    "openDoors",
    "openContainers",
    "selfWateringFlowerPots",
    "noElectricalAction",
]
SIMPLIFICATIONS: tuple[Simplification, ...] = get_args(Simplification)


class ScienceWorldSettings(EnvSettings):
    """Which experiments are done, and the JVM that simulates them."""

    task_names: tuple[str, ...] = ()
    """kinds of experiments, such as [boil, find-animal]; none: all thirty"""
    simplification: Simplification = "easy"
    """one of the simulator's simplifications, easy for all of them at once, empty for none"""
    val_split: Literal["dev", "test"] = "dev"
    """the simulator's split to validate on"""
    list_actions: bool = False
    """list every valid action in every observation, at five to ten times the time of a step"""
    heap_mb: Annotated[int, Ge(128)] = 256
    """largest heap of the JVM, in megabytes"""
    java_options: str = ""
    """more flags for the JVM"""

    @field_validator("task_names")
    @classmethod
    def _known_kinds(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in VARIATIONS:
                kinds = ", ".join(VARIATIONS)
                hint = did_you_mean(name, VARIATIONS)
                raise ValueError(f"no kind is called {name!r}{hint}; allowed: any of {kinds}")
        return names
