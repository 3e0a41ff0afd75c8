"""Tool calls of Kimi K2, whose ids have the name of the function and a number."""

import pytest

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.replies import ReplyReader
from tests.helpers.tool_templates import tool_tokenizer
from verl.utils.chat_template import Message, make_tool_call, make_tool_schema

TOOLS = [make_tool_schema("look", ["place"]), make_tool_schema("go", ["place"])]
QUESTION: Message = {"role": "user", "content": "What?"}
PROMPT = "<|im_assistant|>assistant<|im_middle|>"


def write_call(header: str, arguments: str = '{"place": "desk"}') -> str:
    return f"<|tool_call_begin|>{header}<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def write_section(*calls: str) -> str:
    return f"<|tool_calls_section_begin|>{''.join(calls)}<|tool_calls_section_end|>"


def parse(reply: str, messages: list[Message] | None = None) -> Message:
    bridge = ChatBridge(tool_tokenizer("kimi_k2"))
    messages = messages or [QUESTION]
    prompt = bridge.render_with_token_marks(messages, TOOLS)
    return ReplyReader(bridge).parse_reply(messages, prompt, f"{reply}<|im_end|>", TOOLS)


def list_calls(message: Message) -> list[tuple[str, str]]:
    return [(call["id"], call["function"]["name"]) for call in message["tool_calls"]]


def make_turn(*ids: str) -> list[Message]:
    """Return a turn of calls with ``ids``, and their results."""
    calls = [make_tool_call("look", {"place": "desk"}, id_) for id_ in ids]
    turn: Message = {"role": "assistant", "content": "", "tool_calls": calls}
    results = [
        {"role": "tool", "tool_call_id": id_, "name": "look", "content": "A mug."} for id_ in ids
    ]
    return [turn, *results]


def test_prompt_after_a_result_has_the_sampled_id_twice():
    message = parse("<think>hm</think>I look." + write_section(write_call("functions.look:3")))
    result = {"role": "tool", "tool_call_id": "functions.look:3", "name": "look", "content": "No."}
    template = ChatBridge(tool_tokenizer("kimi_k2")).template
    assert template.render([QUESTION, message, result]) == (
        "<|im_user|>user<|im_middle|>What?<|im_end|><|im_assistant|>assistant<|im_middle|>"
        "<think>hm</think>I look.<|tool_calls_section_begin|><|tool_call_begin|>functions.look:3"
        '<|tool_call_argument_begin|>{"place": "desk"}<|tool_call_end|><|tool_calls_section_end|>'
        "<|im_end|><|im_system|>look<|im_middle|>## Return of functions.look:3\nNo.<|im_end|>"
        f"{PROMPT}"
    )


@pytest.mark.parametrize(
    ("header", "name"),
    [
        ("functions.look:0", "look"),
        ("look:12", "look"),
        ("functions.mail.send-now:1", "mail.send-now"),
        ("functions.a:b:1", "a:b"),
        ("functions.functions.look:1", "functions.look"),
    ],
)
def test_name_is_a_part_of_the_sampled_id(header, name):
    message = parse(write_section(write_call(header)))
    assert list_calls(message) == [(header, name)]


def test_white_space_around_the_id_is_no_part_of_it():
    message = parse(write_section("\n" + write_call("\nfunctions.look:0\n") + "\n"))
    assert list_calls(message) == [("functions.look:0", "look")]


@pytest.mark.parametrize(
    "call",
    [
        write_call("functions.look"),
        write_call("functions.look:"),
        write_call("functions.look:one"),
        write_call("functionslook0"),
        write_call(":0"),
        write_call("look desk:0"),
        write_call("functions.look:0", "{'place': 'desk'}"),
        write_call("functions.look:0", "__import__('os').getcwd()"),
        write_call("functions.look:0", '["desk"]'),
        write_call("functions.look:0", ""),
        write_call("functions.look:0").replace("<|tool_call_argument_begin|>", ""),
        write_call("functions.look:0").replace("<|tool_call_begin|>", ""),
    ],
)
def test_malformed_call_stays_text(call):
    text = write_section(call)
    assert parse(text) == {"role": "assistant", "content": text}


def test_repeated_id_is_replaced_by_one_with_the_name():
    """The numbers 0 and 2 are those of earlier calls of ``look``."""
    messages = [QUESTION, *make_turn("functions.look:0", "functions.look:2")]
    reply = write_section(write_call("functions.look:2"), write_call("functions.go:3"))
    assert list_calls(parse(reply, messages)) == [
        ("functions.look:1", "look"),
        ("functions.go:3", "go"),
    ]


def test_thought_that_the_template_removes_is_no_part_of_the_content():
    message = parse("<think>hm</think>A mug.")
    assert message == {"role": "assistant", "reasoning_content": "hm", "content": "A mug."}
