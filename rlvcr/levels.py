"""The four thinking levels: tags, prompts, and the codec between them and token ids.

A step is ``<level>l</level><think>z</think><action>a</action>``. Level 1 acts at once; alternatives
of level 1 are rendered with an empty think block, ``<level>1</level><think></think><action>``, so
that all four contexts differ in nothing but digit and thought. In sampled steps an absent block at
level 1 is read the same way.

Parsing works on sampled token ids: their bytes are joined, tags are found in the bytes, and byte
ranges are mapped back to token ranges. Nothing is ever tokenised again and a level is never
guessed.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from rlvcr.token_bytes import TokenBytes, Tokenizer

LEVELS = (1, 2, 3, 4)
THINK_END = "</think>"
ACTION_START = "<action>"
ACTION_END = "</action>"
TAGS = ("<level>", "</level>", "<think>", THINK_END, ACTION_START, ACTION_END)

DEFAULT_PROMPTS: dict[int, str] = {
    1: "Act at once. Leave the thought empty.",
    2: "Read the situation: say in a few words what you see and what is needed now.",
    3: "Read the situation, then reflect on what you already tried and what came of it.",
    4: "Read the situation, reflect on what you tried, then plan the next steps and weigh the "
    "options you have.",
}

_FORMAT = (
    "Before every action choose how much to think, from level 1 (least) to level 4 (most). "
    "Think more only where it helps.\n{levels}\n"
    "Answer exactly as: <level>N</level><think>your thought</think><action>your action</action>"
)


Overrides = Mapping[int, str] | Mapping[str, str]


def level_prompts(
    overrides: Overrides | None = None, texts: Mapping[int, str] = DEFAULT_PROMPTS
) -> dict[int, str]:
    """The four ``texts`` with ``overrides`` (keys 1..4 as numbers or strings).

    ``ValueError`` for another key.
    """
    prompts = dict(texts)
    for key, text in (overrides or {}).items():
        if str(key) not in {str(level) for level in LEVELS}:
            raise ValueError(f"algorithm.rlvcr.prompts has key {key!r}: allowed are 1, 2, 3, 4")
        prompts[int(key)] = text
    return prompts


def level_instructions(overrides: Overrides | None = None) -> str:
    """The paragraph that asks a policy for the four levels and for the format of a step."""
    lines = [f"Level {level}: {text}" for level, text in level_prompts(overrides).items()]
    return _FORMAT.format(levels="\n".join(lines))


def level_prefix(level: int) -> str:
    """``<level>k</level><think>``, what is forced to make the policy think at another level."""
    if level not in LEVELS:
        raise ValueError(f"level must be one of 1, 2, 3, 4, got {level!r}")
    return f"<level>{level}</level><think>"


class ParseFailure(StrEnum):
    """Why a sampled step gets no thinking advantage; the values end the metrics
    ``rlvcr/parse_fail_*``.
    """

    # No <action> at all.
    MISSING_ACTION = "missing_action"
    # <action> without </action>, usually cut by length.
    UNCLOSED_ACTION = "unclosed_action"
    # No <level> tag.
    MISSING_LEVEL = "missing_level"
    # A <level> tag around something other than 1, 2, 3, 4, or unclosed.
    INVALID_LEVEL = "invalid_level"
    # Text before the level or between the blocks, or a tag within a thought.
    MISPLACED_LEVEL = "misplaced_level"
    # The token of the digit also holds part of a tag.
    MERGED_LEVEL = "merged_level"
    # The action's first token begins inside <action>: it cannot follow a forced tag.
    MERGED_ACTION = "merged_action"


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ParsedStep:
    """Where the parts of a sampled step lie; spans are half-open ranges of indices into its token
    ids.

    ``level_span`` is the digit's token, ``thought_span`` every token that holds part of the thought
    (empty for an empty one), ``action_span`` every token that holds part of the action, and
    ``score_span`` that plus the first token of ``</action>``, which tells "cabinet 1" from "cabinet
    10". Parts that were not found are None. ``parser`` names the parser that matched. With a
    ``failure`` the step has no thinking advantage.
    """

    level: int | None
    level_span: Span | None
    thought_span: Span | None
    action_span: Span | None
    score_span: Span | None
    thought: str
    action: str
    parser: str
    failure: ParseFailure | None

    @property
    def thought_tokens(self) -> int:
        """Number of tokens that hold the thought."""
        return self.thought_span[1] - self.thought_span[0] if self.thought_span else 0

    @property
    def scored(self) -> tuple[int, Span]:
        """Level and ``score_span`` of a step without ``failure``. Raises ``ValueError`` for one."""
        if self.failure is not None or self.level is None or self.score_span is None:
            raise ValueError(f"a step with {self.failure} cannot be scored")
        return self.level, self.score_span

    def credit_spans(self, offset: int = 0) -> list[Span]:
        """Token ranges that carry the thinking advantage: level digit and thought; none after a
        failure.

        ``offset`` is the index of the step's first token in the row, so that the ranges fit
        ``place_step_values``.
        """
        if self.failure is not None:
            return []
        spans = [
            span for span in (self.level_span, self.thought_span) if span and span[0] < span[1]
        ]
        return [(start + offset, end + offset) for start, end in spans]


@dataclass(frozen=True, slots=True)
class ForcedThought:
    """A context of another level as tokens to follow the chat prompt, ready for the original
    action's tokens.

    ``token_ids`` = forced prefix, sampled thought, forced rest up to and including ``<action>``;
    the thought is ``token_ids[thought_span[0]:thought_span[1]]``.
    """

    level: int
    token_ids: list[int]
    thought_span: Span
    thought: str

    @property
    def thought_tokens(self) -> int:
        """Number of sampled tokens that hold the thought."""
        return self.thought_span[1] - self.thought_span[0]


# Text without any tag. The look-ahead is repeated at every byte, so that a thought can never
# swallow a tag, however the rest of the pattern backtracks.
_TEXT = rb"(?:(?!</?level>|</?think>|</?action>).)*?"
_LEVEL = rb"\A\s*<level>\s*(?P<level>[1-4])\s*</level>\s*"
_ACTION = rb"<action>(?P<action>.*?)</action>"
# Up to the end of what was sampled: the step was cut by its length.
_OPEN_ACTION = rb"<action>(?P<action>(?:(?!</action>).)*)\Z"

# Tried in turn. A pattern's groups say which parts it found; its failure says what was wrong with
# the step.
_PARSERS: tuple[tuple[str, re.Pattern[bytes], ParseFailure | None], ...] = tuple(
    (name, re.compile(pattern, re.DOTALL), failure)
    for name, pattern, failure in (
        ("strict", _LEVEL + rb"<think>(?P<thought>" + _TEXT + rb")</think>\s*" + _ACTION, None),
        ("missing_think", _LEVEL + rb"(?P<thought>)" + _ACTION, None),
        ("unclosed_think", _LEVEL + rb"<think>(?P<thought>" + _TEXT + rb")" + _ACTION, None),
        (
            "unclosed_action",
            _LEVEL + rb"(?:<think>(?P<thought>" + _TEXT + rb")(?:</think>)?\s*)?" + _OPEN_ACTION,
            ParseFailure.UNCLOSED_ACTION,
        ),
        (
            "missing_level",
            rb"\A(?!.*<level>)(?:.*?<think>(?P<thought>" + _TEXT + rb")</think>)?.*?" + _ACTION,
            ParseFailure.MISSING_LEVEL,
        ),
        (
            "invalid_level",
            rb"\A(?!.*<level>\s*[1-4]\s*</level>).*<level>.*?" + _ACTION,
            ParseFailure.INVALID_LEVEL,
        ),
        (
            "misplaced",
            rb"<level>\s*(?P<level>[1-4])\s*</level>.*?" + _ACTION,
            ParseFailure.MISPLACED_LEVEL,
        ),
        ("any_action", _ACTION, ParseFailure.MISPLACED_LEVEL),
        ("open_action", _OPEN_ACTION, ParseFailure.UNCLOSED_ACTION),
        ("level_only", _LEVEL, ParseFailure.MISSING_ACTION),
    )
)


class _Bytes:
    """Token bytes joined, with the map from byte ranges back to token ranges."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.text = b"".join(pieces)
        self.starts = list(accumulate((len(piece) for piece in pieces), initial=0))

    def tokens(self, start: int, end: int) -> Span:
        """Tokens that hold part of bytes ``[start, end)``; for an empty range an empty span at the
        next token.
        """
        if start == end:
            first = bisect_left(self.starts, start)
            return first, first
        # bisect_right passes over tokens without bytes, which start where the next one does.
        return bisect_right(self.starts, start) - 1, bisect_left(self.starts, end)


