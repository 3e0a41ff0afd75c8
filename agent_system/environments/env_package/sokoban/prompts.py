"""The storeroom in few words, for policies that cannot find their way on a map.

The room is drawn once, at the start. After that an observation says what is on the four sides, and
of every box that is not in its place how far away it is, and its target from there.
"""

from agent_system.environments.env_package.sokoban.levels import MOVES, Cell, moved

_FLOOR = {"_": "floor", ".": "floor", "#": "wall"}


def begin(text: str) -> str:
    """The room, then what ``shorten`` says."""
    short = shorten(text)
    return text if short == text else f"{text}\n{short}"


def shorten(text: str) -> str:
    """``left wall, down box, right floor, up floor; box 1 down, target 2 right``."""
    lines = text.splitlines()
    drawn = [line for line in lines if all(len(sign) == 1 for sign in line.split())]
    cells = {
        (row, column): sign
        for row, line in enumerate(drawn)
        for column, sign in enumerate(line.split())
    }
    here = next((cell for cell, sign in cells.items() if sign in "@+"), None)
    if here is None:
        return text
    said = "".join(f"{line}\n" for line in lines if line not in drawn)
    sides = [f"{move} {_what(cells, here, step)}" for move, step in MOVES.items()]
    parts = [", ".join(sides), *_boxes(cells, here)]
    return f"{said}{'; '.join(parts)}"


def _what(cells: dict[Cell, str], here: Cell, step: Cell) -> str:
    """What stands on one side; a box that does not give way is stuck."""
    sign = cells.get(moved(here, step), "#")
    if sign in _FLOOR:
        return _FLOOR[sign]
    behind = cells.get(moved(here, step, 2), "#")
    return "box" if _FLOOR.get(behind) == "floor" else "stuck"


def _boxes(cells: dict[Cell, str], here: Cell) -> list[str]:
    """Every box that is not on a target, and from there the nearest target that is free."""
    free = [cell for cell, sign in cells.items() if sign in ".+"]
    said = []
    for box, sign in cells.items():
        if sign != "$":
            continue
        target = min(free, key=lambda cell: abs(cell[0] - box[0]) + abs(cell[1] - box[1]))
        said.append(f"box {_offset(here, box)}, target {_offset(box, target)}")
    return said


def _offset(start: Cell, end: Cell) -> str:
    """``2 up 1 left``."""
    down = end[0] - start[0]
    right = end[1] - start[1]
    parts = []
    if down:
        parts.append(f"{abs(down)} {'down' if down > 0 else 'up'}")
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return " ".join(parts)
