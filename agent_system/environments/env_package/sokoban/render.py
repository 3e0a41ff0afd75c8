"""Rendering of a Sokoban level as text and as an image."""

import numpy as np

from agent_system.environments.env_package.sokoban.levels import (
    AGENT,
    AGENT_ON_TARGET,
    BOX,
    BOX_ON_TARGET,
    TARGET,
    WALL,
)

WALL_COLOUR = (110, 60, 45)
FLOOR_COLOUR = (235, 225, 200)
TARGET_COLOUR = (200, 40, 40)
AGENT_COLOUR = (40, 110, 60)
BOX_COLOUR = (190, 140, 70)
PLACED_COLOUR = (220, 90, 50)
EDGE_COLOUR = (80, 55, 25)


def render_text(level: str) -> str:
    """Return the level with blanks between its signs, so that each sign is its own token."""
    return "\n".join(" ".join(line) for line in level.split("\n"))


def render_image(level: str, tile: int) -> np.ndarray:
    """Return the level as RGB image, uint8 [rows * tile, columns * tile, 3]."""
    tiles = {sign: _draw_tile(sign, tile) for sign in set(level) - {"\n"}}
    return np.concatenate(
        [np.concatenate([tiles[sign] for sign in line], axis=1) for line in level.split("\n")],
        axis=0,
    )


def _draw_tile(sign: str, size: int) -> np.ndarray:
    """Return the image of one cell, uint8 [size, size, 3].

    Walls and floor are plain, a target is a diamond, a box is a square with an edge, and the agent
    is a disc.
    """
    cell = np.empty((size, size, 3), dtype=np.uint8)
    cell[:] = WALL_COLOUR if sign == WALL else FLOOR_COLOUR
    # Distance from the middle: 0 in the middle, 1 at the edge.
    across = np.abs(np.arange(size) - (size - 1) / 2) / (size / 2)
    rows = across[:, None]
    columns = across[None, :]
    if sign in (TARGET, AGENT_ON_TARGET):
        cell[rows + columns < 0.7] = TARGET_COLOUR
    if sign in (BOX, BOX_ON_TARGET):
        cell[np.maximum(rows, columns) < 0.85] = EDGE_COLOUR
        cell[np.maximum(rows, columns) < 0.65] = (
            PLACED_COLOUR if sign == BOX_ON_TARGET else BOX_COLOUR
        )
    if sign in (AGENT, AGENT_ON_TARGET):
        ring = rows**2 + columns**2
        cell[(ring < 0.6) & ((ring > 0.25) | (sign == AGENT))] = AGENT_COLOUR
    return cell
