"""Generation of Sokoban levels by backward search from solved states in a random room.

The search is breadth first, so every start state comes with a shortest solution, and every level is
solvable. A state is ``(agent cell, box cells)``, and a cell is ``(row, column)``.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache

from agent_system.environments.env_package.sokoban.settings import NAME, SokobanSettings
from verl.config.settings.errors import UserError
from verl.utils.seeds import derive_seed

Cell = tuple[int, int]  # row, column
State = tuple[Cell, tuple[Cell, ...]]  # cell of the agent, cells of the boxes
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
WALL, FLOOR, TARGET, BOX, BOX_ON_TARGET, AGENT, AGENT_ON_TARGET = "#_.$*@+"
WALL_PROBABILITY = 0.2  # probability that a cell inside the outer walls is a wall
# Maximum number of states that the search visits in one room. In large rooms the search therefore
# stops early, and all levels have short solutions.
MAX_STATES = 8_000
VAL_DIVISOR = 5  # one level in five belongs to the validation split
MAX_FAILED_ROOMS = 300  # consecutive rooms without a new level after which the generation stops


def shift_cell(cell: Cell, direction: Cell, distance: int = 1) -> Cell:
    """Return the cell at ``distance`` steps from ``cell`` in ``direction`` (rows, columns)."""
    return cell[0] + distance * direction[0], cell[1] + distance * direction[1]


@dataclass(frozen=True)
class SokobanRoom:
    """Fixed part of a level: size (rows, columns), floor cells and target cells."""

    size: tuple[int, int]  # rows, columns
    floor: set[Cell]
    targets: tuple[Cell, ...]

    @classmethod
    def parse_level(cls, level: str) -> tuple["SokobanRoom", State]:
        """Return room and state of ``level``: Sokoban's XSB format, with ``_`` for the floor."""
        rows = level.split("\n")
        symbol_by_cell = {
            (row, column): symbol
            for row, line in enumerate(rows)
            for column, symbol in enumerate(line)
        }
        floor = {cell for cell, symbol in symbol_by_cell.items() if symbol != WALL}
        targets = tuple(cell for cell, symbol in symbol_by_cell.items() if symbol in ".*+")
        agent = next(cell for cell, symbol in symbol_by_cell.items() if symbol in "@+")
        boxes = tuple(cell for cell, symbol in symbol_by_cell.items() if symbol in "$*")
        return cls((len(rows), max(map(len, rows))), floor, targets), (agent, boxes)

    def format_level(self, state: State) -> str:
        """Return the level as text in Sokoban's XSB format, the inverse of ``parse_level``."""
        agent, boxes = state

        def get_symbol(cell: Cell) -> str:
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
            "".join(get_symbol((row, column)) for column in range(width)) for row in range(height)
        )

    def list_next_states(self, state: State) -> Iterator[tuple[str, State]]:
        """Yield each possible move with the state that it leads to."""
        agent, boxes = state
        for move, direction in MOVES.items():
            next_cell = shift_cell(agent, direction)
            if next_cell not in self.floor:
                continue
            if next_cell not in boxes:
                yield move, (next_cell, boxes)
                continue
            cell_behind_box = shift_cell(next_cell, direction)
            if cell_behind_box in self.floor and cell_behind_box not in boxes:
                # Sort the boxes, so that equal positions of boxes are equal states.
                moved_boxes = tuple(
                    sorted(cell_behind_box if box == next_cell else box for box in boxes)
                )
                yield move, (next_cell, moved_boxes)

    def count_placed_boxes(self, state: State) -> int:
        return sum(box in self.targets for box in state[1])

    def is_solved(self, state: State) -> bool:
        return self.count_placed_boxes(state) == len(state[1])


@lru_cache(maxsize=4)
def generate_levels(settings: SokobanSettings) -> dict[str, list[tuple[str, list[str]]]]:
    """Return the distinct levels of each split as (text, shortest solution).

    A level, its rotations and its mirror images count as one level. Raises ``ValueError`` if a
    split has no level.
    """
    level_counts = {"train": settings.train_levels, "val": settings.val_levels}
    levels_by_split: dict[str, list] = {"train": [], "val": []}
    used_normal_forms: set[str] = set()
    room_index = last_used_room_index = 0
    while room_index < last_used_room_index + MAX_FAILED_ROOMS and any(
        len(levels_by_split[split]) < level_counts[split] for split in level_counts
    ):
        level = generate_level(
            settings, random.Random(derive_seed(NAME, settings.level_seed, room_index))
        )
        room_index += 1
        if level is None or (normal_form := canonicalize_level(level[0])) in used_normal_forms:
            continue
        # Mirror images of a level have the same normal form, so they are in the same split.
        split = "train" if derive_seed(NAME, normal_form) % VAL_DIVISOR else "val"
        if len(levels_by_split[split]) < level_counts[split]:
            used_normal_forms.add(normal_form)
            levels_by_split[split].append(level)
            last_used_room_index = room_index
    if not all(levels_by_split.values()):
        raise UserError(
            f"env.{NAME}: no levels of {settings.min_moves} to {settings.search_depth} moves "
            f"(min_moves, search_depth) in rooms of {list(settings.dim_room)} (dim_room) with "
            f"{settings.num_boxes} boxes (num_boxes); "
            "fix: make the rooms larger, or the range of moves wider",
            "conflicting_keys",
        )
    return levels_by_split


