"""Transcript of a conversation: messages and, with a tokenizer, the tokens."""

from collections.abc import Sequence

from agent_system.agents import Action, Conversation, Message
from agent_system.tokens.bridge import ChatBridge, PlainBridge
from agent_system.tokens.conversation import (
    NO_LIMITS,
    TokenConversation,
    TokenLimits,
    append_user_text,
)
from agent_system.tokens.ledger import TokenLedger
from verl.utils.sampling import StopReason


class Transcript:
    """Messages and tokens of a conversation.

    ``bridge`` encodes the text between two turns of the agent as tokens. Without it there are no
    tokens, and ``token_ledger`` is None. ``opening`` contains the first messages, such as a system
    message or examples.
    """

    def __init__(
        self,
        bridge: ChatBridge | PlainBridge | None,
        opening: Sequence[Message],
        limits: TokenLimits = NO_LIMITS,
    ) -> None:
        self.messages: list[Message] = [dict(message) for message in opening]
        self._bridge = bridge
        self._tokens = None
        if bridge is not None:
            self._tokens = TokenConversation(bridge, limits, self.messages)

    @property
    def token_ledger(self) -> TokenLedger | None:
        """Record of all tokens, with the source of each (agent or environment); None without a
        tokenizer.
        """
        return None if self._tokens is None else self._tokens.ledger

    def add_observation(self, text: str, turn: int, episode: int) -> bool:
        """Add text of the environment before ``turn``.

        Return False, and add nothing, if the turn would exceed the token limits.
        """
        # Add the tokens first: if the turn does not fit, the messages stay unchanged.
        if self._tokens is not None and not self._tokens.add_observation(text, turn, episode):
            return False
        self.messages = append_user_text(self.messages, text)
        return True

    def add_turn(self, action: Action | str, turn: int, episode: int) -> tuple[str, StopReason]:
        """Add a turn of the agent. Return its text and stop reason.

        The sampled tokens of an ``Action`` are kept. A text is encoded and marked ``retokenized``.
        """
        if isinstance(action, str):
            text = action
            reason = StopReason.STOP
            if self._tokens is not None:
                self._tokens.add_text_turn(action, turn, episode)
        else:
            text = self._decode_action(action)
            reason = action.stop_reason
            if self._tokens is not None:
                self._tokens.add_turn(action, turn, episode)
        # Make a new list: an agent may keep the old one in its ``Conversation``.
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        return text, reason

    def build_conversation(self) -> Conversation:
        """Return the conversation that the agent continues."""
        prompt_ids = None if self._tokens is None else self._tokens.prompt_ids
        return Conversation(self.messages, prompt_ids)

    def _decode_action(self, action: Action) -> str:
        # Decode the text from the tokens if the tokenizer can, else use the text of the agent.
        if self._bridge is None or not hasattr(self._bridge.tokenizer, "decode"):
            return action.text
        return self._bridge.decode(action.token_ids)
