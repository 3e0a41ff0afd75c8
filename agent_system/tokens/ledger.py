"""Token ledger: the tokens that the policy was shown and those that it sampled.

A ledger is append-only. It consists of segments, each with tokens of one kind: prompt, agent
(sampled), env (observation) or bridge (template text). All masks are derived from the kinds.
Sampled tokens are stored unchanged. Decoding and encoding them again would change about one turn in
ten at temperature 1.

    prompt   agent         bridge              env            bridge                      agent
    [P P P]  [A A A A]     [EOT \\n user \\n]  [O O O O]      [EOT \\n assistant \\n]     [A A A]
             trained                                                                      trained
"""

from collections.abc import Sequence

from agent_system.tokens.segments import Segment, SegmentArrays, SegmentKind
from verl.utils.sampling import StopReason

__all__ = ["Segment", "SegmentKind", "TokenLedger"]


class TokenLedger:
    """Append-only list of the tokens of one conversation.

    A conversation is a trajectory, one of its turns, or a trial of several episodes. ``token_ids``
    is the ledger's own list. Do not change it, and pass copies of it to engines.
    A ledger is pickled as arrays. The lists are built again on first access.
    """

    __slots__ = ("_arrays", "_ids", "_segments")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._segments: list[Segment] = []
        self._arrays: SegmentArrays | None = None  # cache for all segments

    def __getstate__(self) -> SegmentArrays:
        return self.to_arrays()

    def __setstate__(self, arrays: SegmentArrays) -> None:
        TokenLedger.__init__(self)
        self._arrays = arrays

    def to_arrays(self) -> SegmentArrays:
        """Return the segments as arrays. The arrays are cached and must not be changed."""
        if self._arrays is None:
            self._arrays = SegmentArrays.from_segments(self._segments)
        return self._arrays

    def _restore_lists(self) -> None:
        if self._arrays is not None and not self._segments:
            self._segments = self._arrays.to_segments()
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

        ``retokenized`` means that the tokens were encoded from text instead of being sampled. By
        default they are not trained on.

        Raises:
            ValueError: An agent segment without one log-prob per token (unless ``retokenized``), a
                log-prob on tokens of another kind, or a prompt segment after an agent segment.
        """
        self._restore_lists()
        token_logprobs = () if logprobs is None else tuple(logprobs)
        # A missing log-prob would be read as 0.0, which is a probability of 1.
        if kind is SegmentKind.AGENT and not retokenized and len(token_logprobs) != len(ids):
            raise ValueError(
                f"an agent segment of {len(ids)} tokens has {len(token_logprobs)} log-probs; "
                "allowed: one log-prob per token"
            )
        if kind is not SegmentKind.AGENT and token_logprobs:
            raise ValueError(
                f"a segment of kind {kind.value!r} has {len(token_logprobs)} log-probs; allowed: "
                "none, because only agent segments are sampled"
            )
        if kind is SegmentKind.PROMPT and self.agent_segments:
            raise ValueError(
                "a prompt segment cannot follow an agent segment; use kind env or bridge for later "
                "text"
            )
        segment = Segment(
            ids=tuple(ids),
            kind=kind,
            start=len(self._ids),
            logprobs=token_logprobs,
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
        return len(self.token_ids)

    @property
    def token_ids(self) -> list[int]:
        """All tokens in order: the ledger's own list, which must not be changed."""
        self._restore_lists()
        return self._ids

    @property
    def all_segments(self) -> tuple[Segment, ...]:
        self._restore_lists()
        return tuple(self._segments)

    @property
    def agent_segments(self) -> list[Segment]:
        return [segment for segment in self.all_segments if segment.kind is SegmentKind.AGENT]

    @property
    def has_retokenized_tokens(self) -> bool:
        """True if some agent segment was encoded from text instead of being sampled."""
        return self.to_arrays().has_retokenized_tokens

    @property
    def prompt_length(self) -> int:
        """Number of tokens before the first agent segment, where the response of a row starts."""
        for segment in self.all_segments:
            if segment.kind is SegmentKind.AGENT:
                return segment.start
        return len(self)

    def completion_only_mask(self) -> list[int]:
        """Return one entry per token: 1 for tokens of agent segments, else 0."""
        return self.to_arrays().agent_mask().tolist()

    def full_attention_mask(self) -> list[int]:
        """Return a 1 for every token: all of them were in the input of the policy."""
        return [1] * len(self)

    def turn_ids(self) -> list[int]:
        """Return the turn of every token of an agent segment, -1 for other tokens."""
        return self.to_arrays().turn_ids().tolist()

    def token_logprobs(self) -> list[float]:
        """Return the log-prob of every sampled token, 0.0 for all other tokens."""
        return self.to_arrays().token_logprobs().tolist()