class LevelCodec:
    """Renders and reads steps for one tokenizer.

    ``prefix_ids[k]`` are the tokens of ``<level>k</level><think>``, ``close_ids`` those of
    ``</think><action>``, ``empty_ids`` those of ``<level>1</level><think></think><action>``, and
    ``digit_ids`` the four digit tokens, which all follow the same tokens of ``<level>``. Works
    where tags are single tokens and where they are several. Raises ``ValueError`` for a tokenizer
    that merges a level digit with its tag or renders the four prefixes differently.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self.token_bytes = TokenBytes(tokenizer)
        self.prefix_ids = {level: self._encode(level_prefix(level)) for level in LEVELS}
        self.close_ids = self._encode(THINK_END + ACTION_START)
        self.empty_ids = self._encode(level_prefix(1) + THINK_END + ACTION_START)
        self.digit_ids = tuple(self._digit(level) for level in LEVELS)
        self._check_prefixes()

    def parse_step(self, token_ids: Sequence[int]) -> ParsedStep:
        """Find level, thought and action in the sampled ``token_ids`` of one step; never raises for
        their content.
        """
        joined = _Bytes(self.token_bytes(token_ids))
        for name, pattern, failure in _PARSERS:
            match = pattern.search(joined.text)
            if match:
                return self._read(name, match, joined, failure)
        return ParsedStep(None, None, None, None, None, "", "", "none", ParseFailure.MISSING_ACTION)

    def forced_thought(self, level: int, sampled_ids: Sequence[int]) -> ForcedThought | None:
        """Turn what was sampled after ``prefix_ids[level]`` into a context that ends with
        ``<action>``.

        The thought ends at ``</think>`` or the first ``<action>``, whichever comes first. Sampled
        tokens that hold part of it are kept; what the last of them says of the tag is not forced
        again. None where neither tag was reached (cut by length) or the sampled text opens another
        tag. An empty thought is a thought.
        """
        joined = _Bytes(self.token_bytes(sampled_ids))
        places = [joined.text.find(tag.encode()) for tag in (THINK_END, ACTION_START)]
        ends = [place for place in places if place >= 0]
        if not ends:
            return None
        end = min(ends)
        if re.search(rb"</?level>|<think>|</action>", joined.text[:end]):
            return None
        kept = joined.tokens(0, end)[1]
        spill = joined.text[end : joined.starts[kept]].decode(errors="replace")
        closing = THINK_END + ACTION_START
        # A thought cut at <action> may spill "<a...": then the rest of that tag follows, without
        # </think>.
        rest = closing if closing.startswith(spill) else ACTION_START
        if not rest.startswith(spill):
            return None
        prefix = self.prefix_ids[level]
        # Encoded anew only where a sampled token began the tag: all other contexts end with the
        # same tokens.
        forced = self._encode(rest[len(spill) :]) if spill else list(self.close_ids)
        span = (len(prefix), len(prefix) + kept)
        thought = joined.text[:end].decode(errors="replace")
        sampled = [int(token) for token in sampled_ids[:kept]]
        return ForcedThought(level, [*prefix, *sampled, *forced], span, thought)

    def empty_thought(self) -> ForcedThought:
        """The context of level 1, which needs no generation."""
        at = len(self.prefix_ids[1])
        return ForcedThought(1, list(self.empty_ids), (at, at), "")

    def _read(
        self, parser: str, match: re.Match[bytes], joined: _Bytes, failure: ParseFailure | None
    ) -> ParsedStep:
        parts = {
            name: joined.tokens(*match.span(name))
            for name in match.groupdict()
            if match[name] is not None
        }
        level = parts.get("level")
        action = parts.get("action")
        score = None
        if action is not None:
            start, end = match.span("action")
            # One byte of "</action>" finds its first token, however the tokenizer cuts the tag.
            closed = joined.text[end:].startswith(ACTION_END.encode())
            score = joined.tokens(start, end + 1) if closed else action
            if failure is None and joined.starts[score[0]] != start:
                failure = ParseFailure.MERGED_ACTION
        if failure is None and _width(joined, level) != 1:
            failure = ParseFailure.MERGED_LEVEL
        return ParsedStep(
            level=int(match["level"]) if level else None,
            level_span=level,
            thought_span=parts.get("thought"),
            action_span=action,
            score_span=score,
            thought=_text(match, "thought"),
            action=_text(match, "action"),
            parser=parser,
            failure=failure,
        )

    def _encode(self, text: str) -> list[int]:
        return list(self._tokenizer.encode(text, add_special_tokens=False))

    def _digit(self, level: int) -> int:
        """The token of the digit in the prefix.

        Raises ``ValueError`` where that token holds more than the digit.
        """
        return self.prefix_ids[level][self._digit_position(level)]

    def _digit_position(self, level: int) -> int:
        pieces = self.token_bytes(self.prefix_ids[level])
        joined = _Bytes(pieces)
        at = joined.text.index(str(level).encode())
        position = joined.tokens(at, at + 1)[0]
        if pieces[position] != str(level).encode():
            tokens = [piece.decode(errors="replace") for piece in pieces]
            raise ValueError(
                f"tokenizer merges level digit {level} with its tag: {level_prefix(level)!r} "
                f"becomes {tokens}; add the digits or the tags as tokens of their own"
            )
        return position

    def _check_prefixes(self) -> None:
        around = set()
        for level, ids in self.prefix_ids.items():
            at = self._digit_position(level)
            around.add((tuple(ids[:at]), tuple(ids[at + 1 :])))
        # Only the digit may differ, or the levels would be compared by how their tags are cut.
        if len(around) != 1 or len(set(self.digit_ids)) != len(LEVELS):
            raise ValueError(
                "tokenizer renders the prefixes of the four levels with different tokens around "
                "the digit"
            )


def _width(joined: _Bytes, span: Span | None) -> int:
    return joined.starts[span[1]] - joined.starts[span[0]] if span else 0


def _text(match: re.Match[bytes], group: str) -> str:
    found = match.groupdict().get(group)
    return found.decode(errors="replace") if found else ""
