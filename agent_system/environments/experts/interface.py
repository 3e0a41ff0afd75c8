"""What experts of small worlds have in common: looking for the shortest way, and imperfection."""

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
    """The fewest moves from ``start`` to a state that is ``solved``, found breadth first.

    ``after(state)`` gives every possible move with the state it leads to. None where there is no
    way, or none among the first ``max_states`` states.
    """
    came_from: dict[State, tuple[str, State] | None] = {start: None}
    edge = [start]
    # The list grows while it is read: the states ahead are those still to be looked at.
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
    way = []
    while (step := came_from[state]) is not None:
        move, state = step
        way.append(move)
    return way[::-1]


def disturbed(
    decision: Decision,
    rng: random.Random,
    noise: Noise,
    useless: Sequence[str],
    impossible: Sequence[str],
) -> Decision:
    """``decision``, or in its place an action that is ``useless`` or ``impossible`` here, as often
    as ``noise`` asks for; where there is none of that kind, ``decision``.

    The thoughts stay but for the plan, which names the action: what is imitated must fit together.
    """
    # One draw for both kinds: slips take [0, slips), slack the interval after it.
    draw = rng.random()
    if draw < noise.slips and impossible:
        action = rng.choice(impossible)
        return replace(decision, action=action, plan=action, slip=True)
    if noise.slips <= draw < noise.slips + noise.slack and useless:
        action = rng.choice(useless)
        return replace(decision, action=action, plan=action, slack=True)
    return decision


class Tried:
    """What an expert says of the moves that lie behind it."""

    def __init__(self) -> None:
        self.text = "tried nothing"

    def add(self, action: str, worked: bool) -> None:
        """Remember ``action``, and whether it changed anything."""
        self.text = f"did {action}" if worked else f"failed {action}"
