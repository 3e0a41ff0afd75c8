"""Text descriptions of Gymnasium environments: one record per environment.

The texts about toy text and classic control environments are in ``toy_text.yaml``.
"""

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
