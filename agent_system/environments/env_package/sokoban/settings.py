"""Settings of ``env.sokoban``: size, difficulty and rendering of the levels."""

from typing import Annotated, Literal

from annotated_types import Ge, Le

from agent_system.environments.settings import PromptSettings
from verl.config.settings import PositiveInt, Seed

NAME = "sokoban"
IMAGE_MODES = ("image", "rgb_array")  # both values of ``mode`` request images
SideLength = Annotated[int, Ge(5), Le(12)]
MoveCount = Annotated[int, Ge(1), Le(60)]


class SokobanSettings(PromptSettings):
    """Rooms, number of moves, reward and observations."""

    mode: Literal["text", "image", "rgb_array"] = "text"
    """text, or observations that are RGB arrays (image and rgb_array mean the same)"""
    dim_room: tuple[SideLength, SideLength] = (6, 6)
    """rows and columns, including the outer walls"""
    num_boxes: Annotated[int, Ge(1), Le(4)] = 1
    """number of boxes and of targets"""
    search_depth: MoveCount = 12
    """maximum number of moves in the shortest solution of a level"""
    min_moves: MoveCount = 2
    """minimum number of moves in the shortest solution of a level"""
    reward: Literal["sparse", "gym"] = "sparse"
    """sparse: 1.0 for the last box; gym: -0.1 per move, +1 for a box put on a target, -1 for one
    moved off, +10 at the end, as in gym-sokoban"""
    tile: Annotated[int, Ge(4), Le(64)] = 16
    """width and height of a cell of an image, in pixels"""
    train_levels: PositiveInt = 500
    """levels to train on"""
    val_levels: PositiveInt = 64
    """levels held out for validation"""
    level_seed: Seed = 0
    """seed of the levels: the same ones in every run"""

    @property
    def shows_images(self) -> bool:
        """True if observations are RGB arrays instead of text."""
        return self.mode in IMAGE_MODES

    def count_needed_turns(self) -> int | None:
        """Return ``min_moves``, or None if every move has a reward."""
        return self.min_moves if self.reward == "sparse" else None
