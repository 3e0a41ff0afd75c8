"""Token ledger: the tokens that the policy was shown and those that it sampled.

A ledger is append-only. It consists of segments, each with tokens of one kind: prompt, agent
(sampled), env (observation) or bridge (template text). All masks are derived from the kinds.
Sampled tokens are stored unchanged. Decoding and encoding them again would change about one turn in
ten at temperature 1.

    prompt   agent         bridge              env            bridge                      agent
    [P P P]  [A A A A]     [EOT \\n user \\n]  [O O O O]      [EOT \\n assistant \\n]     [A A A]
             trained                                                                      trained

``SegmentArrays`` stores a ledger as three arrays, to send it between processes and to build rows:

    ids       [N]      all tokens
    logprobs  [L]      log-probs of the sampled tokens, in order
    table     [S, 8]   one line per segment: kind, number of tokens, turn, episode, policy version,
                       stop reason, retokenized, number of log-probs
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from itertools import chain

import numpy as np

from verl.utils.sampling import StopReason


class SegmentKind(StrEnum):
    """Origin of tokens: prompt, policy, environment or chat template."""

    PROMPT = "prompt"  # the first prompt: template and text
    AGENT = "agent"  # sampled by the policy; the only kind that is trained on
    ENV = "env"  # text of an environment
    # Template text between turns, an end-of-turn token that was not sampled, or a forced prefix.
    BRIDGE = "bridge"


@dataclass(frozen=True, slots=True)
class Segment:
    """Consecutive tokens of one kind, from index ``start`` of the conversation's tokens."""

    ids: tuple[int, ...]
    kind: SegmentKind
    start: int
    logprobs: tuple[float, ...] = ()
    turn: int = 0  # number of the turn
    episode: int = 0  # number of the episode in its trial
    policy_version: int | None = None  # version of the weights that sampled the tokens
    stop_reason: StopReason | None = None
    retokenized: bool = False  # True: encoded from text instead of sampled

    @property
    def end_position(self) -> int:
        """Index after the last token, counted in the whole conversation."""
        return self.start + len(self.ids)


SUMMARY_STEP = -1  # turn number of the tokens of a summary, which is no turn
_KINDS_BY_CODE = tuple(SegmentKind)
_STOP_REASONS_BY_CODE = tuple(StopReason)
_NONE_CODE = -(2**62)  # represents None in a column of numbers
_AGENT_CODE = _KINDS_BY_CODE.index(SegmentKind.AGENT)


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """All segments of a token ledger as arrays, described in the module docstring."""

    ids: np.ndarray
    logprobs: np.ndarray
    table: np.ndarray  # [S, 8], one row per segment

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> "SegmentArrays":
        table_rows = [
            (
                _KINDS_BY_CODE.index(segment.kind),
                len(segment.ids),
                segment.turn,
                segment.episode,
                _NONE_CODE if segment.policy_version is None else segment.policy_version,
                _NONE_CODE
                if segment.stop_reason is None
                else _STOP_REASONS_BY_CODE.index(segment.stop_reason),
                segment.retokenized,
                len(segment.logprobs),
            )
            for segment in segments
        ]
        return cls(
            np.array(list(chain.from_iterable(s.ids for s in segments)), dtype=np.int32),
            np.array(list(chain.from_iterable(s.logprobs for s in segments)), dtype=np.float64),
            np.array(table_rows, dtype=np.int64).reshape(len(table_rows), 8),
        )

    def to_segments(self) -> list[Segment]:
        ids = self.ids.tolist()
        logprobs = self.logprobs.tolist()
        segments: list[Segment] = []
        segment_start = 0
        logprob_start = 0
        for (
            kind_code,
            num_tokens,
            turn,
            episode,
            version,
            stop_reason_code,
            retokenized,
            num_logprobs,
        ) in self.table.tolist():
            segments.append(
                Segment(
                    ids=tuple(ids[segment_start : segment_start + num_tokens]),
                    kind=_KINDS_BY_CODE[kind_code],
                    start=segment_start,
                    logprobs=tuple(logprobs[logprob_start : logprob_start + num_logprobs]),
                    turn=turn,
                    episode=episode,
                    policy_version=None if version == _NONE_CODE else version,
                    stop_reason=None
                    if stop_reason_code == _NONE_CODE
                    else _STOP_REASONS_BY_CODE[stop_reason_code],
                    retokenized=bool(retokenized),
                )
            )
            segment_start += num_tokens
            logprob_start += num_logprobs
        return segments

    @property
    def has_retokenized_tokens(self) -> bool:
        """True if some segment was encoded from text instead of being sampled."""
        return bool(self.table[:, 6].any())

    def agent_mask(self) -> np.ndarray:
        """Return ``[N]``: 1 for tokens of agent segments, else 0."""
        return np.repeat((self.table[:, 0] == _AGENT_CODE).astype(np.int64), self.table[:, 1])

    def turn_ids(self) -> np.ndarray:
        """Return ``[N]``: the turn of every token of an agent segment, -1 for other tokens."""
        turn_by_segment = np.where(self.table[:, 0] == _AGENT_CODE, self.table[:, 2], -1)
        return np.repeat(turn_by_segment, self.table[:, 1])

    def token_logprobs(self) -> np.ndarray:
        """Return ``[N]``: the log-prob of every sampled token, 0.0 for all other tokens."""
        logprob_per_token = np.zeros(len(self.ids))
        segment_lengths = self.table[:, 1]
        logprob_counts = self.table[:, 7]
        # For each log-prob: index of the first token of its segment, and offset in the segment.
        segment_starts = np.repeat(np.cumsum(segment_lengths) - segment_lengths, logprob_counts)
        offsets_in_segments = np.arange(len(self.logprobs)) - np.repeat(
            np.cumsum(logprob_counts) - logprob_counts, logprob_counts
        )
        logprob_per_token[segment_starts + offsets_in_segments] = self.logprobs
        return logprob_per_token

    def count_tokens_by_version(self) -> Counter[int]:
        """Count the agent's tokens by known policy version."""
        token_count_by_version = Counter[int]()
        for kind_code, length, _, _, version, *_ in self.table.tolist():
            if kind_code == _AGENT_CODE and version >= 0:
                token_count_by_version[version] += length
        return token_count_by_version


