"""One conversation as tokens: what joins the next turn, and whether that turn fits.

    hear   first prompt, or bridge + observation + bridge      what the policy is shown
    force  a prefix that the next turn begins with             not sampled, and not trained
    say    what the policy sampled                             as it was sampled

Nothing else writes to the ledger of a conversation, and nobody else counts its tokens.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from agent_system.tokens.bridge import Bridge
from agent_system.tokens.ledger import Segment, SegmentKind, TokenLedger
from agent_system.tokens.template import Message
from verl.utils.sampling import StopReason


@dataclass(frozen=True, slots=True)
class Limits:
    """How many tokens a conversation may have: in its first prompt, after it, and in all.

    ``turn`` is the longest turn; as many tokens must be free before one is asked for.
    """

    # Numbers of tokens; floats only because "no bound" is infinite.
    prompt: float = math.inf
    response: float = math.inf
    total: float = math.inf
    turn: int = 0

    def allow_turn(self, prompt: int, response: int) -> bool:
        """Whether a turn may begin after ``prompt`` tokens of prompt and ``response`` more."""
        longest = response + self.turn
        return prompt <= self.prompt and longest <= self.response and prompt + longest <= self.total


NO_LIMITS = Limits()


class TurnBridge(Protocol):
    """What a conversation asks of ``ChatBridge`` or ``PlainBridge``, which say what it means."""

    def first_prompt(self, messages: Sequence[Message]) -> list[int]:
        """The tokens of ``messages``, ready for the policy's first turn."""
        ...

    def between(self, sampled_ids: Sequence[int], observation: str) -> Bridge:
        """The tokens between the turn ``sampled_ids`` and the one that answers ``observation``."""
        ...

    def extend(self, ledger: TokenLedger, bridge: Bridge, turn: int, episode: int = 0) -> None:
        """Append ``bridge`` to ``ledger``."""
        ...

    def encode_template(self, text: str) -> tuple[int, ...]:
        """The tokens of ``text``, control tokens included."""
        ...


class Sampled(Protocol):
    """One sampled turn: its tokens with a log-prob each, why it ended, and who sampled it."""

    @property
    def token_ids(self) -> Sequence[int]:
        """The tokens as they were sampled."""
        ...

    @property
    def logprobs(self) -> Sequence[float]:
        """One log-prob per token."""
        ...

    @property
    def stop_reason(self) -> StopReason:
        """Why the turn ended."""
        ...

    @property
    def policy_version(self) -> int:
        """Version of the weights that sampled."""
        ...


class TokenConversation:
    """The tokens of one conversation within ``limits``.

    ``opening`` are messages in front of the first text that is heard: a system message, examples.
    """

    __slots__ = ("_bridge", "_limits", "_opening", "ledger")

    def __init__(
        self,
        bridge: TurnBridge,
        limits: Limits = NO_LIMITS,
        opening: Sequence[Message] = (),
    ) -> None:
        self.ledger = TokenLedger()
        self._bridge = bridge
        self._limits = limits
        self._opening = opening

    @property
    def prompt_ids(self) -> list[int]:
        """What the policy is to continue: every token so far, in a list of the caller's own."""
        return list(self.ledger.ids)

    def hear(self, text: str, turn: int, episode: int = 0) -> bool:
        """Add what the policy is told before ``turn``.

        False, and nothing is added, where ``turn`` would not fit after it.
        """
        if not self.ledger.segments:
            return self._hear_first(text, turn, episode)
        bridge = self._bridge.between(self.ledger.segments[-1].ids, text)
        # Counted from the first prompt's end: a forced prefix belongs to the response.
        prompt = self.ledger.segments[0].end
        response = len(self.ledger) - prompt + len(bridge)
        if not self._limits.allow_turn(prompt, response):
            return False
        self._bridge.extend(self.ledger, bridge, turn, episode)
        return True

    def force(self, ids: Sequence[int], turn: int, episode: int = 0) -> None:
        """Let ``turn`` begin with ``ids``, which are not sampled; they count as part of it."""
        if ids:
            self.ledger.append(ids, SegmentKind.BRIDGE, turn=turn, episode=episode)

    def say(self, sampled: Sampled, turn: int, episode: int = 0) -> Segment:
        """Add the turn that the policy sampled, token by token as it was sampled.

        Raises:
            ValueError: There is not one log-prob per token.
        """
        return self.ledger.append(
            sampled.token_ids,
            SegmentKind.AGENT,
            logprobs=sampled.logprobs,
            turn=turn,
            episode=episode,
            policy_version=sampled.policy_version,
            stop_reason=sampled.stop_reason,
        )

    def say_text(self, text: str, turn: int, episode: int = 0) -> Segment:
        """Add a turn that is known as text alone, marked ``retokenized``."""
        return self.ledger.append(
            self._bridge.encode_template(text),
            SegmentKind.AGENT,
            turn=turn,
            episode=episode,
            stop_reason=StopReason.STOP,
            retokenized=True,
        )

    def _hear_first(self, text: str, turn: int, episode: int) -> bool:
        prompt = self._bridge.first_prompt(with_user(self._opening, text))
        if not self._limits.allow_turn(len(prompt), 0):
            return False
        self.ledger.append(prompt, SegmentKind.PROMPT, turn=turn, episode=episode)
        return True


def with_user(messages: Sequence[Message], text: str) -> list[Message]:
    """``messages`` with ``text`` said by the user.

    Two user messages in a row become one, since chat templates refuse them, and what the user has
    just said is not said twice.
    """
    if not messages or messages[-1]["role"] != "user":
        return [*messages, {"role": "user", "content": text}]
    last = messages[-1]["content"]
    if not text or last == text or last.endswith(f"\n\n{text}"):
        return list(messages)
    return [*messages[:-1], {"role": "user", "content": f"{last}\n\n{text}"}]
