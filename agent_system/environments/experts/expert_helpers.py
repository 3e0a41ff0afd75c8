"""Helpers for experts: search for a shortest path, noise, and the last action as text."""

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from agent_system.environments.expert_protocol import Decision, Noise

State = TypeVar("State", bound=Hashable)


def find_shortest_path(
    start: State,
    next_states: Callable[[State], Iterable[tuple[str, State]]],
    is_solved: Callable[[State], bool],
    max_states: int = 100_000,
) -> list[str] | None:
    """Return the shortest list of moves from ``start`` to a state with ``is_solved(state)``.

    ``next_states(state)`` yields each possible move with the next state. Return None without a path
    among the first ``max_states`` states.
    """
    predecessors: dict[State, tuple[str, State] | None] = {start: None}
    queue = [start]
    # ``queue`` contains the states to visit and grows during the loop.
    for state in queue:
        if is_solved(state):
            return _trace_moves_to(state, predecessors)
        if len(predecessors) >= max_states:
            return None
        for move, next_state in next_states(state):
            if next_state not in predecessors:
                predecessors[next_state] = (move, state)
                queue.append(next_state)
    return None


def _trace_moves_to(state: State, predecessors: dict[State, tuple[str, State] | None]) -> list[str]:
    moves = []
    while (move_and_predecessor := predecessors[state]) is not None:
        move, state = move_and_predecessor
        moves.append(move)
    return moves[::-1]


def add_noise(
    decision: Decision,
    rng: random.Random,
    noise: Noise,
    useless: Sequence[str],
    impossible: Sequence[str],
) -> Decision:
    """Return ``decision``, with its action replaced at random by a useless or an impossible one.

    ``useless`` and ``impossible`` are the actions to choose from. An empty list leaves ``decision``
    unchanged. The plan is set to the new action, so that the thought agrees with it.
    """
    # One random number decides both: [0, invalid_share) is invalid, the next interval is useless.
    random_number = rng.random()
    if random_number < noise.invalid_share and impossible:
        action = rng.choice(impossible)
        return replace(decision, action=action, plan=action, is_invalid=True)
    if noise.invalid_share <= random_number < noise.invalid_share + noise.useless_share and useless:
        action = rng.choice(useless)
        return replace(decision, action=action, plan=action, is_useless=True)
    return decision


class LastActionText:
    """Record of an expert's last action, as a text for the next thought.

    The text is ``did left`` if the action ``left`` changed the state, ``failed left`` if not, and
    ``tried nothing`` before the first action.
    """

    def __init__(self) -> None:
        self.text = "tried nothing"

    def add(self, action: str, worked: bool) -> None:
        """Record ``action`` as the last one. ``worked`` is False if it changed nothing."""
        self.text = f"did {action}" if worked else f"failed {action}"
