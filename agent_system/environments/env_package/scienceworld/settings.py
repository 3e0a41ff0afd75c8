"""Settings of the config section ``env.scienceworld``."""

from pathlib import Path
from typing import Annotated, Literal

import yaml
from annotated_types import Ge
from pydantic import field_validator

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
# Number of variations of each kind of experiment.
VARIATIONS: dict[str, int] = yaml.safe_load(
    Path(__file__).with_name("variations.yaml").read_text(encoding="utf-8")
)


def split_variations(name: str, part: str) -> range:
    """Return the variations of experiment ``name`` in ``part`` (``train``, ``dev`` or ``test``)."""
    count = VARIATIONS[name]
    quarter = count // 4
    # Use the simulator's consecutive ranges instead of a hash, so that results are comparable with
    # published ones. The remainder of the division by four goes to ``test``.
    if part == "train":
        return range(2 * quarter)
    return range(2 * quarter, 3 * quarter) if part == "dev" else range(3 * quarter, count)


class ScienceWorldSettings(EnvSettings):
    """Choice of the experiments, and settings of the JVM that simulates them."""

    task_names: tuple[str, ...] = ()
    """kinds of experiments, such as [boil, find-animal]; empty: all thirty"""
    simplification: Simplification = "easy"
    """one simplification of the simulator; easy: all of them; empty: none"""
    val_split: Literal["dev", "test"] = "dev"
    """split of the simulator that is used for validation"""
    list_actions: bool = False
    """list all valid actions in every observation; a step takes five to ten times longer"""
    heap_mb: Annotated[int, Ge(128)] = 256
    """maximum heap size of the JVM in MB"""
    java_options: str = ""
    """further options of the JVM"""

    @field_validator("task_names")
    @classmethod
    def _known_kinds(cls, names: tuple[str, ...]) -> tuple[str, ...]:
        for name in names:
            if name not in VARIATIONS:
                kinds = ", ".join(VARIATIONS)
                hint = did_you_mean(name, VARIATIONS)
                raise ValueError(
                    f"kind {name!r} does not exist{hint}; allowed: any of {kinds}; fix: [boil]"
                )
        return names
