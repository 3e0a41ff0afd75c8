"""Asking an agent of either kind for the next turns of many conversations."""

from collections.abc import Sequence
from typing import Any

from agent_system.agents.base import Action, Conversation


def ask(
    agent: Any, conversations: Sequence[Conversation], states: Sequence[Any]
) -> tuple[list[Action | str], list[Any]]:
    """One action per conversation (the bare text where the agent tells no tokens), and the agent's
    new states.

    ``states`` are what the agent returned at the turn before, None at the first. Raises
    ``TypeError`` for an agent that has neither ``act_batch`` nor ``get_action``, or whose
    ``get_action`` returns something else than a text or an ``Action``, alone or with a state;
    ``ValueError`` for an ``act_batch`` that returns too few actions or too many.
    """
    name = type(agent).__name__
    if callable(getattr(agent, "act_batch", None)):
        actions = list(agent.act_batch(conversations))
        if len(actions) != len(conversations):
            raise ValueError(
                f"{name}.act_batch returned {len(actions)} actions for {len(conversations)} conversations"
            )
        return actions, list(states)
    if not callable(getattr(agent, "get_action", None)):
        raise TypeError(f"{name} is no agent: it has neither act_batch nor get_action")
    pairs = [
        _one(agent, conversation, state)
        for conversation, state in zip(conversations, states, strict=True)
    ]
    return [action for action, _ in pairs], [state for _, state in pairs]


def _one(agent: Any, conversation: Conversation, state: Any) -> tuple[Action | str, Any]:
    said = agent.get_action([dict(message) for message in conversation.messages], state)
    action, state = said if isinstance(said, tuple) else (said, state)
    if not isinstance(action, (str, Action)):
        raise TypeError(
            f"{type(agent).__name__}.get_action returned {type(action).__name__}, not a text or an Action"
        )
    return action, state
