"""Settings of the config section ``env.frozen_lake``."""

from typing import Annotated

from annotated_types import Ge, Le

from agent_system.environments.settings import PromptSettings
from verl.config.settings import PositiveInt, Seed


class LakeSettings(PromptSettings):
    """Settings of the lakes: size, share of ice, slipperiness, and number of maps."""

    size: Annotated[int, Ge(3), Le(16)] = 4
    """cells per side of the lake"""
    # Below 0.6 almost no lake has a path to the goal.
    frozen: Annotated[float, Ge(0.6), Le(0.95)] = 0.8
    """probability that a cell of a random map is ice"""
    slippery: bool = False
    """slippery ice: only one move in three goes in the chosen direction"""
    train_maps: PositiveInt = 1000
    """number of training maps; small lakes have fewer"""
    val_maps: PositiveInt = 128
    """number of validation maps; small lakes have fewer"""
    map_seed: Seed = 0
    """seed of the maps, independent of the seed of the run"""

    def count_needed_turns(self) -> int | None:
        """Return the moves from the first cell to the goal in the opposite corner."""
        return 2 * (self.size - 1)
