"""Helpers for experts: search for a shortest path, noise, and the last action as text."""

import random
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import replace
from typing import TypeVar

from agent_system.environments.expert_protocol import Decision, Noise

State = TypeVar("State", bound=Hashable)


def shortest_way(
    start: State,
    after: Callable[[State], Iterable[tuple[str, State]]],
    solved: Callable[[State], bool],
    max_states: int = 100_000,
) -> list[str] | None:
    """Return the fewest moves from ``start`` to a solved state, by breadth-first search.

    ``after(state)`` returns each possible move with the next state. Return None if there is no
    path, or none among the first ``max_states`` states.
    """
    came_from: dict[State, tuple[str, State] | None] = {start: None}
    edge = [start]
    # The loop appends to the list: it is the queue of states to visit.
    for state in edge:
        if solved(state):
            return _back(state, came_from)
        if len(came_from) >= max_states:
            return None
        for move, further in after(state):
            if further not in came_from:
                came_from[further] = (move, state)
                edge.append(further)
    return None


def _back(state: State, came_from: dict[State, tuple[str, State] | None]) -> list[str]:
    path = []
    while (step := came_from[state]) is not None:
        move, state = step
        path.append(move)
    return path[::-1]


def disturbed(
    decision: Decision,
    rng: random.Random,
    noise: Noise,
    useless: Sequence[str],
    impossible: Sequence[str],
) -> Decision:
    """Return ``decision``, or replace its action by a useless or an impossible one.

    ``noise`` has the probabilities of both. Without an action of the drawn kind ``decision`` is
    returned. The plan becomes the new action, so that thought and action agree; the other parts of
    the thoughts stay.
    """
    # One draw for both: below the share of invalid actions, or in the interval after it.
    draw = rng.random()
    if draw < noise.slips and impossible:
        action = rng.choice(impossible)
        return replace(decision, action=action, plan=action, slip=True)
    if noise.slips <= draw < noise.slips + noise.slack and useless:
        action = rng.choice(useless)
        return replace(decision, action=action, plan=action, slack=True)
    return decision


class Tried:
    """Text about the last action of an episode, for ``Decision.tried``."""

    def __init__(self) -> None:
        self.text = "tried nothing"

    def add(self, action: str, worked: bool) -> None:
        """Record ``action`` as the last one. ``worked`` is False if it changed nothing."""
        self.text = f"did {action}" if worked else f"failed {action}"
