"""Expert for FrozenLake: the shortest path over the ice, computed again after every move.

It ignores that ice is slippery, so it may fall into a hole. Demonstrations drop such episodes.
"""

import random
from collections.abc import Iterator

from agent_system.environments.env import Observation
from agent_system.environments.env_package.frozen_lake.drawing import (
    GOAL,
    HERE,
    HOLE,
    SIDES,
    Cell,
    read,
)
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Noise
from agent_system.environments.experts.interface import Tried, disturbed, shortest_way

MAX_CELLS = 400  # larger than the number of cells of the largest lake


class LakePlayer:
    """Expert in one episode. It reads the lake from the drawing in observations."""

    def __init__(self, first: Observation, rng: random.Random, noise: Noise) -> None:
        self.rng = rng
        self.noise = noise
        self.tried = Tried()
        self.cells: dict[Cell, str] = {}
        self.here = (0, 0)
        self.possible: list[str] = []
        self._read(first)

    def act(self) -> Decision:
        """Return the next move. Its situation lists the moves that do not end in a hole."""
        way = self._way(self.here)
        if way is None:
            raise ValueError("no path over this lake leads to the goal")
        safe = dict(self._after(self.here))
        decision = Decision(
            action=way[0],
            situation=f"free {' '.join(safe)}",
            tried=self.tried.text,
            plan=" ".join(way),
        )
        useless = [move for move, cell in safe.items() if len(self._way(cell) or ()) >= len(way)]
        impossible = [move for move in SIDES if move not in self.possible]
        return disturbed(decision, self.rng, self.noise, useless, impossible)

    def observe(self, action: str, observation: Observation) -> None:
        """Read the new position and record whether the move worked."""
        before = self.here
        self._read(observation)
        self.tried.add(action, worked=self.here != before)

    def _way(self, cell: Cell) -> list[str] | None:
        return shortest_way(cell, self._after, lambda at: self.cells[at] == GOAL, MAX_CELLS)

    def _after(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for move, (down, right) in SIDES.items():
            further = (cell[0] + down, cell[1] + right)
            # Cells outside of the lake count as holes: both cannot be entered.
            if self.cells.get(further, HOLE) != HOLE:
                yield move, further

    def _read(self, observation: Observation) -> None:
        _, self.cells = read(observation.text)
        self.here = next(cell for cell, sign in self.cells.items() if sign == HERE)
        self.possible = list(observation.info["admissible_actions"])


def start(episode: EpisodeStart) -> LakePlayer:
    """Return an expert that has read the first observation."""
    return LakePlayer(episode.first, episode.rng, episode.noise)


EXPERT = Expert(start)