@dataclass(frozen=True, slots=True)
class TokenArrays:
    """Tokens of a ledger with one value per token [N], from which rows are made.

    ``turn_ids`` is -1 for tokens that were not sampled, and for summaries. ``log_probs`` is 0.0 for
    tokens that were not sampled. ``token_count_by_version``: number of sampled tokens by the
    version of the weights that sampled them.
    """

    ids: np.ndarray
    is_sampled: np.ndarray
    turn_ids: np.ndarray
    log_probs: np.ndarray
    token_count_by_version: Counter[int]
    has_retokenized_tokens: bool


class TokenLedger:
    """Append-only list of the tokens of one conversation.

    ``token_ids`` is the ledger's own list. Do not change it, and pass copies of it to engines. A
    ledger is pickled as arrays. The lists are built again on first access.
    """

    __slots__ = ("_cached_arrays", "_ids", "_segments")

    def __init__(self) -> None:
        self._ids: list[int] = []
        self._segments: list[Segment] = []
        self._cached_arrays: SegmentArrays | None = None  # cache for all segments

    def __getstate__(self) -> SegmentArrays:
        return self.to_arrays()

    def __setstate__(self, arrays: SegmentArrays) -> None:
        TokenLedger.__init__(self)
        self._cached_arrays = arrays

    def to_arrays(self) -> SegmentArrays:
        """Return the segments as arrays. The arrays are cached and must not be changed."""
        if self._cached_arrays is None:
            self._cached_arrays = SegmentArrays.from_segments(self._segments)
        return self._cached_arrays

    def to_token_arrays(self) -> TokenArrays:
        arrays = self.to_arrays()
        return TokenArrays(
            arrays.ids,
            arrays.agent_mask(),
            arrays.turn_ids().astype(np.int32),
            arrays.token_logprobs().astype(np.float32),
            arrays.count_tokens_by_version(),
            arrays.has_retokenized_tokens,
        )

    def _restore_lists(self) -> None:
        if self._cached_arrays is not None and not self._segments:
            self._segments = self._cached_arrays.to_segments()
            self._ids = self._cached_arrays.ids.tolist()

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

        ``retokenized`` means that the tokens were encoded from text instead of being sampled.
        Raises ``ValueError`` if an agent segment that is not ``retokenized`` lacks one log-prob per
        token. A segment of another kind with log-probs, and a prompt after an agent segment, raise
        it too.
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
        self._cached_arrays = None
        return segment

    def renumber_turns(self, numbers: Mapping[int, int]) -> None:
        """Replace the turn of each segment by its new number in ``numbers``, if it has one."""
        self._segments = [
            replace(segment, turn=numbers.get(segment.turn, segment.turn))
            for segment in self.all_segments
        ]
        self._cached_arrays = None

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

    def token_logprobs(self) -> list[float]:
        """Return the log-prob of every sampled token, 0.0 for all other tokens."""
        return self.to_arrays().token_logprobs().tolist()
