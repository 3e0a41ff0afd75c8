"""Expert (scripted policy) for the number line.

It jumps 3 numbers while the target is at least 3 away, then it goes in steps of 1.
"""

import re

from agent_system.environments.env import Observation
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.expert_helpers import LastActionText, add_noise

MOVES = {"left": -1, "right": 1, "jump left": -3, "jump right": 3}
POSITIONS_PATTERN = re.compile(r"You are at (\d+)\. The target is (\d+)\.")


def list_moves_to_target(distance: int) -> list[str]:
    """Return the moves to a target that is ``distance`` numbers to the right (negative: left).

    Example: ``list_moves_to_target(-4)`` is ``["jump left", "left"]``.
    """
    direction = "right" if distance > 0 else "left"
    num_jumps, num_steps = divmod(abs(distance), 3)
    # No move passes the target, so all positions are between start and target, on the line.
    return [f"jump {direction}"] * num_jumps + [direction] * num_steps


class LineExpert:
    """Scripted policy for one episode, which becomes a demonstration.

    It only reads observations, because the policy that imitates it has no other information.
    """

    def __init__(self, episode: EpisodeStart) -> None:
        self.rng = episode.rng
        self.noise = episode.noise
        self.last_action_text = LastActionText()
        self._read_observation(episode.first)

    def act(self) -> Decision:
        moves = list_moves_to_target(self.distance)
        side = "right" if self.distance > 0 else "left"
        decision = Decision(
            action=moves[0],
            situation=f"{abs(self.distance)} {side}",
            tried=self.last_action_text.text,
            plan=" then ".join(moves),
        )
        useless_moves = [
            move
            for move in self.possible_moves
            if len(list_moves_to_target(self.distance - MOVES[move])) >= len(moves)
        ]
        impossible_moves = [move for move in MOVES if move not in self.possible_moves]
        return add_noise(decision, self.rng, self.noise, useless_moves, impossible_moves)

    def observe(self, action: str, observation: Observation) -> None:
        old_distance = self.distance
        self._read_observation(observation)
        self.last_action_text.add(action, worked=self.distance != old_distance)

    def _read_observation(self, observation: Observation) -> None:
        match = POSITIONS_PATTERN.search(observation.text)
        if match is None:
            raise ValueError(
                f"observation {observation.text!r}: expected 'You are at N. The target is N.'"
            )
        position, target = map(int, match.groups())
        self.distance = target - position
        self.possible_moves: list[str] = observation.info["admissible_actions"]


# A new tokenizer encodes each of the ``words`` as one token.
EXPERT = Expert(LineExpert, words=lambda: [f" {number}" for number in range(31)])
