"""Settings of the config section ``env.scienceworld``."""

from typing import Annotated, Literal

from annotated_types import Ge
from pydantic import field_validator

from agent_system.environments.settings import EnvSettings
from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean
from verl.utils.files import read_yaml_table

Simplification = Literal[
    "",
    "easy",
    "teleportAction",
    "openDoors",
    "openContainers",
    "selfWateringFlowerPots",
    "noElectricalAction",
]
VARIATION_COUNTS: dict[str, int] = read_yaml_table(__file__, "variations.yaml")


def get_variations(experiment: str, simulator_split: str) -> range:
    """Return the numbers of the variations of ``experiment`` in the split train, dev or test."""
    variation_count = VARIATION_COUNTS[experiment]
    quarter_count = variation_count // 4
    # Use the ranges of the simulator, so that results are comparable with published ones: two
    # quarters ``train``, one quarter ``dev``, and the rest ``test``.
    bounds_by_split = {
        "train": (0, 2 * quarter_count),
        "dev": (2 * quarter_count, 3 * quarter_count),
        "test": (3 * quarter_count, variation_count),
    }
    return range(*bounds_by_split[simulator_split])


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
    def _check_experiments(cls, experiment_names: tuple[str, ...]) -> tuple[str, ...]:
        for name in experiment_names:
            if name not in VARIATION_COUNTS:
                experiments = ", ".join(VARIATION_COUNTS)
                hint = did_you_mean(name, VARIATION_COUNTS)
                raise UserError(
                    f"kind {name!r} does not exist{hint}; "
                    f"allowed: any of {experiments}; fix: [boil]",
                    "unknown_name",
                )
        return experiment_names
