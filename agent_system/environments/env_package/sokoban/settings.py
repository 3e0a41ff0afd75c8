"""The ``env.sokoban`` section."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from agent_system.environments.settings import EnvSettings
from verl.config.settings import PositiveInt, Seed

NAME = "sokoban"
IMAGES = ("image", "rgb_array")  # two names of one thing
Side = Annotated[int, Ge(5), Le(12)]
Moves = Annotated[int, Ge(1), Le(60)]


class SokobanSettings(EnvSettings):
    """How rooms look and how hard they are."""

    mode: Literal["text", "image", "rgb_array"] = "text"
    """text, or observations that are RGB arrays (image, rgb_array: two names of one thing)"""
    dim_room: tuple[Side, Side] = (6, 6)
    """rows and columns, walls around included"""
    num_boxes: Annotated[int, Ge(1), Le(4)] = 1
    """boxes, and targets"""
    search_depth: Moves = 12
    """most moves of a shortest solution"""
    min_moves: Moves = 2
    """fewest moves of a shortest solution"""
    reward: Literal["sparse", "gym"] = "sparse"
    """sparse: 1.0 for the last box; gym: -0.1 a move, +1 for a box on a target, -1 for one taken
    off, +10 at the end, as gym-sokoban pays"""
    tile: Annotated[int, Ge(4), Le(64)] = 16
    """pixels of a cell of an image"""
    train_levels: PositiveInt = 500
    """levels to train on"""
    val_levels: PositiveInt = 64
    """levels held out"""
    level_seed: Seed = 0
    """seed of the levels: the same ones in every run"""
    prompt: Literal["full", "compact"] = "full"
    """full: rules and answer format for chat models; compact: observations alone, for policies made
    by imitation"""

    @property
    def shows_images(self) -> bool:
        """Whether observations are images."""
        return self.mode in IMAGES
