"""The storeroom in few words, for policies that cannot find their way on a map.

The room is drawn once, at the start. After that an observation says which sides are not free, and
of every box that is not in its place how far away it is, its target from there, and from which
cells it can be pushed closer to a target, or at all.
"""

from agent_system.environments.env_package.sokoban.levels import MOVES, Cell, moved

_FREE = "_.@+"  # the player is no obstacle to a box: he makes room by pushing it


def begin(text: str) -> str:
    """The room, then what ``shorten`` says."""
    short = shorten(text)
    return text if short == text else f"{text}\n{short}"


def shorten(text: str) -> str:
    """``up wall, down box; box 1 down, target 1 left, closer left from 1 down 1 right``."""
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
    sides = [f"{move} {what}" for move, step in MOVES.items() if (what := _what(cells, here, step))]
    parts = [", ".join(sides) or "all free", *_boxes(cells, here)]
    return f"{said}{'; '.join(parts)}"


def _what(cells: dict[Cell, str], here: Cell, step: Cell) -> str:
    """What stands on one side, nothing where it is free; a box that does not give way is stuck."""
    ahead = moved(here, step)
    if _is_free(cells, ahead):
        return ""
    if cells.get(ahead, "#") == "#":
        return "wall"
    return "box" if _is_free(cells, moved(here, step, 2)) else "stuck"


def _boxes(cells: dict[Cell, str], here: Cell) -> list[str]:
    """Every box that is not on a target, from there the nearest target that is free, and pushes.

    Only where no push brings it closer to any target are those named that bring it away.
    """
    free = [cell for cell, sign in cells.items() if sign in ".+"]
    said = []
    for box, sign in cells.items():
        if sign != "$":
            continue
        target = min(free, key=lambda cell: _to_go(box, [cell]))
        parts = [f"box {offset(here, box)}", f"target {offset(box, target)}"]
        pushes: dict[str, list[str]] = {"closer": [], "away": []}
        for move, step in MOVES.items():
            place = moved(box, step, -1)
            further = moved(box, step)
            if _is_free(cells, place) and _is_free(cells, further):
                kind = "closer" if _to_go(further, free) < _to_go(box, free) else "away"
                pushes[kind].append(f"{kind} {move} from {offset(here, place)}")
        said.append(", ".join(parts + (pushes["closer"] or pushes["away"])))
    return said


def _to_go(box: Cell, targets: list[Cell]) -> int:
    """Pushes to the nearest target, were there no walls."""
    return min(abs(row - box[0]) + abs(column - box[1]) for row, column in targets)


def _is_free(cells: dict[Cell, str], cell: Cell) -> bool:
    return cells.get(cell, "#") in _FREE


def offset(start: Cell, end: Cell) -> str:
    """``2 up 1 left``; ``here`` where the two are the same cell."""
    down = end[0] - start[0]
    right = end[1] - start[1]
    parts = []
    if down:
        parts.append(f"{abs(down)} {'down' if down > 0 else 'up'}")
    if right:
        parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return " ".join(parts) or "here"
