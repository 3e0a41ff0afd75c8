"""Text observations of MiniGrid and BabyAI: mission, direction, inventory and visible objects."""

import hashlib
from collections.abc import Mapping
from typing import Any

from agent_system.environments.env_package.gymnasium.text_descriptions import (
    GymnasiumWorld,
    TextDescription,
)

ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
COMPASS = ("east", "south", "west", "north")  # by MiniGrid's number of the direction
SIGNS = {
    "unseen": "?", "empty": ".", "floor": ".", "wall": "#", "door": "D", "key": "K",
    "ball": "B", "box": "X", "goal": "G", "lava": "~",
}  # fmt: skip
UNLISTED_KINDS = (
    "unseen",
    "empty",
    "floor",
    "wall",
)  # shown in the drawing only, not listed in words
RULES = """\
You move in a world of cells and see a part of it: A is you, and you look up in the drawing. \
# is a wall, . is free, ? is hidden, D a door, K a key, B a ball, X a box, G the goal, ~ lava.
go forward enters the cell before you, if it is free; pick up takes what is in it, drop puts down \
what you carry there, toggle opens a door or a box (a locked door needs the key of its colour in \
your hand). Do what the mission says."""


def describe_grid(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
    """Return an observation as text: mission, direction, inventory, drawing, list of objects."""
    del info  # empty
    image = observation["image"]
    held_object = world.unwrapped.carrying
    inventory = f"{held_object.color} {held_object.type}" if held_object is not None else "nothing"
    object_texts = _list_objects(image)
    facing = COMPASS[int(observation["direction"])]
    lines = [
        f"Mission: {observation['mission']}",
        f"You face {facing} and carry {inventory}.",
        *_draw_view(image),
        f"You see: {', '.join(object_texts)}." if object_texts else "You see nothing but cells.",
    ]
    return "\n".join(lines)


def grid_state(world: GymnasiumWorld) -> str:
    """Return a hash of all cells, the agent's position and direction, and the held object.

    MiniGrid's own ``hash`` does not contain the held object, and takes half of the time of a step.
    """
    base = world.unwrapped
    cells = b"".join(bytes(cell.encode()) if cell else b"-" for cell in base.grid.grid)
    agent = f"{tuple(map(int, base.agent_pos))} {int(base.agent_dir)}"
    held_object = base.carrying
    inventory = f"{held_object.color} {held_object.type}" if held_object is not None else ""
    digest = hashlib.blake2b(cells + agent.encode(), digest_size=8).hexdigest()
    return f"{digest} {inventory}"


def _draw_view(image: Any) -> list[str]:
    from minigrid.core.constants import IDX_TO_OBJECT

    width, height = image.shape[:2]
    rows = [
        [SIGNS.get(IDX_TO_OBJECT[int(image[column, row, 0])], "?") for column in range(width)]
        for row in range(height)
    ]
    rows[-1][width // 2] = "A"
    return [" ".join(row) for row in rows]


def _list_objects(image: Any) -> list[str]:
    """Return a text such as ``locked red door 2 ahead and 1 left`` per object, nearest first."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    width, height = image.shape[:2]
    objects_by_distance: list[tuple[int, str]] = []
    for column in range(width):
        for row in range(height):
            object_kind, colour, condition = map(int, image[column, row])
            ahead, right = height - 1 - row, column - width // 2
            name = IDX_TO_OBJECT[object_kind]
            # The agent's cell contains the object that it holds, which the text already names.
            if name in UNLISTED_KINDS or (ahead, right) == (0, 0):
                continue
            object_name = _object_name(name, IDX_TO_COLOR[colour], condition)
            objects_by_distance.append(
                (ahead + abs(right), f"{object_name} {_relative_position(ahead, right)}")
            )
    return [words for _, words in sorted(objects_by_distance)]


def _object_name(name: str, colour: str, condition: int) -> str:
    if name in ("goal", "lava"):
        return name
    condition_word = f"{('open', 'closed', 'locked')[condition]} " if name == "door" else ""
    return f"{condition_word}{colour} {name}"


def _relative_position(ahead: int, right: int) -> str:
    side_text = f"{abs(right)} {'right' if right > 0 else 'left'}"
    if not right:
        return f"{ahead} ahead"
    return f"{ahead} ahead and {side_text}" if ahead else side_text


def grid_description(actions: int) -> TextDescription:
    """Return the text description of a MiniGrid environment with the first ``actions`` actions."""
    return TextDescription(describe_grid, ACTIONS[:actions], RULES, state=grid_state)
