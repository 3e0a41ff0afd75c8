"""Text descriptions of Gymnasium's toy text and classic control environments."""

from collections.abc import Mapping
from typing import Any

from agent_system.environments.env_package.gymnasium.text_descriptions import (
    GymnasiumWorld,
    TextDescription,
)

LAKE_ACTIONS = ("left", "down", "right", "up")  # actions on the lake, by number
TAXI_MOVES = ("south", "north", "east", "west")  # moves of the taxi, by number
TAXI_STANDS = ("red", "green", "yellow", "blue")  # taxi stands, by number
IN_TAXI = 4  # location number of a passenger in the taxi
CLIFF_COLUMNS = 12  # columns of the cliff board


def describe_lake(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
    """Return the map with the agent, one row per line."""
    del info  # holds the probability of the last transition
    cells = [[cell.decode() for cell in row] for row in world.unwrapped.desc]
    row, column = divmod(int(observation), len(cells[0]))
    signs = {"S": ".", "F": ".", "H": "O", "G": "G"}
    drawing = [[signs[cell] for cell in line] for line in cells]
    drawing[row][column] = "P"
    return "\n".join(" ".join(line) for line in drawing)


def describe_taxi(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
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


def describe_cliff(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
    """Return the position of the agent. The rules give the position of everything else."""
    del info, world  # the position is the whole state
    return f"You are at {_format_cell(*divmod(int(observation), CLIFF_COLUMNS))}."


def describe_blackjack(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
    """Return the sum of the agent's cards and the dealer's visible card."""
    del info, world  # the dealer's second card is hidden
    total, dealer, ace = map(int, observation)
    ace_text = "with an ace that counts 11" if ace else "without an ace that counts 11"
    return f"Your cards add up to {total}, {ace_text}. The dealer shows {dealer}."


def _describe_numbers(*names: str) -> Any:
    """Return a function that describes a vector as ``name: value`` pairs."""

    def describe_vector(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
        del info, world  # the numbers are the state
        values = (f"{value:.3f}" for value in observation)
        named_values = (f"{name}: {value}" for name, value in zip(names, values, strict=True))
        return ", ".join(named_values)

    return describe_vector


_LAKE = TextDescription(
    describe_lake,
    LAKE_ACTIONS,
    "You cross a frozen lake, one cell per move. P is you, . is ice, O is a hole, G is the goal.\n"
    "Reach the goal; whoever enters a hole has lost. The ice is slippery unless it was asked to be "
    "otherwise: then only one move in three goes where you want, the others go to one side of it.",
)
_CLIFF = TextDescription(
    describe_cliff,
    ("up", "right", "down", "left"),
    "You walk on a board of 4 rows (0 to 3, from the top) and 12 columns (0 to 11). You start at "
    "row 3, column 0 and have to reach row 3, column 11.\nThe cells of row 3 between them are a "
    "cliff: whoever steps there is back at the start.",
    success_condition="end",
)
TOY_DESCRIPTIONS = {
    "FrozenLake-v1": _LAKE,
    "FrozenLake8x8-v1": _LAKE,
    "CliffWalking-v1": _CLIFF,
    "CliffWalkingSlippery-v1": _CLIFF,
    "Taxi-v4": TextDescription(
        describe_taxi,
        (*TAXI_MOVES, "pick up", "drop off"),
        "You drive a taxi on a board of 5 rows (0 to 4, south is down) and 5 columns (0 to 4). "
        "Fetch the passenger and set it down at the stand it wants to go to.",
    ),
    "Blackjack-v1": TextDescription(
        describe_blackjack,
        ("stick", "hit"),
        "You play blackjack against a dealer: hit takes a card, stick ends your turn. Whoever gets "
        "more than 21 has lost; then the higher sum wins. Faces count 10. The dealer takes cards "
        "until the sum is 17 or more.",
    ),
    "CartPole-v1": TextDescription(
        _describe_numbers("cart position", "cart velocity", "pole angle", "pole angular velocity"),
        ("left", "right"),
        "A pole stands on a cart. Push the cart left or right so that the pole does not fall: its "
        "angle must stay between -0.209 and 0.209, the position between -2.4 and 2.4.",
        success_condition="survival",
    ),
    "MountainCar-v0": TextDescription(
        _describe_numbers("position", "velocity"),
        ("left", "coast", "right"),
        "A car stands in a valley and is too weak to climb out at once. Swing until its position "
        "is 0.5 or more; the valley's lowest point is at -0.5.",
        success_condition="end",
    ),
    "Acrobot-v1": TextDescription(
        _describe_numbers(
            "cos of the first angle",
            "sin of the first angle",
            "cos of the second angle",
            "sin of the second angle",
            "first angular velocity",
            "second angular velocity",
        ),
        ("push left", "wait", "push right"),
        "Two rods hang from a hinge, one below the other. Push at the joint between them until the "
        "tip of the lower one is one length above the hinge.",
        success_condition="end",
    ),
}
