"""Text descriptions of Gymnasium environments: toy text, classic control, MiniGrid and BabyAI.

Rules and action names of toy text and classic control environments are in ``toy_text.yaml``. An
observation of MiniGrid or BabyAI states mission, direction, inventory and visible objects.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.environments.env_package.frozen_lake.prompts import draw_map
from agent_system.environments.env_package.gymnasium.settings import SuccessCondition
from verl.utils.files import read_yaml_table

TAXI_MOVES = ("south", "north", "east", "west")  # in the order of their action numbers
TAXI_STANDS = ("red", "green", "yellow", "blue")  # in the order of their location numbers
PASSENGER_IN_TAXI = 4  # number of the location "in the taxi", after the four stands
CLIFF_COLUMNS = 12  # number of columns of the CliffWalking board

GRID_ACTIONS = ("turn left", "turn right", "go forward", "pick up", "drop", "toggle", "done")
DIRECTION_NAMES = ("east", "south", "west", "north")  # in the order of MiniGrid's direction numbers
SYMBOLS_BY_KIND = {
    "unseen": "?", "empty": ".", "floor": ".", "wall": "#", "door": "D", "key": "K",
    "ball": "B", "box": "X", "goal": "G", "lava": "~",
}  # fmt: skip
# Kinds of cells that are only drawn. All other kinds are also listed in words.
KINDS_WITHOUT_TEXT = ("unseen", "empty", "floor", "wall")
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

    ``describe`` returns the text of an observation. ``actions`` are in the order of their numbers.
    ``state`` returns a text about the part of the state that the observation does not show. It is
    added to the anchor.
    """

    describe: DescribeFunction
    actions: Sequence[str]
    rules: str
    success_condition: SuccessCondition = "reward"
    state: Callable[[Any], str] = lambda _gym_env: ""


def describe_lake(observation: Any, _info: Mapping[str, Any], gym_env: Any) -> str:
    """Return the map with the agent, one row per line."""
    rows = [b"".join(row).decode() for row in gym_env.unwrapped.desc]
    return draw_map(rows, divmod(int(observation), len(rows[0])))


def describe_taxi(observation: Any, _info: Mapping[str, Any], gym_env: Any) -> str:
    """Return positions of taxi and passenger, destination, and sides of the taxi without a wall."""
    row, column, passenger_location, destination = map(
        int, gym_env.unwrapped.decode(int(observation))
    )
    stand_positions = [_format_cell(*stand) for stand in gym_env.unwrapped.locs]
    free_sides = ", ".join(_list_free_sides(gym_env.unwrapped.desc, row, column))
    passenger_place = "in your taxi"
    if passenger_location != PASSENGER_IN_TAXI:
        stand_name = TAXI_STANDS[passenger_location]
        passenger_place = f"at the {stand_name} stand ({stand_positions[passenger_location]})"
    return (
        f"You are at {_format_cell(row, column)}. Free sides: {free_sides}.\n"
        f"The passenger is {passenger_place} and wants to go to the {TAXI_STANDS[destination]} "
        f"stand ({stand_positions[destination]})."
    )


def _format_cell(row: Any, column: Any) -> str:
    return f"row {int(row)}, column {int(column)}"


def _list_free_sides(drawn_map: Any, row: int, column: int) -> list[str]:
    # The map has a frame of one character. Between two cells it has a colon if there is no wall.
    line_index, character_index = row + 1, 2 * column + 1
    free_by_side = {
        "south": line_index + 2 < len(drawn_map),
        "north": row > 0,
        "east": drawn_map[line_index][character_index + 1] == b":",
        "west": drawn_map[line_index][character_index - 1] == b":",
    }
    return [side for side in TAXI_MOVES if free_by_side[side]]


def describe_cliff(observation: Any, _info: Mapping[str, Any], _gym_env: Any) -> str:
    """Return the position of the agent. The rules state where the cliff and the goal are."""
    return f"You are at {_format_cell(*divmod(int(observation), CLIFF_COLUMNS))}."


def describe_blackjack(observation: Any, _info: Mapping[str, Any], _gym_env: Any) -> str:
    card_sum, dealer_card, has_usable_ace = map(int, observation)
    ace_text = "with an ace that counts 11" if has_usable_ace else "without an ace that counts 11"
    return f"Your cards add up to {card_sum}, {ace_text}. The dealer shows {dealer_card}."


def _make_vector_formatter(*names: str) -> Any:
    """Return a function that formats a vector as ``name: value`` pairs."""

    def describe_vector(observation: Any, _info: Mapping[str, Any], _gym_env: Any) -> str:
        number_texts = (f"{value:.3f}" for value in observation)
        named_values = (f"{name}: {value}" for name, value in zip(names, number_texts, strict=True))
        return ", ".join(named_values)

    return describe_vector


