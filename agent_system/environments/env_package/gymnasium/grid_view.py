"""Text observations of MiniGrid and BabyAI: mission, direction, inventory and visible objects."""

from collections.abc import Mapping
from typing import Any

from agent_system.environments.env_package.gymnasium.telling import GymnasiumWorld, Telling

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
COMPASS = ("east", "south", "west", "north")  # by MiniGrid's number of the direction
SIGNS = {
    "unseen": "?", "empty": ".", "floor": ".", "wall": "#", "door": "D", "key": "K",
    "ball": "B", "box": "X", "goal": "G", "lava": "~",
}  # fmt: skip
PLAIN = ("unseen", "empty", "floor", "wall")  # shown in the drawing only, not listed in words
RULES = """\
You move in a world of cells and see a part of it: A is you, and you look up in the drawing. \
# is a wall, . is free, ? is hidden, D a door, K a key, B a ball, X a box, G the goal, ~ lava.
go forward enters the cell before you, if it is free; pick up takes what is in it, drop puts down \
what you carry there, toggle opens a door or a box (a locked door needs the key of its colour in \
your hand). Do what the mission says."""


def look(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
    """Return an observation as text: mission, direction, inventory, drawing, list of objects."""
    del info  # empty
    image = observation["image"]
    carried = world.unwrapped.carrying
    hands = f"{carried.color} {carried.type}" if carried is not None else "nothing"
    seen = _things(image)
    facing = COMPASS[int(observation["direction"])]
    lines = [
        f"Mission: {observation['mission']}",
        f"You face {facing} and carry {hands}.",
        *_drawn(image),
        f"You see: {', '.join(seen)}." if seen else "You see nothing but cells.",
    ]
    return "\n".join(lines)


def state(world: GymnasiumWorld) -> str:
    """Return MiniGrid's hash of the world and the object that the agent holds."""
    carried = world.unwrapped.carrying
    hands = f"{carried.color} {carried.type}" if carried is not None else ""
    return f"{world.unwrapped.hash()} {hands}"


def _drawn(image: Any) -> list[str]:
    from minigrid.core.constants import IDX_TO_OBJECT

    width, height = image.shape[:2]
    rows = [
        [SIGNS.get(IDX_TO_OBJECT[int(image[column, row, 0])], "?") for column in range(width)]
        for row in range(height)
    ]
    rows[-1][width // 2] = "A"
    return [" ".join(row) for row in rows]


def _things(image: Any) -> list[str]:
    """Return a text such as ``locked red door 2 ahead and 1 left`` per object, nearest first."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    width, height = image.shape[:2]
    found: list[tuple[int, str]] = []
    for column in range(width):
        for row in range(height):
            kind, colour, condition = map(int, image[column, row])
            ahead, right = height - 1 - row, column - width // 2
            name = IDX_TO_OBJECT[kind]
            # The cell of the agent shows the object that it holds, which is mentioned already.
            if name in PLAIN or (ahead, right) == (0, 0):
                continue
            words = _named(name, IDX_TO_COLOR[colour], condition)
            found.append((ahead + abs(right), f"{words} {_where(ahead, right)}"))
    return [words for _, words in sorted(found)]


def _named(name: str, colour: str, condition: int) -> str:
    if name in ("goal", "lava"):
        return name
    how = f"{('open', 'closed', 'locked')[condition]} " if name == "door" else ""
    return f"{how}{colour} {name}"


def _where(ahead: int, right: int) -> str:
    side = f"{abs(right)} {'right' if right > 0 else 'left'}"
    if not right:
        return f"{ahead} ahead"
    return f"{ahead} ahead and {side}" if ahead else side


def grid_telling(actions: int) -> Telling:
    """Return the text description of a MiniGrid environment with the first ``actions`` actions."""
    return Telling(look, ACTIONS[:actions], RULES, state=state)