def generate_level(settings: SokobanSettings, rng: random.Random) -> tuple[str, list[str]] | None:
    """Draw a random level and return it with a shortest solution.

    Return None if the drawn room is too small or has no start state that needs enough moves.
    """
    floor = _generate_floor(settings, rng)
    # At the start no box is on a target, so boxes, targets and the agent need distinct cells.
    if len(floor) < 2 * settings.num_boxes + 1:
        return None
    targets = tuple(sorted(rng.sample(sorted(floor), settings.num_boxes)))
    states_by_distance, next_moves = _search_backwards(floor, targets, settings.search_depth)
    start_states_by_distance = [
        [state for state in states if not set(state[1]) & set(targets)]
        for states in states_by_distance[settings.min_moves :]
    ]
    start_states_by_distance = [states for states in start_states_by_distance if states]
    if not start_states_by_distance:
        return None
    # Draw the number of moves first, then a state. Most states need many moves, so to draw among
    # all states would rarely give an easy level.
    state = rng.choice(rng.choice(start_states_by_distance))
    level = SokobanRoom(settings.dim_room, floor, targets).format_level(state)
    solution = []
    while (move_and_state := next_moves[state]) is not None:
        move, state = move_and_state
        solution.append(move)
    return level, solution


def canonicalize_level(level: str) -> str:
    """Return the normal form of ``level``: the same text for its rotations and mirror images."""
    rows = level.split("\n")
    level_variants = []
    for _ in range(4):
        rows = ["".join(column) for column in zip(*rows[::-1], strict=True)]
        level_variants += ["\n".join(rows), "\n".join(row[::-1] for row in rows)]
    return min(level_variants)


def _generate_floor(settings: SokobanSettings, rng: random.Random) -> set[Cell]:
    """Place random walls in a room and return the largest connected area of free cells."""
    height, width = settings.dim_room
    inner_cells = [(row, column) for row in range(1, height - 1) for column in range(1, width - 1)]
    unassigned_cells = {cell for cell in inner_cells if rng.random() >= WALL_PROBABILITY}
    largest_area: set[Cell] = set()
    while unassigned_cells:
        connected_area = set()
        # Start at the smallest cell, because the order of a set differs between processes.
        cells_to_visit = [min(unassigned_cells)]
        while cells_to_visit:
            cell = cells_to_visit.pop()
            if cell in unassigned_cells:
                unassigned_cells.discard(cell)
                connected_area.add(cell)
                cells_to_visit += [shift_cell(cell, step) for step in MOVES.values()]
        largest_area = max(largest_area, connected_area, key=len)
    return largest_area


def _search_backwards(
    floor: set[Cell], targets: tuple[Cell, ...], max_moves: int
) -> tuple[list[list[State]], dict]:
    """Search backwards from the solved states, up to ``max_moves`` moves.

    Element n of the returned list contains the states whose shortest solution has n moves. The dict
    maps each state to the next (move, state) of a shortest solution, or to None if it is solved.
    """
    states_by_distance = [[(cell, targets) for cell in sorted(floor) if cell not in targets]]
    next_moves: dict[State, tuple[str, State] | None] = dict.fromkeys(states_by_distance[0])
    for _ in range(max_moves):
        next_distance_states: list[State] = []
        states_by_distance.append(next_distance_states)
        for state in states_by_distance[-2]:
            if len(next_moves) >= MAX_STATES:
                return states_by_distance, next_moves
            new_states = {
                earlier_state: (move, state)
                for move, earlier_state in _list_earlier_states(floor, state)
                if earlier_state not in next_moves
            }
            next_moves |= new_states
            next_distance_states += new_states
    return states_by_distance, next_moves


def _list_earlier_states(floor: set[Cell], state: State) -> Iterator[tuple[str, State]]:
    """Yield all (move, earlier state) whose move leads to ``state``."""
    agent, boxes = state
    for move, direction in MOVES.items():
        previous_cell = shift_cell(agent, direction, -1)
        cell_ahead = shift_cell(agent, direction)
        if previous_cell not in floor or previous_cell in boxes:
            continue
        yield move, (previous_cell, boxes)
        # Undo a push: the agent steps back and pulls the box that is in front of it.
        if cell_ahead in boxes:
            pulled_boxes = tuple(sorted(agent if box == cell_ahead else box for box in boxes))
            yield move, (previous_cell, pulled_boxes)
