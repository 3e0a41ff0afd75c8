"""Asking an agent of either kind for the next turns of many conversations."""

from collections.abc import Sequence
from typing import Any, TypeGuard

from agent_system.agents.base import Action, Agent, BatchAgent, Conversation, TextAgent


def ask(
    agent: Agent, conversations: Sequence[Conversation], states: Sequence[Any]
) -> tuple[list[Action | str], list[Any]]:
    """One action per conversation (the bare text where the agent tells no tokens), and the agent's
    new states.

    ``states`` are what the agent returned at the turn before, None at the first.

    Raises:
        TypeError: The agent has neither ``act_batch`` nor ``get_action``, or its ``get_action``
            returned something else than a text or an ``Action``, alone or with a state.
        ValueError: ``act_batch`` returned too few actions or too many.
    """
    name = type(agent).__name__
    if _answers_batches(agent):
        return _in_one_call(agent, conversations), list(states)
    if not _answers_in_words(agent):
        raise TypeError(f"{name} is no agent: it has neither act_batch nor get_action")
    actions: list[Action | str] = []
    new_states: list[Any] = []
    for conversation, state in zip(conversations, states, strict=True):
        # The agent's own copies: what it changes in them must not reach the transcript.
        messages = [dict(message) for message in conversation.messages]
        said = agent.get_action(messages, state)
        # A bare answer keeps the state of the turn before. An ``Action`` is no tuple: a tuple can
        # only be a pair with a state.
        action, state = said if isinstance(said, tuple) else (said, state)
        if not isinstance(action, (str, Action)):
            raise TypeError(
                f"{name}.get_action returned {type(action).__name__}, not a text or an Action"
            )
        actions.append(action)
        new_states.append(state)
    return actions, new_states


def _answers_batches(agent: object) -> TypeGuard[BatchAgent]:
    return callable(getattr(agent, "act_batch", None))


def _answers_in_words(agent: object) -> TypeGuard[TextAgent]:
    return callable(getattr(agent, "get_action", None))


def _in_one_call(agent: BatchAgent, conversations: Sequence[Conversation]) -> list[Action | str]:
    name = type(agent).__name__
    actions = list(agent.act_batch(conversations))
    if len(actions) != len(conversations):
        raise ValueError(
            f"{name}.act_batch returned {len(actions)} actions "
            f"for {len(conversations)} conversations"
        )
    return actions
