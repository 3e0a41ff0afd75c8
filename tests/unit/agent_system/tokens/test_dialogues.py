"""EpisodeDialogues: the conversation that a list of messages continues, and its tokens."""

import pytest

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import NO_LIMITS, TokenLimits
from agent_system.tokens.dialogues import EpisodeDialogues
from agent_system.tokens.ledger import SegmentKind
from tests.helpers.sampled_turns import ScriptedTurn
from tests.helpers.tiny_model import make_tiny_tokenizer
from verl.utils.chat_template import UnsupportedTemplateError

SYSTEM = {"role": "system", "content": "Play. Answer <action>left</action>"}


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


@pytest.fixture(scope="module")
def tokenizer():
    return make_tiny_tokenizer()


@pytest.fixture
def bridge(tokenizer):
    return ChatBridge(tokenizer)


def encode_letters(tokenizer, text: str) -> list[int]:
    """Return the tokens of ``text`` letter by letter, unlike its encoding, and the end of turn."""
    ids = [token for letter in text for token in tokenizer(letter)["input_ids"]]
    assert ids != tokenizer(text)["input_ids"]
    return [*ids, tokenizer.eos_token_id]


@pytest.mark.parametrize("history", ["append", "window", "chat"])
def test_second_try_of_a_cancelled_request_continues_its_row(bridge, history):
    dialogues = EpisodeDialogues(bridge, NO_LIMITS, history)
    messages = [SYSTEM, user("one")]
    first = dialogues.open_request_dialogue(messages, 0)
    assert first is not None
    tokens = list(first.conversation.ledger.token_ids)
    # Another request with equal messages, while the first one waits, gets a row of its own.
    assert dialogues.open_request_dialogue(messages, 1) is not first
    first.abandon_reply()
    assert dialogues.open_request_dialogue([SYSTEM, user("two")], 2) is not first
    assert dialogues.open_request_dialogue(messages, 3) is first
    assert first.conversation.ledger.token_ids == tokens
    assert dialogues.open_request_dialogue(messages, 4) is not first


def test_quoted_reply_keeps_its_sampled_tokens(bridge, tokenizer):
    dialogues = EpisodeDialogues(bridge, NO_LIMITS, "append")
    sampled = encode_letters(tokenizer, "the apple")
    first = dialogues.open_request_dialogue([SYSTEM, user("one")], 0)
    assert first is not None
    prompt = list(first.conversation.ledger.token_ids)
    first.add_reply(ScriptedTurn(sampled), 0, "the apple")
    continued = dialogues.open_request_dialogue(
        [SYSTEM, user("one"), reply("the apple"), user("two")], 1
    )
    assert continued is first
    between = bridge.make_inter_turn_tokens(sampled, "two")
    added = [*between.ids_before, *between.observation, *between.ids_after]
    assert first.conversation.prompt_ids == [*prompt, *sampled, *added]
    (agent,) = first.conversation.ledger.agent_segments
    assert (list(agent.ids), agent.policy_version, agent.logprobs[0]) == (sampled, 4, -0.5)


@pytest.mark.parametrize(
    "messages",
    [
        [SYSTEM, user("one")],
        [SYSTEM, user("one"), reply("other words"), user("two")],
        [SYSTEM, user("other"), reply("said"), user("two")],
        [user("one"), reply("said"), user("two")],
        [SYSTEM, user("one"), reply("said"), user("two"), reply("more"), user("three")],
        [SYSTEM, user("one"), {"role": "system", "content": "said"}, user("two")],
    ],
)
def test_messages_that_do_not_continue_start_a_fork(bridge, messages):
    dialogues = EpisodeDialogues(bridge, NO_LIMITS, "append")
    first = dialogues.open_request_dialogue([SYSTEM, user("one")], 0)
    assert first is not None
    first.add_reply(ScriptedTurn([5, 6]), 0, "said")
    token_ids = list(first.conversation.ledger.token_ids)
    fork = dialogues.open_request_dialogue(messages, 1)
    assert fork is not None and fork is not first and fork.ledger_index == 1
    assert first.conversation.ledger.token_ids == token_ids, "the first dialogue is unchanged"
    assert fork.conversation.prompt_ids == bridge.encode_first_prompt(messages)
    assert [segment.kind for segment in fork.conversation.ledger.all_segments] == [
        SegmentKind.PROMPT
    ]


