"""An expert for the number line: jumps while the target is three or more away, then steps."""

import random
import re

from agent_system.environments.env import Observation
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Noise
from agent_system.environments.experts.interface import Tried, disturbed

# The expert reads what a policy reads, not the environment: a demonstration must be possible to
# imitate from the observations alone.
_PLACES = re.compile(r"You are at (\d+)\. The target is (\d+)\.")
_LENGTHS = {"left": -1, "right": 1, "jump left": -3, "jump right": 3}


def way_to(distance: int) -> list[str]:
    """The fewest moves over ``distance`` numbers, to the right where it is positive."""
    side = "right" if distance > 0 else "left"
    jumps, steps = divmod(abs(distance), 3)
    # All jumps come first. Near an end of the line that still works: both lie inside it, and the
    # way between them is never overshot.
    return [f"jump {side}"] * jumps + [side] * steps


class LinePlayer:
    """Plays one episode from what it reads."""

    def __init__(self, first: Observation, rng: random.Random, noise: Noise) -> None:
        self.rng = rng
        self.noise = noise
        self.tried = Tried()
        self.distance = 0
        self.possible: list[str] = []
        self._read(first)

    def act(self) -> Decision:
        """The next move, with how far it is to the target and on which side."""
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
        """Where the move led."""
        before = self.distance
        self._read(observation)
        self.tried.add(action, worked=self.distance != before)

    def _read(self, observation: Observation) -> None:
        found = _PLACES.search(observation.text)
        if found is None:
            raise ValueError(f"no place on a number line: {observation.text!r}")
        position, target = map(int, found.groups())
        self.distance = target - position
        self.possible = list(observation.info["admissible_actions"])


def start(episode: EpisodeStart) -> LinePlayer:
    """An expert that has read the first observation."""
    return LinePlayer(episode.first, episode.rng, episode.noise)


# Numbers that a new tokenizer is to know as one token each.
EXPERT = Expert(start, words=lambda: [f" {number}" for number in range(31)])
