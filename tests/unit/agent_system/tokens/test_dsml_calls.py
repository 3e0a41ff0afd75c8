"""Tool calls in the tags of DeepSeek V3.2: types of arguments, exact prompts, malformed calls."""

import json

import pytest

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.replies import ReplyReader
from agent_system.tokens.rewritten_calls import rewrite_dsml_calls
from tests.helpers.tool_templates import tool_tokenizer, write_deepseek_tokens
from verl.utils.chat_template import Message, make_tool_schema

TOOLS = [make_tool_schema("look", ["place"])]
QUESTION: Message = {"role": "user", "content": "What?"}
DESK = '<|DSML|parameter name="place" string="true">desk</|DSML|parameter>'
CALL = f'<|DSML|invoke name="look">\n{DESK}\n</|DSML|invoke>'


def write_group(body: str, tag: str = "function_calls") -> str:
    return write_deepseek_tokens(f"<|DSML|{tag}>\n{body}\n</|DSML|{tag}>")


def list_rewritten_calls(reply: str) -> list[dict]:
    begin, end = write_deepseek_tokens("<|DSML|call> </|DSML|call>").split()
    return [json.loads(text.partition(end)[0]) for text in reply.split(begin)[1:]]


def parse(reply: str) -> Message:
    bridge = ChatBridge(tool_tokenizer("deepseek_v32"))
    prompt = bridge.render_with_token_marks([QUESTION], TOOLS)
    return ReplyReader(bridge).parse_reply([QUESTION], prompt, reply, TOOLS)


@pytest.mark.parametrize(
    ("is_text", "text", "value"),
    [
        ("true", "desk", "desk"),
        ("true", "5", "5"),
        ("true", ' two\n<b> "words" ', ' two\n<b> "words" '),
        ("true", "", ""),
        ("false", "5", 5),
        ("false", "true", True),
        ("false", "null", None),
        ("false", '{"a": [1, "é"]}', {"a": [1, "é"]}),
    ],
)
@pytest.mark.parametrize("tag", ["function_calls", "tool_calls"])
def test_attribute_gives_the_type_of_an_argument(is_text, text, value, tag):
    argument = f'<|DSML|parameter name="place" string="{is_text}">{text}</|DSML|parameter>'
    reply = write_group(f'<|DSML|invoke name="look">\n{argument}\n</|DSML|invoke>', tag)
    calls = list_rewritten_calls(rewrite_dsml_calls(reply))
    assert calls == [{"name": "look", "arguments": {"place": value}}]


def test_group_has_several_calls():
    reply = write_group(f'{CALL}\n<|DSML|invoke name="mail.send-now">\n\n</|DSML|invoke>')
    assert list_rewritten_calls(rewrite_dsml_calls(f"I look.\n\n{reply}")) == [
        {"name": "look", "arguments": {"place": "desk"}},
        {"name": "mail.send-now", "arguments": {}},
    ]


@pytest.mark.parametrize(
    "body",
    [
        CALL.replace(' string="true"', ""),
        CALL.replace('"true"', '"maybe"'),
        CALL.replace('"true"', '"false"'),  # desk is no JSON
        CALL.replace('"true">desk', """"false">__import__('os').getcwd()"""),
        CALL.replace("</|DSML|parameter>", ""),
        CALL.replace(DESK, '{"place": "desk"}'),
        CALL.replace(DESK, f"{DESK} and {DESK}"),
        CALL.replace("look", ""),
        CALL.replace("</|DSML|invoke>", ""),
        f"{CALL} and {CALL}",
        CALL.replace('"true">desk', '"false">' + "[" * 5000),
    ],
)
def test_malformed_group_stays_text(body):
    reply = write_group(body)
    assert rewrite_dsml_calls(reply) == reply
    message = parse(f"</think>{reply}")
    assert message["content"] == reply and "tool_calls" not in message


def test_group_after_an_opening_tag_in_the_text_is_rewritten():
    opening = write_deepseek_tokens("<|DSML|function_calls>")
    assert len(list_rewritten_calls(rewrite_dsml_calls(opening + write_group(CALL)))) == 1


def test_calls_in_a_thought_are_a_part_of_it():
    thought = f"I could write {write_group(CALL)}."
    message = parse(f"{thought}</think>\n\n{write_group(CALL)}")
    assert message["reasoning_content"] == thought
    assert len(message["tool_calls"]) == 1 and message["content"] == ""


def test_prompt_after_the_results_of_two_calls():
    reply = "hm</think>I look.\n\n" + write_group(f"{CALL}\n{CALL.replace('desk', 'shelf')}")
    message = parse(reply)
    results = [
        {"role": "tool", "tool_call_id": call["id"], "name": "look", "content": content}
        for call, content in zip(message["tool_calls"], ("A mug.", "A book."), strict=True)
    ]
    template = ChatBridge(tool_tokenizer("deepseek_v32")).template
    assert template.render([QUESTION, message, *results]) == write_deepseek_tokens(
        "<|User|>What?<|Assistant|><think>hm</think>I look.\n\n<|DSML|function_calls>\n"
        '<|DSML|invoke name="look">\n<|DSML|parameter name="place" string="true">desk'
        '</|DSML|parameter>\n</|DSML|invoke>\n<|DSML|invoke name="look">\n<|DSML|parameter '
        'name="place" string="true">shelf</|DSML|parameter>\n</|DSML|invoke>\n'
        "</|DSML|function_calls><|end_of_sentence|>\n\n<function_results>\n<result>A mug.</result>"
        "\n<result>A book.</result>\n</function_results>\n\n<think>"
    )
