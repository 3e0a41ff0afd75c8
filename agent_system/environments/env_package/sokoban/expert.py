"""Expert for Sokoban. It follows a shortest solution, and searches a new one after a random move.

The search visits at most ``MAX_STATES`` states. If it fails, as in large rooms with many boxes, the
expert follows the stored solution of the level, and makes no random moves (noise).
"""

from agent_system.environments.env import Observation
from agent_system.environments.env_package.sokoban.levels import (
    MOVES,
    SokobanRoom,
    State,
    shift_cell,
)
from agent_system.environments.env_package.sokoban.prompts import describe_offset
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.interface import LastAction, add_noise, find_shortest_path

MAX_STATES = 20_000  # states that one search visits at most, which takes about a second
MAX_SHOWN_MOVES = 6  # next moves of the plan that a thought lists


class SokobanExpert:
    """Expert of one episode. It reads the level from ``Observation.state``, also in image mode."""

    def __init__(self, episode: EpisodeStart) -> None:
        self.rng = episode.rng
        self.noise = episode.noise
        self.tried = LastAction()
        self.room, self.state = SokobanRoom.parse_level(episode.first.state)
        solution = self._find_solution(self.state)
        self.has_searched_plan = solution is not None
        self.plan = list(episode.task["solution"]) if solution is None else solution

    def act(self) -> Decision:
        """Return the next move of the plan, with the next push and the cell to push from."""
        states_by_move = dict(self.room.next_states(self.state))
        decision = Decision(
            action=self.plan[0],
            situation=self._next_push(),
            tried=self.tried.text,
            plan=" ".join(self.plan[:MAX_SHOWN_MOVES]),
        )
        if not self.has_searched_plan:
            return decision
        impossible = [move for move in MOVES if move not in states_by_move]
        return add_noise(
            decision, self.rng, self.noise, self._useless_moves(states_by_move), impossible
        )

    def observe(self, action: str, observation: Observation) -> None:
        """Read the new state, and advance the plan or search a new one."""
        previous_state = self.state
        _, self.state = SokobanRoom.parse_level(observation.state)
        is_changed = self.state != previous_state
        self.tried.add(action, worked=is_changed)
        if is_changed and action == self.plan[0]:
            self.plan = self.plan[1:]
        elif is_changed:
            # Noise has replaced the planned move, so the old plan does not fit the new state.
            self.plan = self._find_solution(self.state) or self.plan

    def _next_push(self) -> str:
        """Return the first push of the plan, and from where: ``push left from 1 up 1 right``.

        The second part is the offset from the agent to the cell from which it pushes.
        """
        agent, boxes = self.state
        for move in self.plan:
            ahead = shift_cell(agent, MOVES[move])
            if ahead in boxes:
                return f"push {move} from {describe_offset(self.state[0], agent)}"
            agent = ahead
        raise ValueError(f"the plan {self.plan} contains no push, so it cannot solve the level")

    def _useless_moves(self, states_by_move: dict[str, State]) -> list[str]:
        """Return the moves that do not shorten the solution and keep the level solvable."""
        if not self.noise.useless_share:
            return []  # saves one search per move
        solutions = {move: self._find_solution(state) for move, state in states_by_move.items()}
        return [
            move
            for move, solution in solutions.items()
            if solution and len(solution) >= len(self.plan)
        ]

    def _find_solution(self, state: State) -> list[str] | None:
        return find_shortest_path(state, self.room.next_states, self.room.is_solved, MAX_STATES)


EXPERT = Expert(SokobanExpert, version=2)
