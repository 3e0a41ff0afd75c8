"""Tokens of one conversation: appends prompts and turns to a ledger, within token limits.

    add_observation        first prompt, or template tokens + observation + template tokens
    add_prompt             first prompt, already encoded
    add_inter_turn_tokens  template tokens + observation + template tokens, already encoded
    add_forced_prefix      beginning of the next turn; not sampled, not trained on
    add_turn               tokens that the policy sampled, unchanged
    add_text_turn          turn that exists as text only, encoded here

The ledger is the token list of the conversation. Only these methods write to it and check limits.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_system.tokens.bridge import ChatBridge, InterTurnTokens, PlainBridge
from agent_system.tokens.ledger import Segment, SegmentKind, TokenLedger
from verl.utils.chat_template import Message
from verl.utils.sampling import StopReason


@dataclass(frozen=True, slots=True)
class TokenLimits:
    """Maximum numbers of tokens in a conversation.

    ``max_prompt`` limits the first prompt, ``max_response`` all tokens after it, and ``max_total``
    their sum. A turn starts only if ``max_turn`` tokens still fit, and ``reserved`` tokens after
    them.
    """

    # Floats, because "no limit" is infinite.
    max_prompt: float = math.inf
    max_response: float = math.inf
    max_total: float = math.inf
    max_turn: int = 0
    reserved: int = 0  # tokens that must stay free after a turn

    def allows_turn(self, prompt_length: int, response_length: int) -> bool:
        """Return True if a turn fits after this many prompt tokens and later tokens.

        Example: ``TokenLimits(max_response=10, max_turn=4)`` allows a turn after 6 response tokens,
        but not after 7.
        """
        required_response_length = response_length + self.max_turn + self.reserved
        return (
            prompt_length <= self.max_prompt
            and required_response_length <= self.max_response
            and prompt_length + required_response_length <= self.max_total
        )


NO_LIMITS = TokenLimits()


class SampledReply(Protocol):
    """One sampled turn: tokens, one log-prob per token, stop reason and version of the weights."""

    @property
    def token_ids(self) -> Sequence[int]: ...

    @property
    def logprobs(self) -> Sequence[float]: ...

    @property
    def stop_reason(self) -> StopReason: ...

    @property
    def policy_version(self) -> int: ...


class TokenConversation:
    """Tokens of one conversation. Before a turn the attribute ``limits`` may be replaced.

    ``opening`` contains the messages before the first observation: a system message or examples.
    """

    __slots__ = ("_bridge", "_opening_messages", "ledger", "limits")

    def __init__(
        self,
        bridge: ChatBridge | PlainBridge,
        limits: TokenLimits = NO_LIMITS,
        opening: Sequence[Message] = (),
    ) -> None:
        self.ledger = TokenLedger()
        self._bridge = bridge
        self.limits = limits
        self._opening_messages = opening

    @property
    def prompt_ids(self) -> list[int]:
        """Copy of all tokens so far, which the policy continues."""
        return list(self.ledger.token_ids)

    def add_observation(self, text: str, turn: int, episode: int = 0) -> bool:
        """Add an observation. Return False, adding nothing, if ``turn`` would not fit after it."""
        if not self.ledger.all_segments:
            first_prompt = self._bridge.encode_first_prompt(
                append_user_text(self._opening_messages, text)
            )
            return self.add_prompt(first_prompt, turn, episode)
        inter_turn_tokens = self._bridge.make_inter_turn_tokens(
            self.ledger.all_segments[-1].ids, text
        )
        return self.add_inter_turn_tokens(inter_turn_tokens, turn, episode)

    def add_prompt(self, ids: Sequence[int], turn: int, episode: int = 0) -> bool:
        """Add the first prompt. Return False, adding nothing, if no turn would fit after it."""
        if not self.limits.allows_turn(len(ids), 0):
            return False
        self.ledger.append(ids, SegmentKind.PROMPT, turn=turn, episode=episode)
        return True

    def add_inter_turn_tokens(
        self, inter_turn_tokens: InterTurnTokens, turn: int, episode: int = 0
    ) -> bool:
        """Add tokens in front of ``turn``. Return False, adding nothing, if it would not fit."""
        # The response starts at the end of the first prompt, so it includes a forced prefix.
        prompt_length = self.ledger.all_segments[0].end_position
        response_length = len(self.ledger) - prompt_length + len(inter_turn_tokens.all_ids)
        if not self.limits.allows_turn(prompt_length, response_length):
            return False
        inter_turn_tokens.append_to(self.ledger, turn, episode)
        return True

    def add_forced_prefix(self, ids: Sequence[int], turn: int) -> None:
        """Add ``ids`` as the beginning of ``turn``. They are not sampled and not trained on."""
        if ids:
            self.ledger.append(ids, SegmentKind.BRIDGE, turn=turn)

    def add_turn(self, sampled_reply: SampledReply, turn: int, episode: int = 0) -> Segment:
        """Add the unchanged tokens of a sampled turn. There must be one log-prob per token."""
        return self.ledger.append(
            sampled_reply.token_ids,
            SegmentKind.AGENT,
            logprobs=sampled_reply.logprobs,
            turn=turn,
            episode=episode,
            policy_version=sampled_reply.policy_version,
            stop_reason=sampled_reply.stop_reason,
        )

    def add_text_turn(self, text: str, turn: int, episode: int = 0) -> Segment:
        """Encode a turn that exists as text only. Its tokens are marked as ``retokenized``."""
        return self.ledger.append(
            self._bridge.encode_template_text(text),
            SegmentKind.AGENT,
            turn=turn,
            episode=episode,
            stop_reason=StopReason.STOP,
            retokenized=True,
        )


def append_user_text(messages: Sequence[Message], text: str) -> list[Message]:
    """Return ``messages`` followed by ``text`` as a user message.

    Neighbouring user messages are joined, because chat templates refuse them. ``text`` is not added
    again if the last user message already ends with it.
    """
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    last_text = messages[-1]["content"]
    if not text or last_text == text or last_text.endswith(f"\n\n{text}"):
        return list(messages)
    return [*messages[:-1], {"role": "user", "content": f"{last_text}\n\n{text}"}]
