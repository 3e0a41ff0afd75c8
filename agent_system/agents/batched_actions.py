"""Call of a ``BatchAgent`` or a ``TextAgent`` for the next turns of many conversations."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from agent_system.agents.base import Action, Agent, BatchAgent, Conversation, TextAgent


def get_actions(
    agent: Agent, conversations: Sequence[Conversation], states: Sequence[Any]
) -> tuple[list[Action | str], list[Any]]:
    """Return one action per conversation and the agent's new states.

    An action is plain text if the agent does not report tokens. ``states`` are the states that the
    agent returned at the previous turn, None at the first turn.

    Raises:
        TypeError: The agent has neither ``act_batch`` nor ``get_action``, or ``get_action``
            returned neither text nor an ``Action``, alone or in a pair with a state.
        ValueError: ``act_batch`` did not return one action per conversation.
    """
    name = type(agent).__name__
    if _has_act_batch(agent):
        return _call_act_batch(agent, conversations), list(states)
    if not _has_get_action(agent):
        raise TypeError(
            f"{name} is not an agent: it has neither act_batch nor get_action. Define one of them"
        )
    actions: list[Action | str] = []
    new_states: list[Any] = []
    for conversation, state in zip(conversations, states, strict=True):
        # Pass copies: changes that the agent makes must not reach the transcript.
        messages = [dict(message) for message in conversation.messages]
        answer = agent.get_action(messages, state)
        # An answer without a state keeps the previous state. An ``Action`` is not a tuple, so a
        # tuple is always a pair of answer and state.
        action, state = answer if isinstance(answer, tuple) else (answer, state)
        if not isinstance(action, (str, Action)):
            raise TypeError(
                f"{name}.get_action returned {type(action).__name__}; allowed: str or Action, "
                "alone or in a pair with a state"
            )
        actions.append(action)
        new_states.append(state)
    return actions, new_states


def _has_act_batch(agent: object) -> TypeGuard[BatchAgent]:
    return callable(getattr(agent, "act_batch", None))


def _has_get_action(agent: object) -> TypeGuard[TextAgent]:
    return callable(getattr(agent, "get_action", None))


def _call_act_batch(agent: BatchAgent, conversations: Sequence[Conversation]) -> list[Action | str]:
    name = type(agent).__name__
    actions = list(agent.act_batch(conversations))
    if len(actions) != len(conversations):
        raise ValueError(
            f"{name}.act_batch returned {len(actions)} actions "
            f"for {len(conversations)} conversations"
        )
    return actions
