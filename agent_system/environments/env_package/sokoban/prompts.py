"""Compact observations of Sokoban, for policies that cannot navigate a map.

Only the first observation contains the map. Every observation lists the blocked sides of the agent.
For each box outside a target it gives:

- the offset of the box from the agent, and of the nearest free target from the box,
- the pushes that bring the box closer to a target, with the cells to push from. If there are none,
  it gives the pushes away.
"""

from agent_system.environments.env_package.sokoban.levels import MOVES, Cell, shift_cell

_FREE = "_.@+"  # the agent's cell counts as free: the agent leaves it by pushing


def describe_with_map(text: str) -> str:
    """Return the map, followed by the text of ``describe_map``."""
    description = describe_map(text)
    return text if description == text else f"{text}\n{description}"


def describe_map(text: str) -> str:
    """Describe a map relative to the agent. Text without a map is returned unchanged.

    Example: ``up wall, down box; box 1 down, target 1 left, closer left from 1 down 1 right``.
    """
    lines = text.splitlines()
    map_lines = [line for line in lines if all(len(sign) == 1 for sign in line.split())]
    cells = {
        (row, column): sign
        for row, line in enumerate(map_lines)
        for column, sign in enumerate(line.split())
    }
    agent = next((cell for cell, sign in cells.items() if sign in "@+"), None)
    if agent is None:
        return text
    header = "".join(f"{line}\n" for line in lines if line not in map_lines)
    side_texts = [
        f"{move} {obstacle}"
        for move, step in MOVES.items()
        if (obstacle := _describe_obstacle(cells, agent, step))
    ]
    description_parts = [", ".join(side_texts) or "all free", *_describe_boxes(cells, agent)]
    return f"{header}{'; '.join(description_parts)}"


def _describe_obstacle(cells: dict[Cell, str], here: Cell, step: Cell) -> str:
    """Return the obstacle next to ``here`` in direction ``step``.

    It is "" (free), ``wall``, ``box``, or ``stuck`` for a box that cannot be pushed.
    """
    ahead = shift_cell(here, step)
    if _is_free(cells, ahead):
        return ""
    if cells.get(ahead, "#") == "#":
        return "wall"
    return "box" if _is_free(cells, shift_cell(here, step, 2)) else "stuck"


def _describe_boxes(cells: dict[Cell, str], here: Cell) -> list[str]:
    """Describe each box outside a target: its offset, its nearest free target, and its pushes.

    Pushes away from the targets are listed only if no push brings the box closer to one.
    """
    free_targets = [cell for cell, sign in cells.items() if sign in ".+"]
    descriptions = []
    for box, sign in cells.items():
        if sign != "$":
            continue
        target = min(free_targets, key=lambda cell: _min_pushes(box, [cell]))
        texts = [f"box {describe_offset(here, box)}", f"target {describe_offset(box, target)}"]
        pushes: dict[str, list[str]] = {"closer": [], "away": []}
        for move, step in MOVES.items():
            push_cell = shift_cell(box, step, -1)
            next_cell = shift_cell(box, step)
            if _is_free(cells, push_cell) and _is_free(cells, next_cell):
                effect = (
                    "closer"
                    if _min_pushes(next_cell, free_targets) < _min_pushes(box, free_targets)
                    else "away"
                )
                pushes[effect].append(f"{effect} {move} from {describe_offset(here, push_cell)}")
        descriptions.append(", ".join(texts + (pushes["closer"] or pushes["away"])))
    return descriptions


def _min_pushes(box: Cell, targets: list[Cell]) -> int:
    """Return the number of pushes to the nearest target, without regard to walls."""
    return min(abs(row - box[0]) + abs(column - box[1]) for row, column in targets)


def _is_free(cells: dict[Cell, str], cell: Cell) -> bool:
    return cells.get(cell, "#") in _FREE


def describe_offset(start: Cell, end: Cell) -> str:
    """Return the offset from ``start`` to ``end``: ``2 up 1 left``, or ``here`` if equal."""
    down = end[0] - start[0]
    right = end[1] - start[1]
    offset_parts = []
    if down:
        offset_parts.append(f"{abs(down)} {'down' if down > 0 else 'up'}")
    if right:
        offset_parts.append(f"{abs(right)} {'right' if right > 0 else 'left'}")
    return " ".join(offset_parts) or "here"
