"""Interfaces of agents, with their input and output types.

A ``MultistepEnv`` accepts two kinds of agent. One answers a batch of conversations in one call and
returns the sampled tokens (``act_batch``). The other answers one conversation at a time as text
(``get_action``). It may also return a state, such as its notes, and gets it back in the next turn::

    actions = agent.act_batch([Conversation(messages, prompt_ids), ...])      # list[Action]
    text, agent_state = agent.get_action(messages, agent_state)               # or an Action
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from verl.utils.sampling import StopReason

# {"role": "system" | "user" | "assistant", "content": text}
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of an agent: its text and its sampled tokens, with one log-prob per token.

    A log-prob that the engine did not return is NaN.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """Conversation to continue. The policy must see exactly ``prompt_ids``, if given."""

    messages: Sequence[Message]
    prompt_ids: list[int] | None = None


class BatchAgent(Protocol):
    """Agent that continues many conversations at once.

    The optional attribute ``max_turn_tokens`` is the maximum length of a turn, if it is known.
    """

    def act_batch(self, conversations: Sequence[Conversation]) -> Sequence[Action | str]:
        """Return one action per conversation, in order."""
        ...


class TextAgent(Protocol):
    """Agent that answers with text, one conversation at a time."""

    def get_action(
        self, messages: list[Message], agent_state: Any
    ) -> tuple[Action | str, Any] | Action | str:
        """Return the action of the next turn, alone or in a pair (action, state).

        ``agent_state`` is the state that the previous call returned, None at the first turn.
        """
        ...


Agent = BatchAgent | TextAgent


def get_actions(
    agent: Agent, conversations: Sequence[Conversation], states: Sequence[Any]
) -> tuple[list[Action | str], list[Any]]:
    """Return one action per conversation and the agent's new states.

    An action is plain text if the agent does not report tokens. ``states`` are the states that the
    agent returned at the previous turn, None at the first turn.

    Raises ``TypeError`` for an object that is no agent and for an invalid return value of
    ``get_action``. Raises ``ValueError`` unless ``act_batch`` returned one action per conversation.
    """
    agent_type_name = type(agent).__name__
    actions: list[Action | str] = []
    if callable(getattr(agent, "act_batch", None)):
        actions.extend(cast(BatchAgent, agent).act_batch(conversations))
        if len(actions) != len(conversations):
            raise ValueError(
                f"{agent_type_name}.act_batch returned {len(actions)} actions "
                f"for {len(conversations)} conversations"
            )
        return actions, list(states)
    if not callable(getattr(agent, "get_action", None)):
        raise TypeError(
            f"{agent_type_name} is not an agent: it has neither act_batch nor get_action. "
            "Define one of them"
        )
    new_states: list[Any] = []
    for conversation, state in zip(conversations, states, strict=True):
        # Pass copies: changes that the agent makes must not reach the transcript.
        messages = [dict(message) for message in conversation.messages]
        answer = cast(TextAgent, agent).get_action(messages, state)
        # An answer without a state keeps the previous state. An ``Action`` is not a tuple, so a
        # tuple is always a pair of answer and state.
        action, state = answer if isinstance(answer, tuple) else (answer, state)
        if not isinstance(action, (str, Action)):
            raise TypeError(
                f"{agent_type_name}.get_action returned {type(action).__name__}; allowed: "
                "str or Action, alone or in a pair with a state"
            )
        actions.append(action)
        new_states.append(state)
    return actions, new_states
