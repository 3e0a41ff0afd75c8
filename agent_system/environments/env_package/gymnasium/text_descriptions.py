"""Text descriptions of Gymnasium environments: toy text, classic control, MiniGrid and BabyAI.

The texts about toy text and classic control environments are in ``toy_text.yaml``. Observations of
MiniGrid and BabyAI are mission, direction, inventory and visible objects.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from agent_system.environments.env_package.gymnasium.settings import SuccessCondition

TAXI_MOVES = ("south", "north", "east", "west")  # moves of the taxi, by number
TAXI_STANDS = ("red", "green", "yellow", "blue")  # taxi stands, by number
IN_TAXI = 4  # location number of a passenger in the taxi
CLIFF_COLUMNS = 12  # columns of the cliff board

GRID_ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
COMPASS = ("east", "south", "west", "north")  # by MiniGrid's number of the direction
SIGNS = {
    "unseen": "?", "empty": ".", "floor": ".", "wall": "#", "door": "D", "key": "K",
    "ball": "B", "box": "X", "goal": "G", "lava": "~",
}  # fmt: skip
# Shown in the drawing only, not listed in words.
UNLISTED_KINDS = ("unseen", "empty", "floor", "wall")
GRID_RULES = """\
You move in a world of cells and see a part of it: A is you, and you look up in the drawing. \
# is a wall, . is free, ? is hidden, D a door, K a key, B a ball, X a box, G the goal, ~ lava.
go forward enters the cell before you, if it is free; pick up takes what is in it, drop puts down \
what you carry there, toggle opens a door or a box (a locked door needs the key of its colour in \
your hand). Do what the mission says."""

# Maps observation, info and environment to the text of the observation.
DescribeFunction = Callable[[Any, Mapping[str, Any], Any], str]


@dataclass(frozen=True)
class TextDescription:
    """Text description of one environment.

    ``describe`` returns the text of an observation. ``actions`` are the names of the actions by
    number. ``rules`` is text for the system message. ``state`` returns the part of the state of the
    environment that the observation does not show.
    """

    describe: DescribeFunction
    actions: Sequence[str]
    rules: str
    success_condition: SuccessCondition = "reward"
    state: Callable[[Any], str] = lambda _world: ""


def describe_lake(observation: Any, info: Mapping[str, Any], world: Any) -> str:
    """Return the map with the agent, one row per line."""
    del info  # holds the probability of the last transition
    cells = [[cell.decode() for cell in row] for row in world.unwrapped.desc]
    row, column = divmod(int(observation), len(cells[0]))
    signs = {"S": ".", "F": ".", "H": "O", "G": "G"}
    drawing = [[signs[cell] for cell in line] for line in cells]
    drawing[row][column] = "P"
    return "\n".join(" ".join(line) for line in drawing)


def describe_taxi(observation: Any, info: Mapping[str, Any], world: Any) -> str:
    """Return the taxi's position, its free sides, and the passenger's position and destination."""
    del info  # the free sides are read from the map
    row, column, passenger, destination = map(int, world.unwrapped.decode(int(observation)))
    stand_positions = [_format_cell(*stand) for stand in world.unwrapped.locs]
    free_sides = ", ".join(_free_sides(world.unwrapped.desc, row, column))
    passenger_place = "in your taxi"
    if passenger != IN_TAXI:
        passenger_place = f"at the {TAXI_STANDS[passenger]} stand ({stand_positions[passenger]})"
    return (
        f"You are at {_format_cell(row, column)}. Free sides: {free_sides}.\n"
        f"The passenger is {passenger_place} and wants to go to the {TAXI_STANDS[destination]} "
        f"stand ({stand_positions[destination]})."
    )


def _format_cell(row: Any, column: Any) -> str:
    return f"row {int(row)}, column {int(column)}"


def _free_sides(drawn: Any, row: int, column: int) -> list[str]:
    # The drawing has a frame. Between two cells it has a sign, a colon if there is no wall.
    line, character_index = row + 1, 2 * column + 1
    is_free = {
        "south": line + 2 < len(drawn),
        "north": row > 0,
        "east": drawn[line][character_index + 1] == b":",
        "west": drawn[line][character_index - 1] == b":",
    }
    return [side for side in TAXI_MOVES if is_free[side]]


def describe_cliff(observation: Any, info: Mapping[str, Any], world: Any) -> str:
    """Return the position of the agent. The rules give the position of everything else."""
    del info, world  # the position is the whole state
    return f"You are at {_format_cell(*divmod(int(observation), CLIFF_COLUMNS))}."


def describe_blackjack(observation: Any, info: Mapping[str, Any], world: Any) -> str:
    """Return the sum of the agent's cards and the dealer's visible card."""
    del info, world  # the dealer's second card is hidden
    total, dealer, ace = map(int, observation)
    ace_text = "with an ace that counts 11" if ace else "without an ace that counts 11"
    return f"Your cards add up to {total}, {ace_text}. The dealer shows {dealer}."


def _describe_numbers(*names: str) -> Any:
    """Return a function that describes a vector as ``name: value`` pairs."""

    def describe_vector(observation: Any, info: Mapping[str, Any], world: Any) -> str:
        del info, world  # the numbers are the state
        values = (f"{value:.3f}" for value in observation)
        named_values = (f"{name}: {value}" for name, value in zip(names, values, strict=True))
        return ", ".join(named_values)

    return describe_vector


def _read_descriptions() -> dict[str, TextDescription]:
    functions = {
        "lake": describe_lake,
        "taxi": describe_taxi,
        "cliff": describe_cliff,
        "blackjack": describe_blackjack,
    }
    path = Path(__file__).with_name("toy_text.yaml")
    entries = yaml.safe_load(path.read_text(encoding="utf-8"))
    return {
        name: TextDescription(
            functions[entry["describe"]]
            if "describe" in entry
            else _describe_numbers(*entry["numbers"]),
            tuple(entry["actions"]),
            entry["rules"],
            entry.get("success_condition", "reward"),
        )
        for name, entry in entries.items()
    }


TOY_DESCRIPTIONS = _read_descriptions()


def describe_grid(observation: Any, info: Mapping[str, Any], world: Any) -> str:
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


def grid_state(world: Any) -> str:
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
            words = f"{object_name} {_relative_position(ahead, right)}"
            objects_by_distance.append((ahead + abs(right), words))
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
    return TextDescription(describe_grid, GRID_ACTIONS[:actions], GRID_RULES, state=grid_state)
