"""Four thinking levels: tags, prompts, and the codec that parses turns and builds their tokens.

The policy begins a turn with the digit of the level that it chooses. A turn is
``<level>l</level><think>z</think><action>a</action>``. Level 1 has an empty think block:
``<level>1</level><think></think><action>``.

The context of a level is the text before the action: prompt, level digit and thought. The four
contexts of a turn differ only in digit and thought. The tokens around an alternative thought (one
sampled at another level) therefore have the same white space between tags as the sampled turn. A
turn that lacks a tag is not scored, because the alternative contexts would contain this tag.

Parsing works on sampled token ids. Their bytes are joined, tags are located in the bytes, and byte
ranges are mapped back to token ranges. Text is never tokenized again.
"""

import re
from bisect import bisect_left, bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate

from rlvcr.token_bytes import TokenBytes, Tokenizer
from verl.utils.chat_tokens import TextEncoder

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

_INSTRUCTIONS_TEMPLATE = (
    "Before every action choose how much to think, from level 1 (least) to level 4 (most). "
    "Think more only where it helps.\n{levels}\n"
    "Answer exactly as: <level>N</level><think>your thought</think><action>your action</action>"
)


def merge_level_prompts(
    overrides: Mapping[int, str] | Mapping[str, str] | None, texts: Mapping[int, str]
) -> dict[int, str]:
    """Return the prompt text of each level: that in ``overrides``, else that in ``texts``.

    The keys of ``overrides`` may be strings. Raises ``ValueError`` for a key that is no level.
    """
    prompts = dict(texts)
    for key, text in (overrides or {}).items():
        if str(key) not in {str(level) for level in LEVELS}:
            raise ValueError(f"algorithm.rlvcr.prompts has key {key!r}: allowed are 1, 2, 3, 4")
        prompts[int(key)] = text
    return prompts


def render_level_instructions() -> str:
    """Return the prompt paragraph about the four thinking levels and the format of a turn."""
    lines = [f"Level {level}: {text}" for level, text in DEFAULT_PROMPTS.items()]
    return _INSTRUCTIONS_TEMPLATE.format(levels="\n".join(lines))


@dataclass(frozen=True, slots=True)
class TurnFormat:
    """Tags and white space of a sampled turn, before, between and after level digit and thought."""

    before: str = "<level>"
    between: str = "</level><think>"
    after: str = THINK_END + ACTION_START

    def render_prefix(self, level: int) -> str:
        """Return the text of a turn before its thought, with the digit of thinking ``level``."""
        if level not in LEVELS:
            raise ValueError(f"level must be one of 1, 2, 3, 4, got {level!r}")
        return f"{self.before}{level}{self.between}"


PLAIN_FORMAT = TurnFormat()


class ParseFailure(StrEnum):
    """Reasons why a turn gets no thinking advantage (credit for its thinking level).

    The values are the suffixes of the metrics ``rlvcr/parse_fail_*``.
    """

    # No <action> at all.
    MISSING_ACTION = "missing_action"
    # <action> without </action>, usually cut by length.
    UNCLOSED_ACTION = "unclosed_action"
    # No <level> tag.
    MISSING_LEVEL = "missing_level"
    # A <level> tag that is unclosed, or that contains anything except 1, 2, 3 or 4.
    INVALID_LEVEL = "invalid_level"
    # Text before <level> or between two tags, or a tag within a thought.
    MISPLACED_LEVEL = "misplaced_level"
    # No think block.
    MISSING_THINK = "missing_think"
    # <think> without </think>.
    UNCLOSED_THINK = "unclosed_think"
    # The digit of this or of any other level shares its token with other text.
    MERGED_LEVEL = "merged_level"
    # The first token of the action contains the end of <action>, so it cannot follow a forced tag.
    MERGED_ACTION = "merged_action"


Span = tuple[int, int]


