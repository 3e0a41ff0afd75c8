"""Expert for the number line: jumps of 3 until the target is less than 3 away, then steps of 1."""

import re

from agent_system.environments.env import Observation
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.interface import LastAction, add_noise

MOVES = {"left": -1, "right": 1, "jump left": -3, "jump right": 3}
POSITIONS = re.compile(r"You are at (\d+)\. The target is (\d+)\.")


def moves_to_target(distance: int) -> list[str]:
    """Return the shortest list of moves over ``distance`` numbers, positive to the right.

    Example: ``moves_to_target(-4)`` is ``["jump left", "left"]``.
    """
    direction = "right" if distance > 0 else "left"
    jumps, steps = divmod(abs(distance), 3)
    # All positions are on the line: they are between start and target, because no move passes it.
    return [f"jump {direction}"] * jumps + [direction] * steps


class LineExpert:
    """Expert of one episode.

    It reads observations, not the environment: a policy must be able to imitate it from
    observations alone.
    """

    def __init__(self, episode: EpisodeStart) -> None:
        self.rng = episode.rng
        self.noise = episode.noise
        self.tried = LastAction()
        self._read_observation(episode.first)

    def act(self) -> Decision:
        """Return the next move. ``Decision.situation`` states distance and side of the target."""
        moves = moves_to_target(self.distance)
        side = "right" if self.distance > 0 else "left"
        decision = Decision(
            action=moves[0],
            situation=f"{abs(self.distance)} {side}",
            tried=self.tried.text,
            plan=" then ".join(moves),
        )
        useless = [
            move
            for move in self.possible_moves
            if len(moves_to_target(self.distance - MOVES[move])) >= len(moves)
        ]
        impossible = [move for move in MOVES if move not in self.possible_moves]
        return add_noise(decision, self.rng, self.noise, useless, impossible)

    def observe(self, action: str, observation: Observation) -> None:
        """Read the new position and record whether the move worked."""
        old_distance = self.distance
        self._read_observation(observation)
        self.tried.add(action, worked=self.distance != old_distance)

    def _read_observation(self, observation: Observation) -> None:
        match = POSITIONS.search(observation.text)
        if match is None:
            raise ValueError(
                f"observation {observation.text!r}: expected 'You are at N. The target is N.'"
            )
        position, target = map(int, match.groups())
        self.distance = target - position
        self.possible_moves: list[str] = observation.info["admissible_actions"]


# ``words``: numbers that a new tokenizer encodes as one token each.
EXPERT = Expert(LineExpert, words=lambda: [f" {number}" for number in range(31)])
