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

# Colours of the cells in images, as RGB values from 0 to 255.
WALL_COLOUR = (110, 60, 45)
FLOOR_COLOUR = (235, 225, 200)
TARGET_COLOUR = (200, 40, 40)
AGENT_COLOUR = (40, 110, 60)
BOX_COLOUR = (190, 140, 70)
PLACED_BOX_COLOUR = (220, 90, 50)
BOX_EDGE_COLOUR = (80, 55, 25)


def render_text(level: str) -> str:
    """Return the level with spaces between the signs. Each sign is then a separate token."""
    return "\n".join(" ".join(line) for line in level.split("\n"))


def render_image(level: str, tile_size: int) -> np.ndarray:
    """Return the level as RGB image, uint8 [rows * tile_size, columns * tile_size, 3]."""
    tile_images = {symbol: _draw_tile(symbol, tile_size) for symbol in set(level) - {"\n"}}
    return np.concatenate(
        [
            np.concatenate([tile_images[symbol] for symbol in line], axis=1)
            for line in level.split("\n")
        ],
        axis=0,
    )


def _draw_tile(symbol: str, tile_size: int) -> np.ndarray:
    """Return the image of one cell, uint8 [tile_size, tile_size, 3]."""
    image = np.empty((tile_size, tile_size, 3), dtype=np.uint8)
    image[:] = WALL_COLOUR if symbol == WALL else FLOOR_COLOUR
    # Distance of each pixel row or column from the middle: 0 in the middle, 1 at the edge.
    distances = np.abs(np.arange(tile_size) - (tile_size - 1) / 2) / (tile_size / 2)
    row_distances = distances[:, None]
    column_distances = distances[None, :]
    if symbol in (TARGET, AGENT_ON_TARGET):
        image[row_distances + column_distances < 0.7] = TARGET_COLOUR
    if symbol in (BOX, BOX_ON_TARGET):
        image[np.maximum(row_distances, column_distances) < 0.85] = BOX_EDGE_COLOUR
        image[np.maximum(row_distances, column_distances) < 0.65] = (
            PLACED_BOX_COLOUR if symbol == BOX_ON_TARGET else BOX_COLOUR
        )
    if symbol in (AGENT, AGENT_ON_TARGET):
        squared_radius = row_distances**2 + column_distances**2
        image[(squared_radius < 0.6) & ((squared_radius > 0.25) | (symbol == AGENT))] = AGENT_COLOUR
    return image
