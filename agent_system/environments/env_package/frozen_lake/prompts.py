"""Short observations of the lake, for policies that cannot locate themselves on a map.

The map never changes, so it is drawn only at the start. Later observations give the position and
the four neighbouring cells.
"""

from agent_system.environments.env_package.frozen_lake.drawing import (
    GOAL,
    HERE,
    HOLE,
    MOVE_OFFSETS,
    read_drawing,
)

_NAMES = {HOLE: "hole", GOAL: "goal"}


def describe_with_map(text: str) -> str:
    """Return the map, followed by the text of ``shorten_observation``."""
    short_text = shorten_observation(text)
    return text if short_text == text else f"{text}\n{short_text}"


def shorten_observation(text: str) -> str:
    """Return row, column and neighbours: ``1 2: left hole, down ice, right edge, up ice``."""
    text_above, cells = read_drawing(text)
    position = next((cell for cell, sign in cells.items() if sign == HERE), None)
    if position is None:
        return text
    around = []
    for direction, (down, right) in MOVE_OFFSETS.items():
        sign = cells.get((position[0] + down, position[1] + right))
        around.append(f"{direction} {'edge' if sign is None else _NAMES.get(sign, 'ice')}")
    return f"{text_above}{position[0]} {position[1]}: {', '.join(around)}"
