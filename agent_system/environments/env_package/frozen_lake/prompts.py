"""Short observations of the lake, for policies that cannot locate themselves on a map.

The map never changes, so it is drawn only at the start. Later observations give the position and
the four neighbouring cells.
"""

from agent_system.environments.env_package.frozen_lake.drawing import GOAL, HERE, HOLE, SIDES, read

_NAMES = {HOLE: "hole", GOAL: "goal"}


def begin(text: str) -> str:
    """Return the map, followed by the text of ``shorten_observation``."""
    short = shorten(text)
    return text if short == text else f"{text}\n{short}"


def shorten(text: str) -> str:
    """Return row, column and neighbours: ``1 2: left hole, down ice, right edge, up ice``."""
    said, cells = read(text)
    here = next((cell for cell, sign in cells.items() if sign == HERE), None)
    if here is None:
        return text
    around = []
    for side, (down, right) in SIDES.items():
        sign = cells.get((here[0] + down, here[1] + right))
        around.append(f"{side} {'edge' if sign is None else _NAMES.get(sign, 'ice')}")
    return f"{said}{here[0]} {here[1]}: {', '.join(around)}"