@dataclass(frozen=True, slots=True)
class ParsedTurn:
    """Parts of a sampled turn. Spans are half-open ranges of indices into its token ids.

    ``level_span``: the token of the digit of the thinking level. ``thought_span``: all tokens that
    contain text of the thought. ``thought_end_span``: the first token of ``</think>``.
    ``action_span``: all tokens that contain text of the action. ``score_span``: the action and the
    first token of ``</action>``, which distinguishes "cabinet 1" from "cabinet 10". The span of a
    missing part is None.

    ``pattern_name`` is the name of the pattern that matched. A turn with a ``failure`` gets no
    credit for its level.

        tokens   <level> 3 </level><think> look </think> <action> go </action>
        indices  0       1 2               3    4        5        6  7
        level_span (1, 2), thought_span (3, 4), thought_end_span (4, 5)
        action_span (6, 7), score_span (6, 8)
    """

    level: int | None
    level_span: Span | None
    thought_span: Span | None
    action_span: Span | None
    score_span: Span | None
    thought: str
    action: str
    pattern_name: str
    failure: ParseFailure | None
    turn_format: TurnFormat = PLAIN_FORMAT
    thought_end_span: Span | None = None

    @property
    def thought_tokens(self) -> int:
        """Number of tokens that contain text of the thought."""
        return self.thought_span[1] - self.thought_span[0] if self.thought_span else 0

    @property
    def level_and_scored_span(self) -> tuple[int, Span]:
        """Thinking level, and ``score_span``: the tokens whose log-probs score the action.

        Raises ``ValueError`` for a turn with a parse failure.
        """
        if self.failure is not None or self.level is None or self.score_span is None:
            raise ValueError(f"a turn with the parse failure {self.failure} cannot be scored")
        return self.level, self.score_span

    def credit_spans(self, offset: int = 0, includes_thought_end: bool = False) -> list[Span]:
        """Return the token ranges that get the credit for the thinking level.

        They are the level digit and the thought; none for a turn with a ``failure``. ``offset``
        (index of the turn's first token in the row) is added to all indices. With
        ``includes_thought_end`` the range of the thought includes the first token of ``</think>``.
        """
        if self.failure is not None:
            return []
        thought = self.thought_span
        if includes_thought_end and thought and self.thought_end_span:
            # The range of an empty thought starts later than the range of its end if one token
            # contains both the end of <think> and the start of </think>.
            thought = min(thought[0], self.thought_end_span[0]), self.thought_end_span[1]
        return [
            (start + offset, end + offset)
            for start, end in filter(None, (self.level_span, thought))
            if start < end
        ]


@dataclass(frozen=True, slots=True)
class AlternativeThought:
    """Alternative thought, sampled at another thinking level than that of the turn.

    ``token_ids`` replace the tokens between the chat prompt and the action of the turn: a forced
    prefix, the sampled thought at ``thought_span``, and forced tokens up to and including
    ``<action>``.
    """

    level: int
    token_ids: list[int]
    thought_span: Span
    thought: str

    @property
    def thought_tokens(self) -> int:
        """Number of sampled tokens that contain text of the thought."""
        return self.thought_span[1] - self.thought_span[0]


# Text without any tag. The look-ahead is tested at every byte, so that the regular expression never
# matches a tag as a part of a thought.
_UNTAGGED_TEXT = rb"(?:(?!</?level>|</?think>|</?action>).)*?"
_LEVEL_PATTERN = rb"\A\s*<level>\s*(?P<level>[1-4])\s*</level>\s*"
_THOUGHT_PATTERN = rb"<think>(?P<thought>" + _UNTAGGED_TEXT + rb")"
_ACTION_PATTERN = rb"<action>(?P<action>.*?)</action>"
# Unclosed action up to the end of the sampled text: the turn was cut by its length limit.
_OPEN_ACTION_PATTERN = rb"<action>(?P<action>(?:(?!</action>).)*)\Z"

_LEVEL_TAG = re.compile(rb"<level>\s*[1-4]\s*</level>")

