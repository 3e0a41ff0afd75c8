"""Expert for FrozenLake: the shortest path over the ice, computed again after every move.

It ignores that ice is slippery, so it may fall into a hole. Demonstrations drop such episodes.
"""

from collections.abc import Iterator

from agent_system.environments.env import Observation
from agent_system.environments.env_package.frozen_lake.prompts import (
    GOAL,
    HERE,
    HOLE,
    MOVES,
    Cell,
    read_drawing,
)
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.interface import LastAction, add_noise, find_shortest_path

MAX_CELLS = 400  # larger than the number of cells of the largest lake


class LakeExpert:
    """Expert of one episode. It reads the map of the lake from the text of observations."""

    def __init__(self, episode: EpisodeStart) -> None:
        self.rng = episode.rng
        self.noise = episode.noise
        self.tried = LastAction()
        self._read_observation(episode.first)

    def act(self) -> Decision:
        """Return the next move. ``Decision.situation`` lists the moves that avoid all holes."""
        path = self._shortest_path(self.position)
        if path is None:
            raise ValueError("no path over this lake leads to the goal")
        safe_moves = dict(self._safe_moves(self.position))
        decision = Decision(
            action=path[0],
            situation=f"free {' '.join(safe_moves)}",
            tried=self.tried.text,
            plan=" ".join(path),
        )
        useless = [
            move
            for move, cell in safe_moves.items()
            if len(self._shortest_path(cell) or ()) >= len(path)
        ]
        impossible = [move for move in MOVES if move not in self.possible_moves]
        return add_noise(decision, self.rng, self.noise, useless, impossible)

    def observe(self, action: str, observation: Observation) -> None:
        """Read the new position and record whether the move worked."""
        old_position = self.position
        self._read_observation(observation)
        self.tried.add(action, worked=self.position != old_position)

    def _shortest_path(self, cell: Cell) -> list[str] | None:
        return find_shortest_path(
            cell, self._safe_moves, lambda at: self.cells[at] == GOAL, MAX_CELLS
        )

    def _safe_moves(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for move, (down, right) in MOVES.items():
            next_cell = (cell[0] + down, cell[1] + right)
            # Cells outside the lake are treated as holes: the path must not enter them.
            if self.cells.get(next_cell, HOLE) != HOLE:
                yield move, next_cell

    def _read_observation(self, observation: Observation) -> None:
        _, self.cells = read_drawing(observation.text)
        self.position = next(cell for cell, sign in self.cells.items() if sign == HERE)
        self.possible_moves: list[str] = observation.info["admissible_actions"]


EXPERT = Expert(LakeExpert)
