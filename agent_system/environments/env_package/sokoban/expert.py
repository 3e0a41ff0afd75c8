"""Expert (scripted policy) for Sokoban. It follows a shortest solution of the level.

The search visits at most ``MAX_STATES`` states, so it may fail in large rooms with many boxes. The
expert then follows the solution that is stored with the level, without noise.
"""

from agent_system.environments.env import Observation
from agent_system.environments.env_package.sokoban import levels
from agent_system.environments.env_package.sokoban.prompts import describe_offset
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.expert_helpers import (
    LastActionText,
    add_noise,
    find_shortest_path,
)

MAX_STATES = 20_000  # maximum number of states that a search visits (about one second)
MAX_SHOWN_MOVES = 6  # maximum number of planned moves that a thought lists


class SokobanExpert:
    """Scripted policy for one episode. It reads the level as text, even if prompts show images."""

    def __init__(self, episode: EpisodeStart) -> None:
        self.rng = episode.rng
        self.noise = episode.noise
        self.last_action_text = LastActionText()
        self.room, self.state = levels.SokobanRoom.parse_level(episode.first.state)
        solution = self._find_solution(self.state)
        self.is_plan_from_search = solution is not None
        self.planned_moves = list(episode.task["solution"]) if solution is None else solution

    def act(self) -> Decision:
        states_by_move = dict(self.room.list_next_states(self.state))
        decision = Decision(
            action=self.planned_moves[0],
            situation=self._describe_next_push(),
            tried=self.last_action_text.text,
            plan=" ".join(self.planned_moves[:MAX_SHOWN_MOVES]),
        )
        if not self.is_plan_from_search:
            return decision
        impossible_moves = [move for move in levels.MOVES if move not in states_by_move]
        return add_noise(
            decision,
            self.rng,
            self.noise,
            self._list_useless_moves(states_by_move),
            impossible_moves,
        )

    def observe(self, action: str, observation: Observation) -> None:
        previous_state = self.state
        _, self.state = levels.SokobanRoom.parse_level(observation.state)
        is_changed = self.state != previous_state
        self.last_action_text.add(action, worked=is_changed)
        if is_changed and action == self.planned_moves[0]:
            self.planned_moves = self.planned_moves[1:]
        elif is_changed:
            self.planned_moves = self._find_solution(self.state) or self.planned_moves

    def _describe_next_push(self) -> str:
        """Describe the first planned push, as in ``push left from 1 up 1 right``.

        ``1 up 1 right`` is the offset from the agent to the cell from which it will push.
        """
        agent_cell, boxes = self.state
        for move in self.planned_moves:
            next_cell = levels.shift_cell(agent_cell, levels.MOVES[move])
            if next_cell in boxes:
                return f"push {move} from {describe_offset(self.state[0], agent_cell)}"
            agent_cell = next_cell
        raise ValueError(f"the plan {self.planned_moves} contains no push")

    def _list_useless_moves(self, states_by_move: dict[str, levels.State]) -> list[str]:
        """Return the moves that noise may use: possible, but without progress.

        After such a move the level is solvable, but in no fewer moves than before.
        """
        if not self.noise.useless_share:
            return []  # no noise will use the moves, and checking each one costs a search
        solutions = {move: self._find_solution(state) for move, state in states_by_move.items()}
        return [
            move
            for move, solution in solutions.items()
            if solution and len(solution) >= len(self.planned_moves)
        ]

    def _find_solution(self, state: levels.State) -> list[str] | None:
        return find_shortest_path(
            state, self.room.list_next_states, self.room.is_solved, MAX_STATES
        )


EXPERT = Expert(SokobanExpert, version=2)
