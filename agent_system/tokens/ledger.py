"""The token ledger: what was shown to the policy and what it sampled, once and for good.

A ledger only grows. Every token belongs to one segment, every segment has one kind, and all masks
are derived from the kinds. The tokens a policy sampled are stored as they were sampled: they are
never decoded and encoded again, because that changes about one turn in ten at temperature 1.

    prompt   agent         bridge              env            bridge                      agent
    [P P P]  [A A A A]     [EOT \\n user \\n]  [O O O O]      [EOT \\n assistant \\n]     [A A A]
             trained                                                                      trained
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

from verl.utils.sampling import StopReason


class SegmentKind(StrEnum):
    """Who wrote a segment."""

    PROMPT = "prompt"  # the first prompt: template and text
    AGENT = "agent"  # sampled by the policy; the only kind that is trained
    ENV = "env"  # text of an environment
    # What the chat template puts between the turns, an end-of-turn token that was not sampled, and
    # what a turn was made to begin with.
    BRIDGE = "bridge"


@dataclass(frozen=True, slots=True)
class Segment:
    """``ids`` written by ``kind`` from position ``start`` of the ledger on; ``logprobs`` only for
    the agent's.
    """

    ids: tuple[int, ...]
    kind: SegmentKind
    start: int
    logprobs: tuple[float, ...] = ()
    turn: int = 0
    episode: int = 0
    policy_version: int | None = None
    stop_reason: StopReason | None = None
    retokenized: bool = False

    @property
    def end(self) -> int:
        """The position after the last token."""
        return self.start + len(self.ids)


class TokenLedger:
    """Append-only record of one conversation (a trajectory, or a trial of several episodes).

    ``ids`` is the live token list: read it, hand a copy to an engine, never change it.
    """

    __slots__ = ("_ids", "_segments")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._segments: list[Segment] = []

    def append(
        self,
        ids: Sequence[int],
        kind: SegmentKind,
        *,
        logprobs: Sequence[float] | None = None,
        turn: int = 0,
        episode: int = 0,
        policy_version: int | None = None,
        stop_reason: StopReason | None = None,
        retokenized: bool = False,
    ) -> Segment:
        """Add a segment at the end and return it.

        Raises:
            ValueError: An agent segment without exactly one log-prob per token (unless
                ``retokenized``, which means that its tokens were made from text and may not be
                trained on by default), a log-prob on tokens the agent did not sample, or a prompt
                segment after an agent segment.
        """
        told = () if logprobs is None else tuple(logprobs)
        # A sampled token without its log-prob would read as one of probability 1.
        if kind is SegmentKind.AGENT and not retokenized and len(told) != len(ids):
            raise ValueError(
                f"an agent segment of {len(ids)} tokens came with {len(told)} log-probs"
            )
        if kind is not SegmentKind.AGENT and told:
            raise ValueError(
                f"a segment of kind {kind.value!r} was not sampled and cannot have log-probs"
            )
        if kind is SegmentKind.PROMPT and self.agent_segments:
            raise ValueError(
                "the prompt comes before the first agent segment; "
                "later text is of kind env or bridge"
            )
        segment = Segment(
            ids=tuple(ids),
            kind=kind,
            start=len(self._ids),
            logprobs=told,
            turn=turn,
            episode=episode,
            policy_version=policy_version,
            stop_reason=stop_reason,
            retokenized=retokenized,
        )
        self._ids.extend(segment.ids)
        self._segments.append(segment)
        return segment

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def ids(self) -> list[int]:
        """All tokens in order; the ledger's own list."""
        return self._ids

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in order."""
        return tuple(self._segments)

    @property
    def agent_segments(self) -> list[Segment]:
        """The segments that the policy sampled."""
        return [segment for segment in self._segments if segment.kind is SegmentKind.AGENT]

    @property
    def retokenized(self) -> bool:
        """Whether some agent segment was made from text instead of being sampled."""
        return any(segment.retokenized for segment in self._segments)

    @property
    def prompt_length(self) -> int:
        """Tokens before the first agent segment: where a row is split into prompt and response."""
        for segment in self._segments:
            if segment.kind is SegmentKind.AGENT:
                return segment.start
        return len(self._ids)

    def completion_only_mask(self) -> list[int]:
        """1 exactly where the policy sampled the token, one entry per token."""
        return self._spread(0, lambda _: 1)

    def full_attention_mask(self) -> list[int]:
        """1 on every token: whatever is in the ledger was seen by the policy."""
        return [1] * len(self._ids)

    def turn_ids(self) -> list[int]:
        """The turn of every sampled token, -1 elsewhere."""
        return self._spread(-1, lambda segment: segment.turn)

    def logprobs(self) -> list[float]:
        """The log-prob of every sampled token, 0.0 elsewhere (and where retokenized tokens have
        none).
        """
        values = [0.0] * len(self._ids)
        for segment in self.agent_segments:
            # As many as there are: a retokenized segment has none and keeps its zeros.
            values[segment.start : segment.start + len(segment.logprobs)] = segment.logprobs
        return values

    def _spread(self, elsewhere: int, value_of: Callable[[Segment], int]) -> list[int]:
        values = [elsewhere] * len(self._ids)
        for segment in self.agent_segments:
            values[segment.start : segment.end] = [value_of(segment)] * len(segment.ids)
        return values
