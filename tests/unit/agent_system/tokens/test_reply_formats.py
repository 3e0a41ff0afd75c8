"""Tool calls and thoughts in the formats of model families without a template in ``trl``."""

from typing import Any

import pytest

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import NO_LIMITS
from agent_system.tokens.dialogues import EpisodeDialogues, list_tool_calls
from agent_system.tokens.replies import ReplyReader
from tests.helpers.sampled_turns import ScriptedTurn
from tests.helpers.tool_templates import TEMPLATES, tool_tokenizer, write_deepseek_tokens
from verl.utils.chat_template import THOUGHT_KEY, Message, make_tool_call, make_tool_schema

TOOLS = [make_tool_schema("look", ["place"])]
QUESTION: Message = {"role": "user", "content": "What is on the desk?"}
IDS = ("a1B2c3D4e", "f5G6h7I8j")
KIMI_IDS = ("functions.look:0", "functions.look:1")
# Replies with one call that is malformed after "!", which ends the correct part.
ONE_CALL = {
    "mistral": '[TOOL_CALLS] [{"name": "NAME", "arguments": {"place": "desk"}!, '
    '"id": "a1B2c3D4e"}]',
    "mistral_args": '[TOOL_CALLS]NAME[ARGS]{"place": "desk"!}',
    "mistral_call_id": '[TOOL_CALLS]NAME[CALL_ID]a1B2c3D4e[ARGS]{"place": "desk"!}',
    "deepseek_v3": "<|tool_calls_begin|><|tool_call_begin|>function<|tool_sep|>NAME\n```json\n"
    '{"place": "desk"!}\n```<|tool_call_end|><|tool_calls_end|>',
    "deepseek_v31": "<|tool_calls_begin|><|tool_call_begin|>NAME<|tool_sep|>"
    '{"place": "desk"!}<|tool_call_end|><|tool_calls_end|>',
    "deepseek_v32": '<|DSML|function_calls>\n<|DSML|invoke name="NAME">\n'
    '<|DSML|parameter name="place" string="true">desk</|DSML|parameter!>\n'
    "</|DSML|invoke>\n</|DSML|function_calls>",
    "kimi_k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.NAME:0"
    '<|tool_call_argument_begin|>{"place": "desk"!}<|tool_call_end|><|tool_calls_section_end|>',
    "cohere": '<|START_ACTION|>[\n    {"tool_call_id": "0", "tool_name": "NAME", "parameters": '
    '{"place": "desk"}!}\n]<|END_ACTION|>',
}
THOUGHT_IN_CONTENT = "[THINK]hm[/THINK]"
pytestmark = pytest.mark.parametrize("name", TEMPLATES)


def list_ids(name: str) -> tuple[str, str]:
    return KIMI_IDS if name == "kimi_k2" else IDS


def make_calls(name: str, num_calls: int) -> list[dict[str, Any]]:
    ids = list_ids(name)[:num_calls]
    places = ("desk", "é")
    return [make_tool_call("look", {"place": places[n]}, id_) for n, id_ in enumerate(ids)]


def write_reply(name: str, tool: str = "look", mark: str = "") -> str:
    """Return a reply with one call of ``tool``, with ``mark`` in the place of "!"."""
    text = ONE_CALL[name].replace("NAME", tool).replace("!", mark)
    return write_deepseek_tokens(text) if name.startswith("deepseek") else text


def parse(name: str, text: str) -> Message:
    bridge = ChatBridge(tool_tokenizer(name))
    prompt = bridge.render_with_token_marks([QUESTION], TOOLS)
    return ReplyReader(bridge).parse_reply([QUESTION], prompt, text, TOOLS)


def list_functions(message: Message) -> list[dict[str, Any]]:
    return [call["function"] for call in list_tool_calls(message)]


def after_thought(name: str, text: str) -> str:
    """Return the reply ``text`` after an empty thought, if the generation prompt opens one."""
    reader = ReplyReader(ChatBridge(tool_tokenizer(name)))
    return f"</think>{text}" if reader.thought_opening_tag else text


def test_format_is_found(name):
    assert ReplyReader(ChatBridge(tool_tokenizer(name))).tool_format == name


