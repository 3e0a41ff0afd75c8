"""Segments of a ledger, and all of them as three arrays: what travels and what rows are made of.

ids       [N]      every token
logprobs  [L]      those of the sampled tokens, in order
table     [S, 8]   a line per segment: kind, tokens, turn, episode, policy version, stop reason,
                   whether it was retokenised, log-probs
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import chain

import numpy as np

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


_KINDS = tuple(SegmentKind)
_REASONS = tuple(StopReason)
_NONE = -(2**62)  # stands for None in a column of numbers
_AGENT = _KINDS.index(SegmentKind.AGENT)


@dataclass(frozen=True, slots=True)
class SegmentArrays:
    """The segments of a ledger, which tile it; see the module docstring."""

    ids: np.ndarray
    logprobs: np.ndarray
    table: np.ndarray

    @classmethod
    def of(cls, segments: Sequence[Segment]) -> "SegmentArrays":
        """``segments`` in the order in which they lie."""
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

    def segments(self) -> list[Segment]:
        """What ``of`` was given."""
        ids = self.ids.tolist()
        logprobs = self.logprobs.tolist()
        found: list[Segment] = []
        start = 0
        told = 0
        for kind, length, turn, episode, version, reason, retokenized, count in self.table.tolist():
            found.append(
                Segment(
                    ids=tuple(ids[start : start + length]),
                    kind=_KINDS[kind],
                    start=start,
                    logprobs=tuple(logprobs[told : told + count]),
                    turn=turn,
                    episode=episode,
                    policy_version=None if version == _NONE else version,
                    stop_reason=None if reason == _NONE else _REASONS[reason],
                    retokenized=bool(retokenized),
                )
            )
            start += length
            told += count
        return found

    @property
    def retokenized(self) -> bool:
        """Whether some segment was made from text instead of being sampled."""
        return bool(self.table[:, 6].any())

    def mask(self) -> np.ndarray:
        """[N]: 1 exactly where the policy sampled the token."""
        return np.repeat((self.table[:, 0] == _AGENT).astype(np.int64), self.table[:, 1])

    def turn_ids(self) -> np.ndarray:
        """[N]: the turn of every sampled token, -1 elsewhere."""
        turns = np.where(self.table[:, 0] == _AGENT, self.table[:, 2], -1)
        return np.repeat(turns, self.table[:, 1])

    def token_logprobs(self) -> np.ndarray:
        """[N]: the log-prob of every sampled token, 0.0 elsewhere (and where retokenised tokens
        have none).
        """
        values = np.zeros(len(self.ids))
        lengths = self.table[:, 1]
        counts = self.table[:, 7]
        # Where the log-probs of each segment begin, among all tokens and among all log-probs.
        starts = np.repeat(np.cumsum(lengths) - lengths, counts)
        own = np.arange(len(self.logprobs)) - np.repeat(np.cumsum(counts) - counts, counts)
        values[starts + own] = self.logprobs
        return values

    def tokens_by_version(self) -> Counter[int]:
        """How many tokens were sampled with the weights of each version, where that is known and
        not negative.
        """
        found = Counter[int]()
        for kind, length, _, _, version, *_ in self.table.tolist():
            if kind == _AGENT and version >= 0:
                found[version] += length
        return found
