"""One growing conversation, in messages and, where there is a tokenizer, in the tokens that were
seen and sampled.
"""

from collections.abc import Sequence

from agent_system.agents import Action, Conversation, Message
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import NO_LIMITS, Limits, TokenConversation, with_user
from agent_system.tokens.ledger import TokenLedger
from agent_system.tokens.plain import PlainBridge
from verl.utils.sampling import StopReason


class Transcript:
    """What was said. ``bridge`` is None where no tokens are kept; then ``ledger`` is None as well.

    ``opening`` are messages in front of everything: a system message, examples, what a caller wants
    to be said first.
    """

    def __init__(
        self,
        bridge: ChatBridge | PlainBridge | None,
        opening: Sequence[Message],
        limits: Limits = NO_LIMITS,
    ) -> None:
        self.messages: list[Message] = [dict(message) for message in opening]
        self._bridge = bridge
        self._tokens = None
        if bridge is not None:
            self._tokens = TokenConversation(bridge, limits, self.messages)

    @property
    def ledger(self) -> TokenLedger | None:
        """The tokens, where they are kept."""
        return None if self._tokens is None else self._tokens.ledger

    def hear(self, text: str, turn: int, episode: int) -> bool:
        """Add what the environment says before ``turn``; False (and nothing added) where that turn
        would not fit.
        """
        # Tokens first: where the turn does not fit, the messages must not grow either.
        if self._tokens is not None and not self._tokens.hear(text, turn, episode):
            return False
        self.messages = with_user(self.messages, text)
        return True

    def say(self, action: Action | str, turn: int, episode: int) -> tuple[str, StopReason]:
        """Add a turn of the agent; return its text and why it ended.

        The tokens of an ``Action`` are kept as they were sampled. A bare text is encoded and marked
        ``retokenized``.
        """
        if isinstance(action, str):
            text = action
            reason = StopReason.STOP
            if self._tokens is not None:
                self._tokens.say_text(action, turn, episode)
        else:
            text = self._text(action)
            reason = action.stop_reason
            if self._tokens is not None:
                self._tokens.say(action, turn, episode)
        # A new list: an agent may still hold the old one as its ``Conversation``.
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        return text, reason

    def conversation(self) -> Conversation:
        """What an agent is asked to continue."""
        prompt_ids = None if self._tokens is None else self._tokens.prompt_ids
        return Conversation(self.messages, prompt_ids)

    def _text(self, action: Action) -> str:
        # The tokens are what was said; a tokenizer that only encodes leaves the agent's own words.
        if self._bridge is None or not hasattr(self._bridge.tokenizer, "decode"):
            return action.text
        return self._bridge.decode(action.token_ids)
