"""The ``env.sokoban`` section."""

from dataclasses import dataclass

from agent_system.environments.sections import setting

NAME = "sokoban"
IMAGES = ("image", "rgb_array")  # two names of one thing


@dataclass(frozen=True)
class SokobanSettings:
    """How rooms look and how hard they are.

    ``dim_room``: rows and columns, walls around included. ``search_depth`` and ``min_moves``: the
    most and the fewest moves of a shortest solution. ``reward``: ``sparse`` pays 1.0 for the last
    box, ``gym`` what gym-sokoban pays (-0.1 a move, +1 for a box on a target, -1 for one taken off,
    +10 at the end). ``tile``: pixels of a cell of an image.
    """

    mode: str = setting("text", choices=("text", *IMAGES))
    dim_room: tuple[int, int] = setting((6, 6), low=5, high=12)
    num_boxes: int = setting(1, low=1, high=4)
    search_depth: int = setting(12, low=1, high=60)
    min_moves: int = setting(2, low=1, high=60)
    reward: str = setting("sparse", choices=("sparse", "gym"))
    tile: int = setting(16, low=4, high=64)
    train_levels: int = setting(500, low=1)
    val_levels: int = setting(64, low=1)
    level_seed: int = setting(0, low=0)
    prompt: str = setting("full", choices=("full", "compact"))
