"""Compact observations of Sokoban, for policies that cannot navigate a map.

Only the first observation contains the map. Every observation lists the obstacles next to the
agent. For each box that is not on a target it lists:

- the offset of the box from the agent, and of the nearest free target from the box,
- the pushes that bring the box closer to a target, and the offsets of the cells to push from. If
  there is no such push, it lists the pushes away from targets.
"""

from agent_system.environments.env_package.frozen_lake.prompts import parse_drawn_map
from agent_system.environments.env_package.sokoban.levels import MOVES, Cell, shift_cell

# Signs of cells into which a box can be pushed. The agent's own cell counts, because it moves away.
_FREE_SYMBOLS = "_.@+"


def append_map_description(text: str) -> str:
    description = describe_map(text)
    return text if description == text else f"{text}\n{description}"


def describe_map(text: str) -> str:
    """Replace the map in ``text`` by a description relative to the agent.

    Example: ``up wall, down box; box 1 down, target 1 left, closer left from 1 down 1 right``. The
    last part means: a push to the left brings the box closer to a target. The agent must push from
    the cell that is 1 down and 1 right of it.
    """
    text_above_map, symbols_by_cell = parse_drawn_map(text)
    agent_cell = next((cell for cell, symbol in symbols_by_cell.items() if symbol in "@+"), None)
    if agent_cell is None:
        return text
    obstacle_texts = [
        f"{move} {obstacle}"
        for move, direction in MOVES.items()
        if (obstacle := _describe_obstacle(symbols_by_cell, agent_cell, direction))
    ]
    description_parts = [
        ", ".join(obstacle_texts) or "all free",
        *_describe_boxes(symbols_by_cell, agent_cell),
    ]
    return f"{text_above_map}{'; '.join(description_parts)}"


def _describe_obstacle(symbols_by_cell: dict[Cell, str], agent_cell: Cell, direction: Cell) -> str:
    """Return ``wall``, ``box``, ``stuck`` (an immovable box), or "" for a free cell."""
    next_cell = shift_cell(agent_cell, direction)
    if _is_free(symbols_by_cell, next_cell):
        return ""
    if symbols_by_cell.get(next_cell, "#") == "#":
        return "wall"
    return "box" if _is_free(symbols_by_cell, shift_cell(agent_cell, direction, 2)) else "stuck"


def _describe_boxes(symbols_by_cell: dict[Cell, str], agent_cell: Cell) -> list[str]:
    """Describe each box that is not on a target: offset, nearest free target, useful pushes."""
    free_targets = [cell for cell, symbol in symbols_by_cell.items() if symbol in ".+"]
    descriptions = []
    for box, symbol in symbols_by_cell.items():
        if symbol != "$":
            continue
        nearest_target = min(free_targets, key=lambda cell: _count_min_pushes(box, [cell]))
        box_texts = [
            f"box {describe_offset(agent_cell, box)}",
            f"target {describe_offset(box, nearest_target)}",
        ]
        pushes_by_effect: dict[str, list[str]] = {"closer": [], "away": []}
        for move, direction in MOVES.items():
            push_cell = shift_cell(box, direction, -1)
            next_cell = shift_cell(box, direction)
            if _is_free(symbols_by_cell, push_cell) and _is_free(symbols_by_cell, next_cell):
                effect = (
                    "closer"
                    if _count_min_pushes(next_cell, free_targets)
                    < _count_min_pushes(box, free_targets)
                    else "away"
                )
                pushes_by_effect[effect].append(
                    f"{effect} {move} from {describe_offset(agent_cell, push_cell)}"
                )
        descriptions.append(
            ", ".join(box_texts + (pushes_by_effect["closer"] or pushes_by_effect["away"]))
        )
    return descriptions


def _count_min_pushes(box: Cell, targets: list[Cell]) -> int:
    """Return the number of pushes from ``box`` to the nearest target, if there were no walls."""
    return min(abs(row - box[0]) + abs(column - box[1]) for row, column in targets)


def _is_free(symbols_by_cell: dict[Cell, str], cell: Cell) -> bool:
    return symbols_by_cell.get(cell, "#") in _FREE_SYMBOLS


def describe_offset(start: Cell, end: Cell) -> str:
    """Return the offset from ``start`` to ``end``: ``2 up 1 left``, or ``here`` if equal."""
    rows_down = end[0] - start[0]
    columns_right = end[1] - start[1]
    offset_parts = []
    if rows_down:
        offset_parts.append(f"{abs(rows_down)} {'down' if rows_down > 0 else 'up'}")
    if columns_right:
        offset_parts.append(f"{abs(columns_right)} {'right' if columns_right > 0 else 'left'}")
    return " ".join(offset_parts) or "here"