@pytest.mark.parametrize("num_calls", [1, 2])
@pytest.mark.parametrize("content", ["", "I look."])
@pytest.mark.parametrize("has_thought", [False, True])
def test_reply_that_the_template_writes_extends_its_row(name, num_calls, content, has_thought):
    """Sample what the template writes, send the received message back, and get the same row."""
    bridge = ChatBridge(tool_tokenizer(name))
    dialogues = EpisodeDialogues(bridge, NO_LIMITS, "chat")
    reader = ReplyReader(bridge)
    written: Message = {"role": "assistant", "content": content}
    calls = make_calls(name, num_calls)
    written["tool_calls"] = reader.format_tool_calls(calls)
    if (has_thought or reader.thought_opening_tag) and not reader.thought_keys:
        written["content"] = THOUGHT_IN_CONTENT + content
    elif has_thought or reader.thought_opening_tag:
        written[reader.thought_keys[0]] = "hm"
    first = dialogues.open_request_dialogue([QUESTION], 0, TOOLS)
    assert first is not None
    prompt = first.conversation.prompt_ids
    text = bridge.template.render([QUESTION, written], add_generation_prompt=False, tools=TOOLS)
    sampled = bridge.tokenizer(text, add_special_tokens=False)["input_ids"][len(prompt) :]
    ends = [n for n, token in enumerate(sampled) if token in bridge.end_ids]
    sampled = sampled[: ends[0] + 1]
    first.add_reply(ScriptedTurn(sampled), 0, bridge.decode(sampled))
    answer = first.answers[-1]
    assert list_functions(answer.message) == [call["function"] for call in calls]
    ids = [call["id"] for call in answer.message["tool_calls"]]
    has_ids = name in ("mistral", "mistral_call_id", "kimi_k2")
    assert ids == list((list_ids(name) if has_ids else ("call00000", "call00001"))[:num_calls])
    # Cohere's template omits the text of a turn with calls.
    assert answer.content == (written["content"] if written["content"] in text else "")
    assert answer.thought == ("hm" if reader.thought_keys and "hm" in text else "")
    quoted: Message = {"role": "assistant", "content": answer.content}
    quoted["tool_calls"] = list_tool_calls(answer.message)
    if answer.thought:
        quoted[THOUGHT_KEY] = answer.thought
    results = [
        {"role": "tool", "tool_call_id": call_id, "name": "look", "content": "A mug."}
        for call_id in ids
    ]
    assert dialogues.open_request_dialogue([QUESTION, quoted, *results], 1, TOOLS) is first
    (segment,) = first.conversation.ledger.agent_segments
    assert list(segment.ids) == sampled and segment.start == len(prompt)


def test_call_of_an_unknown_tool_is_a_call(name):
    message = parse(name, after_thought(name, write_reply(name, tool="jump")))
    assert list_functions(message) == [{"name": "jump", "arguments": {"place": "desk"}}]


@pytest.mark.parametrize("mark", [",,", "]", "NaN", ': "x"'])
def test_malformed_call_stays_text(name, mark):
    text = write_reply(name, mark=mark)
    message = parse(name, after_thought(name, text))
    # The end of the turn is no part of the content: Cohere's turns of calls end with this token.
    assert "tool_calls" not in message
    assert message["content"] == text.removesuffix("<|END_ACTION|>")


@pytest.mark.parametrize("num_lines", [0, 1, 3])
def test_text_before_a_call_is_the_content(name, num_lines):
    before = "<|START_RESPONSE|>I look.<|END_RESPONSE|>" if name == "cohere" else "I look."
    message = parse(name, after_thought(name, before + "\n" * num_lines + write_reply(name)))
    assert message["content"] == "I look." and len(list_functions(message)) == 1


def test_call_in_a_thought_is_no_call(name):
    before, after = {
        "cohere": ("<|START_THINKING|>", "<|END_THINKING|><|START_RESPONSE|>"),
        "deepseek_v3": ("<think>", "</think>"),
        "deepseek_v31": ("", "</think>"),  # the prompt opens the thought
        "deepseek_v32": ("", "</think>"),
        "kimi_k2": ("<think>", "</think>"),
    }.get(name, ("[THINK]", "[/THINK]"))
    for text in (write_reply(name), write_reply(name) + after + "I look."):
        assert "tool_calls" not in parse(name, before + text)


def test_call_that_was_cut_off_stays_text(name):
    text = write_reply(name)
    for length in range(text.index("desk"), text.index("desk") + len('desk"')):
        message = parse(name, after_thought(name, text[:length]))
        assert "tool_calls" not in message and message["content"] == text[:length]


def test_second_group_of_calls_is_not_lost(name):
    """A second group of calls is a further group, not a replacement of the first."""
    text = write_reply(name) * 2
    message = parse(name, after_thought(name, text))
    calls = list_functions(message)
    assert len(calls) == 2 or (not calls and text in message["content"])


def test_id_that_the_template_refuses_is_replaced(name):
    text = write_reply(name).replace(IDS[0], "abc")
    message = parse(name, after_thought(name, text))
    (call,) = list_tool_calls(message)
    kept = {"mistral_call_id": "abc", "kimi_k2": KIMI_IDS[0]}
    assert call["id"] == kept.get(name, "call00000")


def test_id_of_an_earlier_call_is_not_used_again(name):
    bridge = ChatBridge(tool_tokenizer(name))
    reader = ReplyReader(bridge)
    earlier = {
        "role": "assistant",
        "content": "",
        "tool_calls": reader.format_tool_calls(make_calls(name, 1)),
    }
    result = {
        "role": "tool",
        "tool_call_id": list_ids(name)[0],
        "name": "look",
        "content": "A mug.",
    }
    messages = [QUESTION, earlier, result]
    prompt = bridge.render_with_token_marks(messages, TOOLS)
    message = reader.parse_reply(messages, prompt, after_thought(name, write_reply(name)), TOOLS)
    (call,) = message["tool_calls"]
    assert call["id"] == ("functions.look:1" if name == "kimi_k2" else "call00000")
