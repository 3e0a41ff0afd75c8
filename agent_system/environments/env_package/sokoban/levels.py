"""Generation of Sokoban levels by backward search from solved states in a random room.

The search is breadth first, so every start state comes with a shortest solution, and every level is
solvable. A state is ``(agent cell, box cells)``, and a cell is ``(row, column)``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from agent_system.environments.env_package.sokoban.settings import NAME, SokobanSettings
from verl.utils.seeds import derive_seed

Cell = tuple[int, int]
State = tuple[Cell, tuple[Cell, ...]]
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, AGENT, AGENT_ON_TARGET = "#_.$*@+"
WALL_SHARE = 0.2  # share of walls among the cells inside the outer walls
# Maximum number of states that the search visits in one room. It stops there, so start states in
# large rooms are few moves from a solved state.
MAX_STATES = 8_000
VAL_DIVISOR = 5  # one level in five is held out
MAX_FAILED_ROOMS = 300  # consecutive rooms without a new level after which the generation stops


def shift_cell(cell: Cell, step: Cell, times: int = 1) -> Cell:
    """Return the cell that is ``times`` steps of ``step`` away from ``cell``."""
    return cell[0] + times * step[0], cell[1] + times * step[1]


@dataclass(frozen=True)
class SokobanRoom:
    """Room of a level, which does not change: rows and columns, floor cells, target cells."""

    size: tuple[int, int]
    floor: set[Cell]
    targets: tuple[Cell, ...]

    @classmethod
    def parse_level(cls, level: str) -> tuple["SokobanRoom", State]:
        """Return room and state of a level in the format of ``format_level``."""
        rows = level.split("\n")
        signs = {
            (row, column): sign for row, line in enumerate(rows) for column, sign in enumerate(line)
        }
        floor = {cell for cell, sign in signs.items() if sign != WALL}
        targets = tuple(cell for cell, sign in signs.items() if sign in ".*+")
        agent = next(cell for cell, sign in signs.items() if sign in "@+")
        boxes = tuple(cell for cell, sign in signs.items() if sign in "$*")
        return cls((len(rows), max(map(len, rows))), floor, targets), (agent, boxes)

    def format_level(self, state: State) -> str:
        """Return the level as text in the signs of the XSB format, with ``_`` for the floor."""
        agent, boxes = state

        def sign_of(cell: Cell) -> str:
            is_target = cell in self.targets
            if cell not in self.floor:
                return WALL
            if cell in boxes:
                return BOX_ON_TARGET if is_target else BOX
            if cell == agent:
                return AGENT_ON_TARGET if is_target else AGENT
            return TARGET if is_target else FLOOR

        height, width = self.size
        return "\n".join(
            "".join(sign_of((row, column)) for column in range(width)) for row in range(height)
        )

    def next_states(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each possible move with the state that it leads to."""
        agent, boxes = state
        for move, step in MOVES.items():
            ahead = shift_cell(agent, step)
            if ahead not in self.floor:
                continue
            if ahead not in boxes:
                yield move, (ahead, boxes)
                continue
            behind = shift_cell(ahead, step)
            if behind in self.floor and behind not in boxes:
                # Boxes are interchangeable. Sort them, so that equal positions are equal states.
                pushed = tuple(sorted(behind if box == ahead else box for box in boxes))
                yield move, (ahead, pushed)

    def count_placed_boxes(self, state: State) -> int:
        """Return the number of boxes on targets."""
        return sum(box in self.targets for box in state[1])

    def is_solved(self, state: State) -> bool:
        """Return True if every box is on a target."""
        return self.count_placed_boxes(state) == len(state[1])


