"""Expert for the number line: jumps while the target is three or more away, then steps."""

import random
import re

from agent_system.environments.env import Observation
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Noise
from agent_system.environments.experts.interface import Tried, disturbed

# The expert reads observations, not the environment: a policy must be able to imitate it from
# observations alone.
_PLACES = re.compile(r"You are at (\d+)\. The target is (\d+)\.")
_LENGTHS = {"left": -1, "right": 1, "jump left": -3, "jump right": 3}


def way_to(distance: int) -> list[str]:
    """Return the shortest list of moves over ``distance`` numbers, positive to the right.

    Example: ``moves_to_target(-4)`` is ``["jump left", "left"]``.
    """
    side = "right" if distance > 0 else "left"
    jumps, steps = divmod(abs(distance), 3)
    # Jumps first never leaves the line: start and target are on it, and no move passes the target.
    return [f"jump {side}"] * jumps + [side] * steps


class LinePlayer:
    """Expert in one episode. It reads positions from observations."""

    def __init__(self, first: Observation, rng: random.Random, noise: Noise) -> None:
        self.rng = rng
        self.noise = noise
        self.tried = Tried()
        self.distance = 0
        self.possible: list[str] = []
        self._read(first)

    def act(self) -> Decision:
        """Return the next move. Its situation is the distance and the side of the target."""
        way = way_to(self.distance)
        side = "right" if self.distance > 0 else "left"
        decision = Decision(
            action=way[0],
            situation=f"{abs(self.distance)} {side}",
            tried=self.tried.text,
            plan=" then ".join(way),
        )
        useless = [
            move
            for move in self.possible
            if len(way_to(self.distance - _LENGTHS[move])) >= len(way)
        ]
        impossible = [move for move in _LENGTHS if move not in self.possible]
        return disturbed(decision, self.rng, self.noise, useless, impossible)

    def observe(self, action: str, observation: Observation) -> None:
        """Read the new position and record whether the move worked."""
        before = self.distance
        self._read(observation)
        self.tried.add(action, worked=self.distance != before)

    def _read(self, observation: Observation) -> None:
        found = _PLACES.search(observation.text)
        if found is None:
            raise ValueError(
                f"observation {observation.text!r}: expected 'You are at N. The target is N.'"
            )
        position, target = map(int, found.groups())
        self.distance = target - position
        self.possible = list(observation.info["admissible_actions"])


def start(episode: EpisodeStart) -> LinePlayer:
    """Return an expert that has read the first observation."""
    return LinePlayer(episode.first, episode.rng, episode.noise)


# ``words``: numbers that a new tokenizer encodes as one token each.
EXPERT = Expert(start, words=lambda: [f" {number}" for number in range(31)])