def test_each_quotation_of_a_reply_continues_once(bridge):
    for quoted in ("said", "said</action>"):
        dialogues = EpisodeDialogues(bridge, NO_LIMITS, "append")
        first = dialogues.open_request_dialogue([user("one")], 0)
        assert first is not None
        first.add_reply(ScriptedTurn([5, 6]), 0, "said</action>", stop=("</action>",))
        more = [user("one"), reply(quoted), user("two")]
        assert dialogues.open_request_dialogue(more, 1) is first
        # The next reply is awaited, so the same request again starts a new dialogue.
        assert dialogues.open_request_dialogue(more, 2) is not first


def test_no_dialogue_continues_without_extension(bridge):
    dialogues = EpisodeDialogues(bridge, NO_LIMITS, "window")
    first = dialogues.open_request_dialogue([user("one")], 0)
    assert first is not None
    first.add_reply(ScriptedTurn([5, 6]), 0, "said")
    assert (
        dialogues.open_request_dialogue([user("one"), reply("said"), user("two")], 1) is not first
    )
    assert len(dialogues.ledgers) == 2


def test_turn_that_does_not_fit_changes_nothing(bridge):
    dialogues = EpisodeDialogues(
        bridge, TokenLimits(max_prompt=40, max_response=32, max_turn=8), "append"
    )
    first = dialogues.open_request_dialogue([user("one")], 0)
    assert first is not None
    first.add_reply(ScriptedTurn([5, 6]), 0, "said")
    token_ids = list(first.conversation.ledger.token_ids)
    assert (
        dialogues.open_request_dialogue([user("one"), reply("said"), user("word " * 30)], 1) is None
    )
    assert dialogues.open_request_dialogue([user("word " * 90)], 1) is None
    assert first.conversation.ledger.token_ids == token_ids and len(dialogues.ledgers) == 1
    assert dialogues.open_request_dialogue([user("one"), reply("said"), user("on")], 1) is first


def test_user_text_has_no_tags_and_system_text_has(bridge, tokenizer):
    dialogues = EpisodeDialogues(bridge, NO_LIMITS, "append")
    dialogue = dialogues.open_request_dialogue(
        [SYSTEM, user("<action>left</action> <|im_end|>")], 0
    )
    assert dialogue is not None
    ids = dialogue.conversation.prompt_ids
    tags = [ids.count(tokenizer.convert_tokens_to_ids(tag)) for tag in ("<action>", "</action>")]
    assert tags == [1, 1], "only those of the system message"
    assert ids.count(tokenizer.eos_token_id) == 2, "one after each message"
    assert tokenizer.decode(ids).count("<action>left</action>") == 2


def test_roles_that_the_template_refuses_are_an_error(tokenizer):
    refusing = make_tiny_tokenizer()
    refusing.chat_template = (
        "{%- if messages | length > 1 -%}{{ raise_exception('one at a time') }}{%- endif -%}"
        + refusing.chat_template
    )
    dialogues = EpisodeDialogues(ChatBridge(refusing), NO_LIMITS, "window")
    with pytest.raises(UnsupportedTemplateError):
        dialogues.open_request_dialogue([user("one"), reply("said"), user("two")], 0)


@pytest.mark.parametrize(
    ("limits", "fits"),
    [
        (TokenLimits(max_prompt=40, max_response=40), False),
        (TokenLimits(max_prompt=40, max_response=1e9, max_total=80), False),
        (TokenLimits(max_prompt=1e6, max_response=40), True),
        (NO_LIMITS, True),
    ],
)
def test_text_far_beyond_the_limit_is_not_tokenised(bridge, monkeypatch, limits, fits):
    encoded = []
    monkeypatch.setattr(bridge, "escape_added_tokens", lambda text: encoded.append(text) or text)
    dialogues = EpisodeDialogues(bridge, limits, "append")
    dialogue = dialogues.open_request_dialogue([user("a" * 10_000)], 0)
    assert (dialogue is not None, bool(encoded)) == (fits, fits)