# (name, pattern, failure): the first pattern that matches is used. Its groups locate level, thought
# and action. The failure is None for a valid turn. ``_match_turn`` determines where a pattern has
# to match.
_TURN_PATTERNS: tuple[tuple[str, re.Pattern[bytes], ParseFailure | None], ...] = tuple(
    (name, re.compile(pattern, re.DOTALL), failure)
    for name, pattern, failure in (
        (
            "strict",
            _LEVEL_PATTERN + _THOUGHT_PATTERN + rb"</think>\s*" + _ACTION_PATTERN,
            None,
        ),
        (
            "missing_think",
            _LEVEL_PATTERN + rb"(?P<thought>)" + _ACTION_PATTERN,
            ParseFailure.MISSING_THINK,
        ),
        (
            "unclosed_think",
            _LEVEL_PATTERN + _THOUGHT_PATTERN + _ACTION_PATTERN,
            ParseFailure.UNCLOSED_THINK,
        ),
        (
            "unclosed_action",
            _LEVEL_PATTERN
            + (rb"(?:" + _THOUGHT_PATTERN + rb"(?:</think>)?\s*)?")
            + _OPEN_ACTION_PATTERN,
            ParseFailure.UNCLOSED_ACTION,
        ),
        (
            "missing_level",
            # Atomic group: if no action follows the first thought, none follows a later one.
            rb"(?>.*?" + _THOUGHT_PATTERN + rb"</think>)?.*?" + _ACTION_PATTERN,
            ParseFailure.MISSING_LEVEL,
        ),
        ("invalid_level", rb"<level>.*?" + _ACTION_PATTERN, ParseFailure.INVALID_LEVEL),
        (
            "misplaced",
            rb"<level>\s*(?P<level>[1-4])\s*</level>.*?" + _ACTION_PATTERN,
            ParseFailure.MISPLACED_LEVEL,
        ),
        ("any_action", _ACTION_PATTERN, ParseFailure.MISPLACED_LEVEL),
        ("open_action", _OPEN_ACTION_PATTERN, ParseFailure.UNCLOSED_ACTION),
        ("level_only", _LEVEL_PATTERN, ParseFailure.MISSING_ACTION),
    )
)


def _match_turn(text: bytes) -> tuple[str, re.Match[bytes], ParseFailure | None] | None:
    """Return name, match and failure of the first pattern that matches the bytes of a turn.

    Each pattern is tried at one position only, so the time is linear in the length of the turn.
    """
    last_action_end = text.rfind(ACTION_END.encode())
    # Start of the last action that is closed.
    last_action_start = text.rfind(ACTION_START.encode(), 0, max(last_action_end, 0))
    level_tag = _LEVEL_TAG.search(text)
    level_start = text.find(b"<level>")
    start_by_pattern = {  # position of a pattern; -1 if it cannot match. Other patterns match at 0.
        "missing_level": 0 if last_action_start >= 0 and level_start < 0 else -1,
        "invalid_level": -1
        if last_action_start < 0 or level_tag
        else text.rfind(b"<level>", 0, last_action_start),
        "misplaced": level_tag.start()
        if level_tag and level_tag.end() <= last_action_start
        else -1,
        "any_action": text.find(ACTION_START.encode()) if last_action_start >= 0 else -1,
        "open_action": text.find(ACTION_START.encode(), last_action_end + 1),
    }
    for name, pattern, failure in _TURN_PATTERNS:
        start = start_by_pattern.get(name, 0)
        if start >= 0 and (match := pattern.match(text, start)):
            return name, match, failure
    return None


class _JoinedBytes:
    """Joined bytes of tokens, with the map from byte ranges back to token ranges."""

    def __init__(self, pieces: Sequence[bytes]) -> None:
        self.text = b"".join(pieces)
        self.token_starts = list(accumulate((len(piece) for piece in pieces), initial=0))

    def find_token_span(self, start: int, end: int) -> Span:
        """Return the range of the tokens that contain at least one of the bytes ``[start, end)``.

        For an empty byte range, return an empty range at the first token from ``start`` on.
        """
        if start == end:
            next_token_index = bisect_left(self.token_starts, start)
            return next_token_index, next_token_index
        # bisect_right skips tokens without bytes, which start at the same byte as the next one.
        return bisect_right(self.token_starts, start) - 1, bisect_left(self.token_starts, end)


@dataclass(frozen=True, slots=True)
class TurnFormatTokens:
    """Token ids of the texts that are inserted, not sampled, around an alternative thought.

    ``prefix_ids[k]``: tokens before the thought of level k. ``closing_ids``: tokens between thought
    and action. ``empty_thought_ids``: all tokens before the action at level 1. ``digit_ids``:
    tokens of the four level digits.
    """

    prefix_ids: Mapping[int, list[int]]
    closing_ids: list[int]
    empty_thought_ids: list[int]
    digit_ids: tuple[int, ...]


