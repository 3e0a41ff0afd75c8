"""Short observations of the lake, for policies that cannot locate themselves on a map.

The map never changes, so it is drawn only at the start. Later observations give the position and
the four neighbouring cells.
"""

from collections.abc import Sequence

Cell = tuple[int, int]
AGENT_SYMBOL = "P"
HOLE_SYMBOL = "O"
GOAL_SYMBOL = "G"
# Offset (rows down, columns to the right) of each move, in the order of gymnasium's action numbers.
MOVES = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}
_CELL_NAMES = {HOLE_SYMBOL: "hole", GOAL_SYMBOL: "goal"}
# Maps gymnasium's signs to those of observations. The start cell (S) is shown as ice.
_DRAWN_SIGNS = str.maketrans("SFH", "..O")


def draw_map(rows: Sequence[str], agent_cell: Cell) -> str:
    """Return gymnasium's map with the agent, one row per line, and spaces between the signs."""
    symbol_rows = [list(row.translate(_DRAWN_SIGNS)) for row in rows]
    symbol_rows[agent_cell[0]][agent_cell[1]] = AGENT_SYMBOL
    return "\n".join(" ".join(line) for line in symbol_rows)


def parse_drawn_map(text: str) -> tuple[str, dict[Cell, str]]:
    """Split an observation into the text above the map and the map.

    The map is a dict from (row, column) to the sign of the cell, such as ``O`` for a hole.
    """
    lines = text.splitlines()
    # Lines of the map consist of single characters. Other lines contain longer words.
    drawing_lines = [line for line in lines if all(len(symbol) == 1 for symbol in line.split())]
    cells = {
        (row, column): symbol
        for row, line in enumerate(drawing_lines)
        for column, symbol in enumerate(line.split())
    }
    text_above = "".join(f"{line}\n" for line in lines if line not in drawing_lines)
    return text_above, cells


def append_map_description(text: str) -> str:
    short_text = shorten_observation(text)
    return text if short_text == text else f"{text}\n{short_text}"


def shorten_observation(text: str) -> str:
    """Return row, column and neighbours: ``1 2: left hole, down ice, right edge, up ice``."""
    text_above, cells = parse_drawn_map(text)
    agent_cell = next((cell for cell, symbol in cells.items() if symbol == AGENT_SYMBOL), None)
    if agent_cell is None:
        return text
    neighbour_texts = []
    for direction, (row_offset, column_offset) in MOVES.items():
        symbol = cells.get((agent_cell[0] + row_offset, agent_cell[1] + column_offset))
        neighbour_texts.append(
            f"{direction} {'edge' if symbol is None else _CELL_NAMES.get(symbol, 'ice')}"
        )
    return f"{text_above}{agent_cell[0]} {agent_cell[1]}: {', '.join(neighbour_texts)}"
