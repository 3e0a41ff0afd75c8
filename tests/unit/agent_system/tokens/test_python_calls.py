"""Python-style tool calls of LFM models: names, literals, escapes and malformed calls."""

import pytest

from agent_system.tokens.rewritten_calls import parse_python_calls, rewrite_python_calls


def test_each_call_becomes_a_json_object_in_tags():
    reply = "say<|tool_call_start|>[look(place='desk 1'), go(n=2)]<|tool_call_end|>end"
    assert rewrite_python_calls(reply) == (
        'say<|tool_call_start|>{"name": "look", "arguments": {"place": "desk 1"}}<|tool_call_end|>'
        '<|tool_call_start|>{"name": "go", "arguments": {"n": 2}}<|tool_call_end|>end'
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("'two words, f(x=1)'", "two words, f(x=1)"),
        (r"'it\'s'", "it's"),
        (r"'a\nb'", "a\nb"),
        ("'a\nb'", "a\nb"),
        (r"'C:\dir'", r"C:\dir"),
        (r"'C:\\dir'", r"C:\dir"),
        ('"it\'s"', "it's"),
        ("-1.5", -1.5),
        ("True", True),
        ("None", None),
        ("['a', 1]", ["a", 1]),
        ('{"a": true, "b": [null, false]}', {"a": True, "b": [None, False]}),
    ],
)
def test_argument_has_the_value_of_its_literal(text, value):
    call = {"name": "look", "arguments": {"place": value}}
    assert parse_python_calls(f"[look(place={text})]") == [call]


def test_names_need_not_be_names_of_python():
    (call,) = parse_python_calls("[mail.send-now(from='a', class='b')]")
    assert call == {"name": "mail.send-now", "arguments": {"from": "a", "class": "b"}}


@pytest.mark.parametrize(
    "calls",
    [
        "[look(place=desk)]",
        "[look(place=open('secret'))]",
        "[look('desk')]",
        "[look(**{'place': 'desk'})]",
        "[look(place={1, 2})]",
        "[look(place=b'desk')]",
        "[look.place]",
        "look(place='desk')",
        "[look(place='it's')]",
        "[name7#\n(place='desk')]",
        "[name0 \\\n(name1='desk')]",
        "[" * 5000,
    ],
)
def test_malformed_calls_stay_text(calls):
    reply = f"<|tool_call_start|>{calls}<|tool_call_end|>"
    assert rewrite_python_calls(reply) == reply