class LevelCodec:
    """Parser of turns with a thinking level, and builder of their tokens, for one tokenizer.

    ``prefix_ids`` and ``digit_ids`` (see ``TurnFormatTokens``) are those of the format without
    white space. A tag may be one token or several. Raises ``ValueError`` if the tokenizer merges a
    level digit with its tag, or if the prefixes of two levels differ in more tokens than the digit.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._encoder = TextEncoder(tokenizer)
        self.token_bytes = TokenBytes(tokenizer)
        self._plain_tokens = self._encode_format(PLAIN_FORMAT)
        self.prefix_ids = self._plain_tokens.prefix_ids
        self.digit_ids = self._plain_tokens.digit_ids

    def parse_turn(self, token_ids: Sequence[int]) -> ParsedTurn:
        """Locate level, thought and action in a turn. Invalid content gives a ``failure``."""
        joined_bytes = _JoinedBytes(self.token_bytes(token_ids))
        matched = _match_turn(joined_bytes.text)
        if matched is not None:
            name, match, failure = matched
            return self._build_parsed_turn(name, match, joined_bytes, failure)
        failure = ParseFailure.MISSING_ACTION
        return ParsedTurn(None, None, None, None, None, "", "", "none", failure)

    def encode_format(self, turn_format: TurnFormat) -> TurnFormatTokens:
        """Return the token ids of the texts in ``turn_format``.

        Raises ``ValueError`` if the tokenizer merges a level digit with the text next to it.
        """
        return (
            self._plain_tokens if turn_format == PLAIN_FORMAT else self._encode_format(turn_format)
        )

    def build_forced_thought(
        self, level: int, sampled_ids: Sequence[int], turn_format: TurnFormat = PLAIN_FORMAT
    ) -> AlternativeThought | None:
        """Build an alternative thought of tokens sampled after the forced prefix of ``level``.

        The thought ends at the first ``</think>`` or ``<action>``; forced tokens follow it. If the
        last token of the thought contains the beginning of ``</think>``, only the remaining text is
        forced.

        Returns None if the sampled text contains neither tag (cut by length), or another tag before
        them. Also returns None if the last token of the thought contains the beginning of
        ``<action>``, because ``</think>`` cannot be inserted there. An empty thought is valid.
        """
        joined_bytes = _JoinedBytes(self.token_bytes(sampled_ids))
        tag_positions = [joined_bytes.text.find(tag.encode()) for tag in (THINK_END, ACTION_START)]
        thought_end_positions = [position for position in tag_positions if position >= 0]
        if not thought_end_positions:
            return None
        thought_end = min(thought_end_positions)
        if re.search(rb"</?level>|<think>|</action>", joined_bytes.text[:thought_end]):
            return None
        num_thought_tokens = joined_bytes.find_token_span(0, thought_end)[1]
        trailing_text = joined_bytes.text[
            thought_end : joined_bytes.token_starts[num_thought_tokens]
        ].decode(errors="replace")
        if not turn_format.after.startswith(trailing_text):
            return None
        format_tokens = self.encode_format(turn_format)
        prefix = format_tokens.prefix_ids[level]
        # Use the same closing tokens in every context. Only if the last sampled token contains the
        # beginning of </think>, encode the remaining text separately.
        closing_tokens = (
            self._encode(turn_format.after[len(trailing_text) :])
            if trailing_text
            else format_tokens.closing_ids
        )
        thought_span = (len(prefix), len(prefix) + num_thought_tokens)
        thought = joined_bytes.text[:thought_end].decode(errors="replace")
        thought_ids = [int(token) for token in sampled_ids[:num_thought_tokens]]
        return AlternativeThought(
            level, [*prefix, *thought_ids, *closing_tokens], thought_span, thought
        )

    def build_empty_thought(self, turn_format: TurnFormat = PLAIN_FORMAT) -> AlternativeThought:
        """Return the tokens of the empty thought of thinking level 1, which needs no generation."""
        format_tokens = self.encode_format(turn_format)
        thought_position = len(format_tokens.prefix_ids[1])
        return AlternativeThought(
            1, list(format_tokens.empty_thought_ids), (thought_position, thought_position), ""
        )

    def _build_parsed_turn(
        self,
        pattern_name: str,
        match: re.Match[bytes],
        joined_bytes: _JoinedBytes,
        failure: ParseFailure | None,
    ) -> ParsedTurn:
        token_spans = {
            name: joined_bytes.find_token_span(*match.span(name))
            for name in match.groupdict()
            if match[name] is not None
        }
        level_span = token_spans.get("level")
        action_span = token_spans.get("action")
        score_span = None
        if action_span is not None:
            start, stop = match.span("action")
            # One byte of "</action>" locates its first token for any tokenization of the tag.
            is_closed = joined_bytes.text[stop:].startswith(ACTION_END.encode())
            score_span = joined_bytes.find_token_span(start, stop + 1) if is_closed else action_span
            if failure is None and joined_bytes.token_starts[score_span[0]] != start:
                failure = ParseFailure.MERGED_ACTION
        thought_end_span = None
        if failure is None:
            # One byte of "</think>" locates its first token.
            thought_end = match.end("thought")
            thought_end_span = joined_bytes.find_token_span(thought_end, thought_end + 1)
        turn_format = _extract_format(match) if failure is None else PLAIN_FORMAT
        is_digit_merged = (
            level_span is not None
            and joined_bytes.token_starts[level_span[1]] - joined_bytes.token_starts[level_span[0]]
            != 1
        )
        if is_digit_merged or (failure is None and not self._has_single_token_digits(turn_format)):
            failure = ParseFailure.MERGED_LEVEL
        return ParsedTurn(
            level=int(match["level"]) if level_span else None,
            level_span=level_span,
            thought_span=token_spans.get("thought"),
            action_span=action_span,
            score_span=score_span,
            thought=_decode_regex_group(match, "thought"),
            action=_decode_regex_group(match, "action"),
            pattern_name=pattern_name,
            failure=failure,
            turn_format=turn_format,
            thought_end_span=thought_end_span,
        )

    def _encode(self, text: str) -> list[int]:
        # Forced texts are never the first text of a sequence: they follow a prompt or a thought.
        return self._encoder.encode_continuation(text)

    def _encode_format(self, turn_format: TurnFormat) -> TurnFormatTokens:
        prefixes = {level: self._encode(turn_format.render_prefix(level)) for level in LEVELS}
        digit_indices = {
            level: self._find_digit_index(turn_format, level, ids)
            for level, ids in prefixes.items()
        }
        digit_ids = tuple(prefixes[level][digit_indices[level]] for level in LEVELS)
        tokens_around_digit = {
            (tuple(ids[: digit_indices[level]]), tuple(ids[digit_indices[level] + 1 :]))
            for level, ids in prefixes.items()
        }
        # If more tokens than the digit differed, scores would depend on the tokenization of tags.
        if len(tokens_around_digit) != 1 or len(set(digit_ids)) != len(LEVELS):
            raise ValueError(
                "the tokenizer encodes the prefixes of the four levels with different tokens "
                "around the digit; use a tokenizer that encodes digits as separate tokens"
            )
        closing_ids = self._encode(turn_format.after)
        return TurnFormatTokens(
            prefixes,
            closing_ids,
            self._encode(turn_format.render_prefix(1) + turn_format.after),
            digit_ids,
        )

    def _has_single_token_digits(self, turn_format: TurnFormat) -> bool:
        try:
            return self.encode_format(turn_format).digit_ids == self.digit_ids
        except ValueError:
            return False

    def _find_digit_index(self, turn_format: TurnFormat, level: int, ids: Sequence[int]) -> int:
        """Return the index in the prefix ``ids`` of the token that consists of the level digit."""
        byte_pieces = self.token_bytes(ids)
        joined_bytes = _JoinedBytes(byte_pieces)
        byte_index = joined_bytes.text.index(str(level).encode())
        position = joined_bytes.find_token_span(byte_index, byte_index + 1)[0]
        if byte_pieces[position] != str(level).encode():
            token_texts = [piece.decode(errors="replace") for piece in byte_pieces]
            raise ValueError(
                f"the tokenizer merges level digit {level} with its tag: "
                f"{turn_format.render_prefix(level)!r} becomes {token_texts}; add the digits or "
                "the tags as separate tokens"
            )
        return position


def _extract_format(match: re.Match[bytes]) -> TurnFormat:
    """Return the texts around level digit and thought, from the ``match`` of a valid turn."""
    digit_span, thought_span, action_span = (
        match.span(group) for group in ("level", "thought", "action")
    )
    text_ranges = (
        (0, digit_span[0]),
        (digit_span[1], thought_span[0]),
        (thought_span[1], action_span[0]),
    )
    # Only tags and white space match outside of the groups, and both are ASCII.
    return TurnFormat(*(match.string[start:end].decode("ascii") for start, end in text_ranges))


def _decode_regex_group(match: re.Match[bytes], group: str) -> str:
    group_bytes = match.groupdict().get(group)
    return group_bytes.decode(errors="replace") if group_bytes else ""
