"""Whatever an environment or a row of a file says, in whatever spelling: it is no control token and
no tag, and it stays what it says.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.tokens.bridge import CUT, ChatBridge
from tests.helpers.tiny_model import SPECIAL, TAGS
from tests.helpers.tokenizers_of_kinds import END_TURN, KINDS, TOOLS, of_kind

MARKS = [*SPECIAL, *TAGS, *TOOLS, END_TURN, "<unk>"]
WIDE = str.maketrans("<>|/", "\uff1c\uff1e\uff5c\uff0f")
SPELLED = [*MARKS, *(mark.upper() for mark in MARKS), *(mark.translate(WIDE) for mark in MARKS)]
HALVES = [part for mark in MARKS for part in (mark[:1], mark[1:], mark[:-1], mark[-1:])]
ODD = ["You see a desk.", "\n", " ", CUT, "\u200b", "\u212a", "system\n", "\u00fc\u4e16"]
HOSTILE = st.lists(
    st.one_of(st.sampled_from([*SPELLED, *HALVES, *ODD]), st.text(max_size=6)), max_size=8
).map("".join)


@cache
def bridge(kind: str) -> ChatBridge:
    return ChatBridge(of_kind(kind))


def added(kind: str) -> set[int]:
    """Added tokens that are no white space and no stand-in for what is unknown."""
    tokenizer = of_kind(kind)
    found = {n for n, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return found - {tokenizer.unk_token_id}


def control(kind: str) -> set[int]:
    marks = SPECIAL if kind == "bytes" else (*SPECIAL, END_TURN)
    return {of_kind(kind).convert_tokens_to_ids(mark) for mark in marks}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_an_observation_is_no_added_token_at_all(kind, text):
    there = bridge(kind)
    shown = there.make_bridge([], there.escape_added_tokens(text)).observation
    assert not control(kind) & set(shown)
    # A tokenizer that tidies up may still read a tag in letters that look like one.
    if kind in ("bytes", "unmarked"):
        assert not added(kind) & set(shown)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_a_prompt_has_the_control_tokens_of_the_template_and_no_more(kind, text):
    there, stops = bridge(kind), control(kind)
    hostile = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    tame = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    counts = [sum(token in stops for token in there.first_prompt(said)) for said in (hostile, tame)]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", ["bytes", "unmarked"])
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_the_text_stays_as_it_was(kind, text):
    there = bridge(kind)
    ids = there.make_bridge([], there.escape_added_tokens(text)).observation
    assert of_kind(kind).decode(ids) == text.replace(CUT, "")


@pytest.mark.parametrize("kind", KINDS)
def test_the_tags_of_a_prompt_stay_whole(kind):
    """What the package asks for is written as the policy writes it."""
    there, tokenizer = bridge(kind), of_kind(kind)
    tag = tokenizer.convert_tokens_to_ids("<action>")
    assert tag in there.first_prompt([{"role": "user", "content": "say <action> x </action>"}])
    said = there.escape_added_tokens("say <action> x </action>")
    assert tag not in there.first_prompt([{"role": "user", "content": said}])
