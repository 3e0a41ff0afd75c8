"""Segments of a ledger, as objects and as three arrays.

The arrays are used to send a ledger between processes and to build rows.

ids       [N]      all tokens
logprobs  [L]      log-probs of the sampled tokens, in order
table     [S, 8]   one line per segment: kind, number of tokens, turn, episode, policy version,
                   stop reason, retokenized, number of log-probs
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
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
    """Consecutive tokens of one kind, from index ``start`` of the conversation's tokens.

    Only agent segments have ``logprobs``.
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
    def end_position(self) -> int:
        """Index after the last token, counted in the whole conversation."""
        return self.start + len(self.ids)


_KINDS = tuple(SegmentKind)
_REASONS = tuple(StopReason)
_NONE = -(2**62)  # represents None in a column of numbers
_AGENT = _KINDS.index(SegmentKind.AGENT)


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """All segments of a ledger as arrays. The module docstring describes the fields."""

    ids: np.ndarray
    logprobs: np.ndarray
    table: np.ndarray

    @classmethod
    def from_segments(cls, segments: Sequence[Segment]) -> "SegmentArrays":
        """Return the arrays of ``segments``, which must be in the order of the conversation."""
        lines = [
            (
                _KINDS.index(segment.kind),
                len(segment.ids),
                segment.turn,
                segment.episode,
                _NONE if segment.policy_version is None else segment.policy_version,
                _NONE if segment.stop_reason is None else _REASONS.index(segment.stop_reason),
                segment.retokenized,
                len(segment.logprobs),
            )
            for segment in segments
        ]
        return cls(
            np.array(list(chain.from_iterable(s.ids for s in segments)), dtype=np.int32),
            np.array(list(chain.from_iterable(s.logprobs for s in segments)), dtype=np.float64),
            np.array(lines, dtype=np.int64).reshape(len(lines), 8),
        )

    def to_segments(self) -> list[Segment]:
        """Convert the arrays back to segments."""
        ids = self.ids.tolist()
        logprobs = self.logprobs.tolist()
        segments: list[Segment] = []
        id_start = 0
        logprob_start = 0
        for kind, length, turn, episode, version, reason, retokenized, count in self.table.tolist():
            segments.append(
                Segment(
                    ids=tuple(ids[id_start : id_start + length]),
                    kind=_KINDS[kind],
                    start=id_start,
                    logprobs=tuple(logprobs[logprob_start : logprob_start + count]),
                    turn=turn,
                    episode=episode,
                    policy_version=None if version == _NONE else version,
                    stop_reason=None if reason == _NONE else _REASONS[reason],
                    retokenized=bool(retokenized),
                )
            )
            id_start += length
            logprob_start += count
        return segments

    @property
    def has_retokenized_tokens(self) -> bool:
        """True if some segment was encoded from text instead of being sampled."""
        return bool(self.table[:, 6].any())

    def agent_mask(self) -> np.ndarray:
        """Return ``[N]``: 1 for tokens of agent segments, else 0."""
        return np.repeat((self.table[:, 0] == _AGENT).astype(np.int64), self.table[:, 1])

    def turn_ids(self) -> np.ndarray:
        """Return ``[N]``: the turn of every token of an agent segment, -1 for other tokens."""
        turns = np.where(self.table[:, 0] == _AGENT, self.table[:, 2], -1)
        return np.repeat(turns, self.table[:, 1])

    def token_logprobs(self) -> np.ndarray:
        """Return ``[N]``: the log-prob of every sampled token, 0.0 for all other tokens."""
        values = np.zeros(len(self.ids))
        lengths = self.table[:, 1]
        counts = self.table[:, 7]
        # Start of each segment, once per log-prob: among all tokens, and among all log-probs.
        segment_starts = np.repeat(np.cumsum(lengths) - lengths, counts)
        offsets = np.arange(len(self.logprobs)) - np.repeat(np.cumsum(counts) - counts, counts)
        values[segment_starts + offsets] = self.logprobs
        return values

    def tokens_by_version(self) -> Counter[int]:
        """Count the agent's tokens by policy version.

        Segments with an unknown or negative version are not counted.
        """
        counts = Counter[int]()
        for kind_code, length, _, _, version, *_ in self.table.tolist():
            if kind_code == _AGENT and version >= 0:
                counts[version] += length
        return counts
