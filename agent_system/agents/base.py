"""What an agent is asked and what it returns.

Two kinds of agent play in a ``MultistepEnv``. One answers a batch of conversations at once with the
tokens that were sampled (``act_batch``); one answers a conversation at a time, in words, and has a
state that comes back at the next turn (``get_action``)::

    actions = agent.act_batch([Conversation(messages, prompt_ids), ...])      # list[Action]
    text, agent_state = agent.get_action(messages, agent_state)               # or an Action
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from verl.utils.sampling import StopReason

# {"role": "system" | "user" | "assistant", "content": text}
Message = dict[str, str]


@dataclass(frozen=True, slots=True)
class Action:
    """One turn of an agent: its text and the tokens that were sampled for it, with one log-prob per
    token.

    A log-prob that the engine did not tell is NaN.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    stop_reason: StopReason
    policy_version: int


@dataclass(frozen=True, slots=True)
class Conversation:
    """What is to be continued: messages and, where tokens are kept, exactly the ids the policy is
    to see.
    """

    messages: Sequence[Message]
    prompt_ids: list[int] | None = None


class BatchAgent(Protocol):
    """An agent that continues many conversations at once.

    It may have ``max_turn_tokens``, which bounds a turn; left out or None: unknown.
    """

    def act_batch(self, conversations: Sequence[Conversation]) -> Sequence[Action | str]:
        """One action per conversation, in order."""
        ...


class TextAgent(Protocol):
    """An agent that answers in words, one conversation at a time."""

    def get_action(
        self, messages: list[Message], agent_state: Any
    ) -> tuple[Action | str, Any] | Action | str:
        """The next turn, alone or with a state that comes back at the turn after it (None at the
        first).
        """
        ...


Agent = BatchAgent | TextAgent
