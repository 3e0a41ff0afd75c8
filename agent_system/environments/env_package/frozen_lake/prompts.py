"""The lake in few words, for policies that cannot find themselves on a map.

The map is drawn once, at the start, for it never changes. After that an observation says where one
is and what lies on the four sides.
"""

from agent_system.environments.env_package.frozen_lake.drawing import GOAL, HERE, HOLE, SIDES, read

_NAMES = {HOLE: "hole", GOAL: "goal"}


def begin(text: str) -> str:
    """The map, then what ``shorten`` says."""
    return f"{text}\n{shorten(text)}"


def shorten(text: str) -> str:
    """``1 2: left hole, down ice, right edge, up ice``: row and column, and what is around."""
    said, cells = read(text)
    here = next((cell for cell, sign in cells.items() if sign == HERE), None)
    if here is None:
        return text
    around = []
    for side, (down, right) in SIDES.items():
        sign = cells.get((here[0] + down, here[1] + right))
        around.append(f"{side} {'edge' if sign is None else _NAMES.get(sign, 'ice')}")
    return f"{said}{here[0]} {here[1]}: {', '.join(around)}"
