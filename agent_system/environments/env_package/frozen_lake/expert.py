"""An expert for FrozenLake: the shortest way over the ice, looked for again after every move.

On slippery ice it goes the same way and may slip into a hole: such episodes are lost, and
demonstrations leave them out.
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

MAX_CELLS = 400  # more than the largest lake has


class LakePlayer:
    """Plays one episode from the lake as it is drawn."""

    def __init__(self, first: Observation, rng: random.Random, noise: Noise) -> None:
        self.rng = rng
        self.noise = noise
        self.tried = Tried()
        self.cells: dict[Cell, str] = {}
        self.here = (0, 0)
        self.possible: list[str] = []
        self._read(first)

    def act(self) -> Decision:
        """The next move, with where it can go without falling."""
        way = self._way(self.here)
        if way is None:
            raise ValueError("there is no way over this lake")
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
        """Where the move led."""
        before = self.here
        self._read(observation)
        self.tried.add(action, worked=self.here != before)

    def _way(self, cell: Cell) -> list[str] | None:
        return shortest_way(cell, self._after, lambda at: self.cells[at] == GOAL, MAX_CELLS)

    def _after(self, cell: Cell) -> Iterator[tuple[str, Cell]]:
        for move, (down, right) in SIDES.items():
            further = (cell[0] + down, cell[1] + right)
            # Off the lake counts as a hole: neither is a way.
            if self.cells.get(further, HOLE) != HOLE:
                yield move, further

    def _read(self, observation: Observation) -> None:
        _, self.cells = read(observation.text)
        self.here = next(cell for cell, sign in self.cells.items() if sign == HERE)
        self.possible = list(observation.info["admissible_actions"])


def start(episode: EpisodeStart) -> LakePlayer:
    """An expert that has seen the lake."""
    return LakePlayer(episode.first, episode.rng, episode.noise)


EXPERT = Expert(start)
