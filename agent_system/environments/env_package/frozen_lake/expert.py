"""Expert (scripted policy) for FrozenLake. It moves on the shortest path over the ice.

The path is computed again after every move. The expert ignores that ice may be slippery, so it may
fall into a hole. Demonstrations do not include such episodes.
"""

from collections.abc import Iterator

from agent_system.environments.env import Observation
from agent_system.environments.env_package.frozen_lake.prompts import (
    AGENT_SYMBOL,
    GOAL_SYMBOL,
    HOLE_SYMBOL,
    MOVES,
    Cell,
    parse_drawn_map,
)
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.expert_helpers import (
    LastActionText,
    add_noise,
    find_shortest_path,
)

MAX_CELLS = 400  # limit of the path search, larger than the number of cells of any lake


class LakeExpert:
    """Scripted policy for one episode. It reads the map of the lake from the observations."""

    def __init__(self, episode: EpisodeStart) -> None:
        self.rng = episode.rng
        self.noise = episode.noise
        self.last_action_text = LastActionText()
        self._read_observation(episode.first)

    def act(self) -> Decision:
        path = self._find_shortest_path(self.position)
        if path is None:
            raise ValueError("no path over this lake leads to the goal")
        safe_moves = dict(self._list_safe_moves(self.position))
        decision = Decision(
            action=path[0],
            situation=f"free {' '.join(safe_moves)}",
            tried=self.last_action_text.text,
            plan=" ".join(path),
        )
        useless_moves = [
            move
            for move, next_cell in safe_moves.items()
            if len(self._find_shortest_path(next_cell) or ()) >= len(path)
        ]
        impossible_moves = [move for move in MOVES if move not in self.possible_moves]
        return add_noise(decision, self.rng, self.noise, useless_moves, impossible_moves)

    def observe(self, action: str, observation: Observation) -> None:
        old_position = self.position
        self._read_observation(observation)
        self.last_action_text.add(action, worked=self.position != old_position)

    def _find_shortest_path(self, cell: Cell) -> list[str] | None:
        return find_shortest_path(
            cell,
            self._list_safe_moves,
            lambda visited_cell: self.symbols_by_cell[visited_cell] == GOAL_SYMBOL,
            MAX_CELLS,
        )

    def _list_safe_moves(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for move, (row_offset, column_offset) in MOVES.items():
            next_cell = (cell[0] + row_offset, cell[1] + column_offset)
            # Treat cells outside the lake as holes, so that no path enters them.
            if self.symbols_by_cell.get(next_cell, HOLE_SYMBOL) != HOLE_SYMBOL:
                yield move, next_cell

    def _read_observation(self, observation: Observation) -> None:
        _, self.symbols_by_cell = parse_drawn_map(observation.text)
        self.position = next(
            cell for cell, symbol in self.symbols_by_cell.items() if symbol == AGENT_SYMBOL
        )
        self.possible_moves: list[str] = observation.info["admissible_actions"]


EXPERT = Expert(LakeExpert)
