"""Text of an environment or a dataset row never becomes a control token or tag, and is kept
unchanged.
"""

from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.tokens.bridge import TOKEN_SPLIT_CHARACTER, ChatBridge
from tests.helpers.tiny_model import SPECIAL, TAGS
from tests.helpers.tokenizer_cases import END_TURN, KINDS, TOOLS, of_kind

MARKS = [*SPECIAL, *TAGS, *TOOLS, END_TURN, "<unk>"]
WIDE = str.maketrans("<>|/", "\uff1c\uff1e\uff5c\uff0f")
SPELLED = [*MARKS, *(mark.upper() for mark in MARKS), *(mark.translate(WIDE) for mark in MARKS)]
HALVES = [part for mark in MARKS for part in (mark[:1], mark[1:], mark[:-1], mark[-1:])]
ODD = [
    "You see a desk.",
    "\n",
    " ",
    TOKEN_SPLIT_CHARACTER,
    "\u200b",
    "\u212a",
    "system\n",
    "\u00fc\u4e16",
]
HOSTILE = st.lists(
    st.one_of(st.sampled_from([*SPELLED, *HALVES, *ODD]), st.text(max_size=6)), max_size=8
).map("".join)


@cache
def bridge(kind: str) -> ChatBridge:
    return ChatBridge(of_kind(kind))


def list_added_tokens(kind: str) -> set[int]:
    """Return the added tokens except white space and the unknown token."""
    tokenizer = of_kind(kind)
    token_ids = {n for n, token in tokenizer.added_tokens_decoder.items() if token.content.strip()}
    return token_ids - {tokenizer.unk_token_id}


def list_control_tokens(kind: str) -> set[int]:
    marks = SPECIAL if kind == "bytes" else (*SPECIAL, END_TURN)
    return {of_kind(kind).convert_tokens_to_ids(mark) for mark in marks}


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_observation_has_no_control_tokens(kind, text):
    chat_bridge = bridge(kind)
    shown = chat_bridge.make_inter_turn_tokens(
        [], chat_bridge.escape_added_tokens(text)
    ).observation
    assert not list_control_tokens(kind) & set(shown)
    # A tokenizer that normalises text may still read a tag in similar letters.
    if kind in ("bytes", "unmarked"):
        assert not list_added_tokens(kind) & set(shown)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_prompt_has_only_the_control_tokens_of_the_template(kind, text):
    chat_bridge, control_tokens = bridge(kind), list_control_tokens(kind)
    hostile = [{"role": "system", "content": text}, {"role": "user", "content": text}]
    harmless = [{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]
    counts = [
        sum(token in control_tokens for token in chat_bridge.encode_first_prompt(messages))
        for messages in (hostile, harmless)
    ]
    assert counts[0] == counts[1] > 0


@pytest.mark.parametrize("kind", ["bytes", "unmarked"])
@settings(max_examples=150, deadline=None)
@given(text=HOSTILE)
def test_observation_text_is_unchanged(kind, text):
    chat_bridge = bridge(kind)
    ids = chat_bridge.make_inter_turn_tokens([], chat_bridge.escape_added_tokens(text)).observation
    assert of_kind(kind).decode(ids) == text.replace(TOKEN_SPLIT_CHARACTER, "")


@pytest.mark.parametrize("kind", KINDS)
def test_tags_of_a_prompt_stay_single_tokens(kind):
    """The package's instructions have the same tag tokens as the policy's turns."""
    chat_bridge, tokenizer = bridge(kind), of_kind(kind)
    tag = tokenizer.convert_tokens_to_ids("<action>")
    assert tag in chat_bridge.encode_first_prompt(
        [{"role": "user", "content": "say <action> x </action>"}]
    )
    escaped = chat_bridge.escape_added_tokens("say <action> x </action>")
    assert tag not in chat_bridge.encode_first_prompt([{"role": "user", "content": escaped}])
