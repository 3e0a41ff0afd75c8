"""Policies that know the answer, for the environments of this repository: ``GOLD[env_name](task)`` plays one task."""

from agent_system.environments.base import Task
from tests.helpers.winning import Act, plan

WAYS = {"left": (0, -1), "down": (1, 0), "right": (0, 1), "up": (-1, 0)}


def cross_the_lake(task: Task) -> Act:
    """The shortest way over the ice, on ice that is not slippery."""
    rows = task["map"]
    ways: dict[tuple[int, int], list[str]] = {(0, 0): []}
    edge = [(0, 0)]
    for row, column in edge:  # grows while it is read: breadth first
        for move, (down, right) in WAYS.items():
            cell = row + down, column + right
            inside = 0 <= cell[0] < len(rows) and 0 <= cell[1] < len(rows)
            if inside and cell not in ways and rows[cell[0]][cell[1]] != "H":
                ways[cell] = [*ways[row, column], move]
                edge.append(cell)
    return plan(ways[len(rows) - 1, len(rows) - 1])


def push_the_boxes(task: Task) -> Act:
    """The solution that the level was made from."""
    return plan(task["solution"])


GOLD = {
    "frozen_lake": cross_the_lake,
    "sokoban": push_the_boxes,
}