def _read_descriptions() -> dict[str, TextDescription]:
    describe_functions = {
        "lake": describe_lake,
        "taxi": describe_taxi,
        "cliff": describe_cliff,
        "blackjack": describe_blackjack,
    }
    return {
        env_id: TextDescription(
            describe_functions[entry["describe"]]
            if "describe" in entry
            else _make_vector_formatter(*entry["numbers"]),
            tuple(entry["actions"]),
            entry["rules"],
            entry.get("success_condition", "reward"),
        )
        for env_id, entry in read_yaml_table(__file__, "toy_text.yaml").items()
    }


TOY_DESCRIPTIONS = _read_descriptions()


def describe_grid(observation: Any, _info: Mapping[str, Any], gym_env: Any) -> str:
    image = observation["image"]
    held_object = gym_env.unwrapped.carrying
    inventory = f"{held_object.color} {held_object.type}" if held_object is not None else "nothing"
    object_texts = _list_objects(image)
    direction = DIRECTION_NAMES[int(observation["direction"])]
    lines = [
        f"Mission: {observation['mission']}",
        f"You face {direction} and carry {inventory}.",
        *_draw_view(image),
        f"You see: {', '.join(object_texts)}." if object_texts else "You see nothing but cells.",
    ]
    return "\n".join(lines)


def describe_grid_state(gym_env: Any) -> str:
    """Return a hash of all cells and the agent, and the name of the held object.

    MiniGrid's own ``hash`` ignores the held object and is slow.
    """
    base_env = gym_env.unwrapped
    cell_bytes = b"".join(bytes(cell.encode()) if cell else b"-" for cell in base_env.grid.grid)
    agent_state = f"{tuple(map(int, base_env.agent_pos))} {int(base_env.agent_dir)}"
    held_object = base_env.carrying
    inventory = f"{held_object.color} {held_object.type}" if held_object is not None else ""
    state_hash = hashlib.blake2b(cell_bytes + agent_state.encode(), digest_size=8).hexdigest()
    return f"{state_hash} {inventory}"


def _draw_view(image: Any) -> list[str]:
    from minigrid.core.constants import IDX_TO_OBJECT

    width, height = image.shape[:2]
    rows = [
        [
            SYMBOLS_BY_KIND.get(IDX_TO_OBJECT[int(image[column, row, 0])], "?")
            for column in range(width)
        ]
        for row in range(height)
    ]
    rows[-1][width // 2] = "A"
    return [" ".join(row) for row in rows]


def _list_objects(image: Any) -> list[str]:
    """Describe each visible object: ``locked red door 2 ahead and 1 left``. Nearest first."""
    from minigrid.core.constants import IDX_TO_COLOR, IDX_TO_OBJECT

    width, height = image.shape[:2]
    distances_and_texts: list[tuple[int, str]] = []
    for column in range(width):
        for row in range(height):
            object_kind, colour, door_state = map(int, image[column, row])
            steps_ahead, steps_right = height - 1 - row, column - width // 2
            name = IDX_TO_OBJECT[object_kind]
            # The agent's cell shows the held object, which is already stated as inventory.
            if name in KINDS_WITHOUT_TEXT or (steps_ahead, steps_right) == (0, 0):
                continue
            object_name = _format_object(name, IDX_TO_COLOR[colour], door_state)
            object_text = f"{object_name} {_format_relative_position(steps_ahead, steps_right)}"
            distances_and_texts.append((steps_ahead + abs(steps_right), object_text))
    return [object_text for _, object_text in sorted(distances_and_texts)]


def _format_object(name: str, colour: str, door_state: int) -> str:
    if name in ("goal", "lava"):
        return name
    door_state_word = f"{('open', 'closed', 'locked')[door_state]} " if name == "door" else ""
    return f"{door_state_word}{colour} {name}"


def _format_relative_position(steps_ahead: int, steps_right: int) -> str:
    side_text = f"{abs(steps_right)} {'right' if steps_right > 0 else 'left'}"
    if not steps_right:
        return f"{steps_ahead} ahead"
    return f"{steps_ahead} ahead and {side_text}" if steps_ahead else side_text


def make_grid_description(action_count: int) -> TextDescription:
    """Return the text description of a MiniGrid environment.

    It uses the first ``action_count`` actions of ``GRID_ACTIONS``.
    """
    return TextDescription(
        describe_grid, GRID_ACTIONS[:action_count], GRID_RULES, state=describe_grid_state
    )