@lru_cache(maxsize=4)
def generate_levels(settings: SokobanSettings) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the distinct levels of each split as (text, shortest solution).

    A level, its rotations and its mirror images count as one. Raises ``ValueError`` if a split gets
    no level.
    """
    level_counts = {"train": settings.train_levels, "val": settings.val_levels}
    levels_by_split: dict[str, list] = {"train": [], "val": []}
    known_levels: set[str] = set()
    attempt = last_new = 0
    while attempt < last_new + MAX_FAILED_ROOMS and any(
        len(levels_by_split[split]) < level_counts[split] for split in level_counts
    ):
        level = make_level(settings, random.Random(derive_seed(NAME, settings.level_seed, attempt)))
        attempt += 1
        if level is None or (name := canonical_level(level[0])) in known_levels:
            continue
        # Mirror images have one canonical text, so they are in the same split.
        split = "train" if derive_seed(NAME, name) % VAL_DIVISOR else "val"
        if len(levels_by_split[split]) < level_counts[split]:
            known_levels.add(name)
            levels_by_split[split].append(level)
            last_new = attempt
    if not all(levels_by_split.values()):
        raise ValueError(
            f"env.{NAME}: no levels of {settings.min_moves} to {settings.search_depth} moves "
            f"(min_moves, search_depth) in rooms of {list(settings.dim_room)} (dim_room) with "
            f"{settings.num_boxes} boxes (num_boxes); "
            "fix: make the rooms larger, or the range of moves wider"
        )
    return levels_by_split


def make_level(settings: SokobanSettings, rng: random.Random) -> tuple[str, list[str]] | None:
    """Draw a level and its shortest solution. Return None if the drawn room allows no level."""
    floor = _draw_floor(settings, rng)
    # At the start no box is on a target, so boxes, targets and the agent need distinct cells.
    if len(floor) < 2 * settings.num_boxes + 1:
        return None
    targets = tuple(sorted(rng.sample(sorted(floor), settings.num_boxes)))
    layers, next_moves = _search_backwards(floor, targets, settings.search_depth)
    # Start states have no box on a target.
    start_layers = [
        [s for s in layer if not set(s[1]) & set(targets)] for layer in layers[settings.min_moves :]
    ]
    start_layers = [layer for layer in start_layers if layer]
    if not start_layers:
        return None
    # Choose the number of moves first, then a state. Most states need many moves, so a uniform
    # choice among states would rarely give an easy level.
    state = rng.choice(rng.choice(start_layers))
    level = SokobanRoom(settings.dim_room, floor, targets).format_level(state)
    solution = []
    while (step := next_moves[state]) is not None:
        move, state = step
        solution.append(move)
    return level, solution


def canonical_level(level: str) -> str:
    """Return a text that is equal for a level, its rotations and its mirror images."""
    rows = level.split("\n")
    variants = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
        variants += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return min(variants)


def _draw_floor(settings: SokobanSettings, rng: random.Random) -> set[Cell]:
    """Return the floor: the largest connected area after random walls are placed in the room."""
    height, width = settings.dim_room
    cells = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    unassigned = {cell for cell in cells if rng.random() >= WALL_SHARE}
    largest_area: set[Cell] = set()
    while unassigned:
        area = set()
        # Start at the smallest cell: the first element of a set differs between processes.
        frontier = [min(unassigned)]
        while frontier:
            cell = frontier.pop()
            if cell in unassigned:
                unassigned.discard(cell)
                area.add(cell)
                frontier += [shift_cell(cell, step) for step in MOVES.values()]
        largest_area = max(largest_area, area, key=len)
    return largest_area


def _search_backwards(
    floor: set[Cell], targets: tuple[Cell, ...], depth: int
) -> tuple[list[list[State]], dict]:
    """Search backwards from the solved states, up to ``depth`` moves.

    Return two values: a list whose element n contains the states that are n moves from a solved
    state, and a dict from each state to its (move, next state) on a shortest solution. The value of
    a solved state is None.
    """
    layers = [[(cell, targets) for cell in sorted(floor) if cell not in targets]]
    next_moves: dict[State, tuple[str, State] | None] = dict.fromkeys(layers[0])
    for _ in range(depth):
        layer: list[State] = []
        layers.append(layer)
        for state in layers[-2]:
            if len(next_moves) >= MAX_STATES:
                return layers, next_moves
            new_states = {
                earlier: (move, state)
                for move, earlier in _earlier_states(floor, state)
                if earlier not in next_moves
            }
            next_moves |= new_states
            layer += new_states
    return layers, next_moves


def _earlier_states(floor: set[Cell], state: State) -> Iterator[tuple[str, State]]:
    """Yield each (move, earlier state) whose move leads to ``state``, by a walk or by a push."""
    agent, boxes = state
    for move, step in MOVES.items():
        came_from = shift_cell(agent, step, -1)
        ahead = shift_cell(agent, step)
        if came_from not in floor or came_from in boxes:
            continue
        yield move, (came_from, boxes)
        # A push backwards is a pull: the agent steps back, and the box in front of it follows.
        if ahead in boxes:
            yield move, (came_from, tuple(sorted(agent if box == ahead else box for box in boxes)))
