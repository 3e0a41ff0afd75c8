"""Sokoban levels: a room at random, the boxes on their targets, and from there backwards.

All ways backwards are followed breadth first, so every start state that is found comes with a
shortest solution, and a level is solvable because it was made from its solution. States are
``(player, boxes)`` with cells ``(row, column)``.
"""

import random
from collections.abc import Iterator
from functools import lru_cache

from agent_system.environments.env_package.sokoban.settings import NAME, SokobanSettings
from verl.utils.seeds import derive_seed

Cell = tuple[int, int]
State = tuple[Cell, tuple[Cell, ...]]
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, PLAYER, PLAYER_ON_TARGET = "#_.$*@+"
WALL_SHARE = 0.2  # of the cells inside the outer walls
# Of one room; the levels of a larger one are drawn from the states nearest to its solution.
MAX_STATES = 8_000
VAL_SHARE = 5  # one level in five may be held out
PATIENCE = 300  # rooms without a new level before giving up


def moved(cell: Cell, step: Cell, times: int = 1) -> Cell:
    """The cell ``times`` steps away."""
    return cell[0] + times * step[0], cell[1] + times * step[1]


@lru_cache(maxsize=4)
def levels(settings: SokobanSettings) -> dict[str, list[tuple[str, list[str]]]]:
    """For each split, different levels as (text, shortest solution). A level and its mirror images
    count as one.

    Raises ``ValueError`` when rooms of these settings have no such levels.
    """
    wanted = {"train": settings.train_levels, "val": settings.val_levels}
    found: dict[str, list] = {"train": [], "val": []}
    known: set[str] = set()
    number = last_new = 0
    while number < last_new + PATIENCE and any(
        len(found[split]) < wanted[split] for split in wanted
    ):
        level = make_level(settings, random.Random(derive_seed(NAME, settings.level_seed, number)))
        number += 1
        if level is None or (name := canonical(level[0])) in known:
            continue
        # Mirror images have one name, and so are on the same side of the split.
        split = "train" if derive_seed(NAME, name) % VAL_SHARE else "val"
        if len(found[split]) < wanted[split]:
            known.add(name)
            found[split].append(level)
            last_new = number
    if not all(found.values()):
        raise ValueError(
            f"env.{NAME}: no levels of {settings.min_moves} to {settings.search_depth} moves "
            f"(min_moves, search_depth) in rooms of {list(settings.dim_room)} (dim_room) with "
            f"{settings.num_boxes} boxes (num_boxes); "
            "make the rooms larger, or the range of moves wider"
        )
    return found


def make_level(settings: SokobanSettings, draw: random.Random) -> tuple[str, list[str]] | None:
    """One level and its shortest solution; None where the room that was drawn has none."""
    floor = _room(settings, draw)
    # Targets must be free of boxes at the start, so the room has to hold both and the player.
    if len(floor) < 2 * settings.num_boxes + 1:
        return None
    targets = tuple(sorted(draw.sample(sorted(floor), settings.num_boxes)))
    layers, way = _backwards(floor, targets, settings.search_depth)
    # A box that stands on its target at the start would be no work.
    starts = [
        [s for s in layer if not set(s[1]) & set(targets)] for layer in layers[settings.min_moves :]
    ]
    starts = [layer for layer in starts if layer]
    if not starts:
        return None
    # First a number of moves, then a state: far states are more, and would be nearly all levels.
    state = draw.choice(draw.choice(starts))
    return draw_level(settings.dim_room, floor, targets, state), list(_follow(state, way))


def draw_level(
    size: tuple[int, int], floor: set[Cell], targets: tuple[Cell, ...], state: State
) -> str:
    """The level as text, a line per row, in the signs of the usual XSB format (floor is ``_``)."""
    player, boxes = state

    def sign(cell: Cell) -> str:
        if cell not in floor:
            return WALL
        kind = 2 if cell in boxes else 1 if cell == player else 0
        return ((FLOOR, PLAYER, BOX), (TARGET, PLAYER_ON_TARGET, BOX_ON_TARGET))[cell in targets][
            kind
        ]

    return "\n".join(
        "".join(sign((row, column)) for column in range(size[1])) for row in range(size[0])
    )


def canonical(level: str) -> str:
    """The same text for a level, its rotations and its mirror images."""
    rows = level.split("\n")
    same = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
        same += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return min(same)


def _room(settings: SokobanSettings, draw: random.Random) -> set[Cell]:
    """The floor: what hangs together most when walls are strewn over the room."""
    height, width = settings.dim_room
    cells = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    left = {cell for cell in cells if draw.random() >= WALL_SHARE}
    largest: set[Cell] = set()
    while left:
        part = set()
        # The least cell, for a set has no order that is the same in every process.
        edge = [min(left)]
        while edge:
            cell = edge.pop()
            if cell in left:
                left.discard(cell)
                part.add(cell)
                edge += [moved(cell, step) for step in MOVES.values()]
        largest = max(largest, part, key=len)
    return largest


def _backwards(
    floor: set[Cell], targets: tuple[Cell, ...], depth: int
) -> tuple[list[list[State]], dict]:
    """States by the number of moves they are away from solved, and for each the move that leads
    nearer.
    """
    layers = [[(cell, targets) for cell in sorted(floor) if cell not in targets]]
    way: dict[State, tuple[str, State] | None] = dict.fromkeys(layers[0])
    for _ in range(depth):
        layers.append([])
        for state in layers[-2]:
            if len(way) >= MAX_STATES:
                return layers, way
            for move, before in _before(floor, state):
                if before not in way:
                    way[before] = (move, state)
                    layers[-1].append(before)
    return layers, way


def _before(floor: set[Cell], state: State) -> Iterator[tuple[str, State]]:
    """Every (move, state) whose move leads to ``state``: the player walked, or pushed the box in
    front of him.
    """
    player, boxes = state
    for move, step in MOVES.items():
        came_from = moved(player, step, -1)
        ahead = moved(player, step)
        if came_from not in floor or came_from in boxes:
            continue
        yield move, (came_from, boxes)
        # Backwards a push is a pull: the player steps away, and the box in front of him comes
        # along.
        if ahead in boxes:
            yield move, (came_from, tuple(sorted(player if box == ahead else box for box in boxes)))


def _follow(state: State, way: dict) -> Iterator[str]:
    while (step := way[state]) is not None:
        move, state = step
        yield move
