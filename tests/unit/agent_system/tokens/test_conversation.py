"""One conversation as tokens: how turns are joined, and whether the next turn fits."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_system.tokens.bridge import ChatBridge, PlainBridge
from agent_system.tokens.conversation import TokenConversation, TokenLimits, append_user_text
from agent_system.tokens.ledger import SegmentKind
from tests.helpers.refusals import mentions
from tests.helpers.sampled_turns import ScriptedTurn
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.sampling import StopReason

SYSTEM = {"role": "system", "content": "Play."}


class LetterTokenizer:
    """Tokenizer without a chat template, with one token per character: its code point."""

    def __call__(self, text, *, add_special_tokens=False, **options):
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, token_ids, **options):
        return "".join(map(chr, token_ids))


def make_conversation(*, opening=(), **limits):
    return TokenConversation(PlainBridge(LetterTokenizer()), TokenLimits(**limits), opening)


def list_segments(conversation):
    return [(s.kind, s.turn, s.episode, len(s.ids)) for s in conversation.ledger.all_segments]


# ---- joined turns -------------------------------------------------------------------------------


def test_conversation_is_prompt_turn_and_bridge():
    tokenizer = make_tiny_tokenizer()
    bridge = ChatBridge(tokenizer)
    conversation = TokenConversation(bridge, opening=[SYSTEM])
    assert conversation.add_observation("You are at 1.", 0)
    prompt = bridge.encode_first_prompt([SYSTEM, {"role": "user", "content": "You are at 1."}])
    assert conversation.prompt_ids == prompt
    sampled = [5, 6, 7]
    segment = conversation.add_turn(ScriptedTurn(sampled), 0)
    assert (segment.start, segment.end_position) == (len(prompt), len(prompt) + 3)
    assert conversation.add_observation("You are at 2.", 1)
    between = bridge.make_inter_turn_tokens(sampled, "You are at 2.")
    joined = [*between.ids_before, *between.observation, *between.ids_after]
    assert conversation.prompt_ids == [*prompt, *sampled, *joined]
    assert list_segments(conversation) == [
        (SegmentKind.PROMPT, 0, 0, len(prompt)),
        (SegmentKind.AGENT, 0, 0, 3),
        (SegmentKind.BRIDGE, 1, 0, len(between.ids_before)),
        (SegmentKind.ENV, 1, 0, len(between.observation)),
        (SegmentKind.BRIDGE, 1, 0, len(between.ids_after)),
    ]


def test_sampled_end_of_turn_is_not_repeated():
    tokenizer = make_tiny_tokenizer()
    bridge = ChatBridge(tokenizer)
    end = bridge.end_of_turn_id
    assert end is not None
    lengths = []
    for sampled in ([5, end], [5, 6]):
        conversation = TokenConversation(bridge)
        assert conversation.add_observation("a", 0)
        conversation.add_turn(ScriptedTurn(sampled), 0)
        assert conversation.add_observation("b", 1)
        lengths.append(len(conversation.ledger))
    assert lengths == [lengths[1] - 1, lengths[1]]


def test_turn_is_stored_as_sampled():
    conversation = make_conversation()
    conversation.add_observation("ab", 0, episode=1)
    turn = ScriptedTurn([9, 8], [-0.1, -0.2], StopReason.LENGTH, 7)
    segment = conversation.add_turn(turn, 3, episode=2)
    assert (segment.ids, segment.logprobs) == ((9, 8), (-0.1, -0.2))
    assert (segment.turn, segment.episode) == (3, 2)
    assert (segment.stop_reason, segment.policy_version) == (StopReason.LENGTH, 7)
    assert not segment.retokenized
    assert conversation.ledger.all_segments[0].episode == 1
    with pytest.raises(ValueError, check=mentions(2, 1)):
        conversation.add_turn(ScriptedTurn([1, 2], [-0.1]), 4)


def test_turn_of_text_is_marked_as_retokenized():
    conversation = make_conversation()
    conversation.add_observation("ab", 0)
    segment = conversation.add_text_turn("hi", 2, episode=5)
    assert segment.ids == (ord("h"), ord("i"))
    assert segment.kind is SegmentKind.AGENT and segment.retokenized
    assert (segment.turn, segment.episode) == (2, 5)
    assert segment.stop_reason is StopReason.STOP and segment.policy_version is None
    assert conversation.ledger.completion_only_mask() == [0, 0, 1, 1]


def test_forced_prefix_is_in_the_turn_and_not_trained():
    conversation = make_conversation()
    conversation.add_observation("ab", 0)
    conversation.add_forced_prefix([70, 71], 2)
    conversation.add_turn(ScriptedTurn([72]), 2)
    assert conversation.prompt_ids == [97, 98, 70, 71, 72]
    assert conversation.ledger.completion_only_mask() == [0, 0, 0, 0, 1]
    assert list_segments(conversation)[1] == (SegmentKind.BRIDGE, 2, 0, 2)
    segments = len(conversation.ledger.all_segments)
    conversation.add_forced_prefix([], 1)
    assert len(conversation.ledger.all_segments) == segments, "an empty prefix adds no segment"


def test_prompt_ids_are_a_copy():
    conversation = make_conversation()
    conversation.add_observation("ab", 0)
    conversation.prompt_ids.append(1)
    assert conversation.prompt_ids == [97, 98] and conversation.ledger.token_ids == [97, 98]


def test_observation_has_its_turn_and_episode():
    conversation = make_conversation()
    conversation.add_observation("a", 4, episode=2)
    conversation.add_turn(ScriptedTurn([1]), 4, episode=2)
    conversation.add_observation("b", 5, episode=3)
    segments = [s for s in conversation.ledger.all_segments if s.kind is not SegmentKind.AGENT]
    assert [(s.turn, s.episode) for s in segments] == [(4, 2), (5, 3)]


def test_default_episode_is_the_first():
    conversation = make_conversation()
    conversation.add_observation("a", 0)
    conversation.add_forced_prefix([70], 0)
    conversation.add_turn(ScriptedTurn([1]), 0)
    conversation.add_observation("b", 1)
    conversation.add_text_turn("c", 1)
    assert [s.episode for s in conversation.ledger.all_segments] == [0] * 5


# ---- limits -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"max_prompt": 3}, True),
        ({"max_prompt": 2}, False),
        ({"max_response": 5, "max_turn": 5}, True),
        ({"max_response": 4, "max_turn": 5}, False),
        ({"max_total": 8, "max_turn": 5}, True),
        ({"max_total": 7, "max_turn": 5}, False),
        ({"max_turn": 10**9}, True),
    ],
)
def test_first_prompt_and_a_turn_must_fit(limits, fits):
    conversation = make_conversation(**limits)
    assert conversation.add_observation("abc", 0) is fits
    assert conversation.prompt_ids == ([97, 98, 99] if fits else [])


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        ({"max_prompt": 3}, True),  # later tokens are not part of the prompt
        ({"max_response": 2 + 4 + 5, "max_turn": 5}, True),
        ({"max_response": 2 + 4 + 4, "max_turn": 5}, False),
        ({"max_total": 3 + 2 + 4 + 5, "max_turn": 5}, True),
        ({"max_total": 3 + 2 + 4 + 4, "max_turn": 5}, False),
    ],
)
def test_later_turn_must_fit_after_its_observation(limits, fits):
    conversation = make_conversation(**limits)
    assert conversation.add_observation("abc", 0)
    conversation.add_turn(ScriptedTurn([1, 2]), 0)
    assert conversation.add_observation("defg", 1) is fits
    assert len(conversation.ledger) == (9 if fits else 5), "nothing is added if it does not fit"


def test_forced_prefix_counts_as_response_in_every_turn():
    for response, fits in ((3 + 1 + 1 + 2, True), (3 + 1 + 1 + 1, False)):
        conversation = make_conversation(max_response=response, max_turn=2)
        assert conversation.add_observation("abcdef", 0)
        conversation.add_forced_prefix([70, 71, 72], 0)
        conversation.add_turn(ScriptedTurn([1]), 0)
        assert conversation.add_observation("x", 1) is fits


def test_no_limits_by_default():
    assert TokenLimits() == TokenLimits(math.inf, math.inf, math.inf, 0)
    assert TokenLimits().allows_turn(10**9, 10**9)


@settings(max_examples=60, deadline=None)
@given(
    texts=st.lists(st.text("abc", max_size=6), min_size=1, max_size=6),
    turns=st.lists(st.lists(st.integers(1, 9), max_size=4), min_size=6, max_size=6),
    prompt=st.integers(0, 8),
    response=st.integers(0, 20),
    total=st.integers(0, 24),
    turn=st.integers(0, 4),
)
def test_no_turn_begins_that_could_exceed_a_limit(texts, turns, prompt, response, total, turn):
    """Turns of at most ``turn`` tokens never exceed a limit, and only turns that could are
    refused.
    """
    conversation = make_conversation(
        max_prompt=prompt, max_response=response, max_total=total, max_turn=turn
    )
    first = len(texts[0])
    for number, text in enumerate(texts):
        before = len(conversation.ledger)
        is_added = conversation.add_observation(text, number)
        longest = before + len(text) + turn
        within = first <= prompt and longest - first <= response and longest <= total
        assert is_added is within
        if not is_added:
            assert len(conversation.ledger) == before
            return
        conversation.add_turn(ScriptedTurn(turns[number][:turn]), number)
        assert len(conversation.ledger) <= total
        assert len(conversation.ledger) - first <= response


# ---- messages -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("messages", "text", "contents"),
    [
        ([], "Hi", ["Hi"]),
        ([SYSTEM], "Hi", ["Play.", "Hi"]),
        ([{"role": "user", "content": "Count"}], "Hi", ["Count\n\nHi"]),
        ([SYSTEM, {"role": "user", "content": "Count"}], "Hi", ["Play.", "Count\n\nHi"]),
        ([{"role": "user", "content": "Hi"}], "Hi", ["Hi"]),
        ([{"role": "user", "content": "Count\n\nHi"}], "Hi", ["Count\n\nHi"]),
        ([{"role": "user", "content": "CountHi"}], "Hi", ["CountHi\n\nHi"]),
        ([{"role": "user", "content": "Count"}], "", ["Count"]),
        ([{"role": "assistant", "content": "Hi"}], "Hi", ["Hi", "Hi"]),
        ([], "", [""]),
    ],
)
def test_user_text_is_joined_to_a_last_user_message(messages, text, contents):
    original = [dict(message) for message in messages]
    actual = append_user_text(messages, text)
    assert [message["content"] for message in actual] == contents
    assert actual[-1]["role"] == "user" and actual is not messages
    assert messages == original, "the caller's messages are unchanged"


def test_opening_and_first_text_are_one_prompt():
    opening = [{"role": "user", "content": "Count."}]
    conversation = make_conversation(opening=opening)
    conversation.add_observation("Go", 0)
    assert LetterTokenizer().decode(conversation.prompt_ids) == "Count.\n\nGo"
