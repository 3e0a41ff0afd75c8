"""One growing conversation, in messages and, where there is a tokenizer, in the tokens that were
seen and sampled.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from agent_system.agents import Action, Conversation, Message
from agent_system.tokens import SegmentKind, TokenLedger
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.plain import PlainBridge
from verl.utils.sampling import StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """Numbers of tokens: the whole sequence, what follows the first prompt, and the longest turn an
    agent may take.
    """

    sequence: float = math.inf
    completion: float = math.inf
    turn: int = 0


class Transcript:
    """What was said. ``bridge`` is None where no tokens are kept; then ``ledger`` is None as well.

    ``opening`` are messages in front of everything: a system message, examples, what a caller wants
    to be said first.
    """

    def __init__(
        self,
        bridge: ChatBridge | PlainBridge | None,
        opening: Sequence[Message],
        limits: Limits = Limits(),
    ) -> None:
        self.messages: list[Message] = [dict(message) for message in opening]
        self.ledger = None if bridge is None else TokenLedger()
        self._bridge, self._limits = bridge, limits

    def hear(self, text: str, turn: int, episode: int) -> bool:
        """Add what the environment says before ``turn``; False (and nothing added) where that turn
        would not fit.
        """
        messages = _with_user(self.messages, text)
        if self._bridge is not None and not self._hear_tokens(messages, text, turn, episode):
            return False
        self.messages = messages
        return True

    def say(self, action: Action | str, turn: int, episode: int) -> tuple[str, StopReason]:
        """Add a turn of the agent; return its text and why it ended.

        The tokens of an ``Action`` are kept as they were sampled. A bare text is encoded and marked
        ``retokenized``.
        """
        if isinstance(action, str):
            text, reason = action, StopReason.STOP
        else:
            text, reason = self._text(action), action.stop_reason
        if self._bridge is not None:
            self._say_tokens(action, turn, episode, reason)
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        return text, reason

    def conversation(self) -> Conversation:
        """What an agent is asked to continue."""
        return Conversation(self.messages, None if self.ledger is None else list(self.ledger.ids))

    def _hear_tokens(self, messages: Sequence[Message], text: str, turn: int, episode: int) -> bool:
        if not self.ledger.segments:
            prompt = self._bridge.first_prompt(messages)
            if not self._fits(len(prompt), 0):
                return False
            self.ledger.append(prompt, SegmentKind.PROMPT, turn=turn, episode=episode)
            return True
        bridge = self._bridge.between(self.ledger.segments[-1].ids, text)
        length = len(self.ledger) + len(bridge)
        if not self._fits(length, length - self.ledger.prompt_length):
            return False
        self._bridge.extend(self.ledger, bridge, turn, episode)
        return True

    def _fits(self, length: int, completion: int) -> bool:
        turn = self._limits.turn
        return (
            length + turn <= self._limits.sequence and completion + turn <= self._limits.completion
        )

    def _text(self, action: Action) -> str:
        if self._bridge is None or not hasattr(self._bridge.tokenizer, "decode"):
            return action.text
        return self._bridge.decode(action.token_ids)

    def _say_tokens(
        self, action: Action | str, turn: int, episode: int, reason: StopReason
    ) -> None:
        sampled = not isinstance(action, str)
        self.ledger.append(
            action.token_ids if sampled else self._bridge.encode_template(action),
            SegmentKind.AGENT,
            logprobs=action.logprobs if sampled else None,
            turn=turn,
            episode=episode,
            policy_version=action.policy_version if sampled else None,
            stop_reason=reason,
            retokenized=not sampled,
        )


def _with_user(messages: Sequence[Message], text: str) -> list[Message]:
    """``messages`` with ``text`` said by the user; two user messages in a row become one, and none
    is said twice.
    """
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    last = messages[-1]["content"]
    if not text or last == text or last.endswith(f"\n\n{text}"):
        return list(messages)
    return [*messages[:-1], {"role": "user", "content": f"{last}\n\n{text}"}]
