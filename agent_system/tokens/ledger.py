"""The token ledger: what was shown to the policy and what it sampled, once and for good.

A ledger only grows. Every token belongs to one segment, every segment has one kind, and all masks
are derived from the kinds. The tokens a policy sampled are stored as they were sampled: they are
never decoded and encoded again, because that changes about one turn in ten at temperature 1.

    prompt   agent         bridge              env            bridge                      agent
    [P P P]  [A A A A]     [EOT \\n user \\n]  [O O O O]      [EOT \\n assistant \\n]     [A A A]
             trained                                                                      trained
"""

from collections.abc import Sequence

from agent_system.tokens.segments import Segment, SegmentArrays, SegmentKind
from verl.utils.sampling import StopReason

__all__ = ["Segment", "SegmentKind", "TokenLedger"]


class TokenLedger:
    """Append-only record of one conversation (a trajectory, or a trial of several episodes).

    ``ids`` is the live token list: read it, hand a copy to an engine, never change it. A ledger
    travels as arrays, and is lists again where somebody asks for these.
    """

    __slots__ = ("_arrays", "_ids", "_segments")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._segments: list[Segment] = []
        self._arrays: SegmentArrays | None = None  # of all segments, once they were asked for

    def __getstate__(self) -> SegmentArrays:
        return self.arrays()

    def __setstate__(self, arrays: SegmentArrays) -> None:
        TokenLedger.__init__(self)
        self._arrays = arrays

    def arrays(self) -> SegmentArrays:
        """The ledger as arrays, which are shared: for reading."""
        if self._arrays is None:
            self._arrays = SegmentArrays.of(self._segments)
        return self._arrays

    def _unpack(self) -> None:
        if self._arrays is not None and not self._segments:
            self._segments = self._arrays.segments()
            self._ids = self._arrays.ids.tolist()

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
        self._unpack()
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
        self._arrays = None
        return segment

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def ids(self) -> list[int]:
        """All tokens in order; the ledger's own list."""
        self._unpack()
        return self._ids

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The segments in order."""
        self._unpack()
        return tuple(self._segments)

    @property
    def agent_segments(self) -> list[Segment]:
        """The segments that the policy sampled."""
        return [segment for segment in self.segments if segment.kind is SegmentKind.AGENT]

    @property
    def retokenized(self) -> bool:
        """Whether some agent segment was made from text instead of being sampled."""
        return self.arrays().retokenized

    @property
    def prompt_length(self) -> int:
        """Tokens before the first agent segment: where a row is split into prompt and response."""
        for segment in self.segments:
            if segment.kind is SegmentKind.AGENT:
                return segment.start
        return len(self)

    def completion_only_mask(self) -> list[int]:
        """1 exactly where the policy sampled the token, one entry per token."""
        return self.arrays().mask().tolist()

    def full_attention_mask(self) -> list[int]:
        """1 on every token: whatever is in the ledger was seen by the policy."""
        return [1] * len(self)

    def turn_ids(self) -> list[int]:
        """The turn of every sampled token, -1 elsewhere."""
        return self.arrays().turn_ids().tolist()

    def logprobs(self) -> list[float]:
        """The log-prob of every sampled token, 0.0 elsewhere (and where retokenized tokens have
        none).
        """
        return self.arrays().token_logprobs().tolist()
