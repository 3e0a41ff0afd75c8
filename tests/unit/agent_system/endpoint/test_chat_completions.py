"""Chat requests: only those are accepted that sample as the run does."""

from dataclasses import replace

import pytest

from agent_system.endpoint.chat_completions import (
    MAX_MESSAGES,
    Reply,
    RequestRefusedError,
    SamplingRules,
    read_request,
)
from tests.helpers.refusals import allowed, fix, mentions
from verl.utils.chat_template import make_tool_call, make_tool_schema
from verl.utils.sampling import StopReason

RULES = SamplingRules(temperature=0.7, top_p=0.9, top_k=-1, max_tokens=48)
HELLO = {"role": "user", "content": "hello"}


def read_chat(**changes):
    return read_request({"model": "policy", "messages": [HELLO], **changes}, RULES)


def test_plain_request_gets_the_turn_limit():
    request = read_chat()
    assert (request.messages, request.stop, request.max_tokens) == ([HELLO], (), 48)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.7, "top_p": 0.9, "top_k": -1},
        {"temperature": None, "tools": None, "stream": False, "n": 1},
        {"tools": [], "tool_choice": "none", "response_format": {"type": "text"}},
        {"logit_bias": {}, "presence_penalty": 0.0, "frequency_penalty": 0, "logprobs": False},
        {"user": "me", "metadata": {"run": "1"}, "store": True},
    ],
)
def test_options_with_default_values_are_accepted(options):
    assert read_chat(**options) == read_chat()


@pytest.mark.parametrize(
    ("key", "value", "allowed"),
    [
        ("temperature", 1.0, "0.7"),
        ("temperature", 0, "0.7"),
        ("top_p", 1.0, "0.9"),
        ("top_k", 5, "-1"),
        ("n", 2, "1"),
        ("stream", True, "False"),
        ("logprobs", True, "False"),
        ("logit_bias", {"5": -100}, "{}"),
        ("presence_penalty", 0.5, "0"),
        ("frequency_penalty", -1, "0"),
        ("tools", [{"type": "function"}], "[]"),
        ("tool_choice", "required", "'auto', 'none'"),
        ("response_format", {"type": "json_object"}, "{'type': 'text'}"),
        ("seed", 3, "none"),
        ("min_p", 0.1, "none"),
        ("reasoning_effort", "low", "none"),
    ],
)
def test_option_that_changes_sampling_is_refused(key, value, allowed):
    with pytest.raises(RequestRefusedError) as refusal:
        read_chat(**{key: value})
    assert (refusal.value.status, refusal.value.param) == (400, key)
    message = refusal.value.message
    assert message.startswith(f"{key}={value!r}: ")
    assert f"; allowed: {allowed}; fix: " in message and key in message.rpartition("; fix: ")[2]


def test_validation_accepts_its_values_and_those_of_training():
    training = {"temperature": 0.7, "top_p": 0.9, "top_k": 40}
    rules = SamplingRules(0.0, 1.0, -1, max_tokens=48, training_values=training)
    body = {"model": "policy", "messages": [HELLO]}
    for values in (training, {"temperature": 0, "top_p": 1, "top_k": -1}):
        assert read_request(body | values, rules) == read_request(body, rules)
    for key, value, accepted in (
        ("temperature", 0.5, "0.0, 0.7"),
        ("top_p", 0.5, "1.0, 0.9"),
        ("top_k", 5, "-1, 40"),
    ):
        with pytest.raises(RequestRefusedError, check=mentions(f"allowed: {accepted};")) as refusal:
            read_request(body | {key: value}, rules)
        assert (refusal.value.status, refusal.value.param) == (400, key)


@pytest.mark.parametrize("key", ["max_tokens", "max_completion_tokens"])
def test_turn_may_be_shorter_and_not_longer(key):
    assert read_chat(**{key: 5}).max_tokens == 5 and read_chat(**{key: 48}).max_tokens == 48
    for invalid in (49, 0, -1, 2.5, "5", True):
        expected = mentions(f"{key}=", "env.max_turn_tokens", "1 to 48")
        with pytest.raises(RequestRefusedError, check=expected):
            read_chat(**{key: invalid})
    assert read_chat(max_tokens=7, max_completion_tokens=9).max_tokens == 7


def test_stop_must_be_texts():
    assert read_chat(stop="end").stop == ("end",)
    assert read_chat(stop=["a", "b"]).stop == ("a", "b")
    for invalid in ("", [""], [1], ["a"] * 5, 7, {"a": 1}):
        with pytest.raises(RequestRefusedError, check=mentions("stop=")):
            read_chat(stop=invalid)


def test_other_model_is_not_found():
    for model in ("gpt-4o", None, 3):
        with pytest.raises(RequestRefusedError, check=mentions("'policy'")) as refusal:
            read_chat(model=model)
        assert (refusal.value.status, refusal.value.code) == (404, "model_not_found")


def test_messages_are_read_as_text():
    reply = {"role": "assistant", "content": "hi", "tool_calls": None, "annotations": []}
    parts = [{"type": "text", "text": "two "}, {"type": "text", "text": "parts"}]
    messages = [{"role": "developer", "content": "be short"}, HELLO, reply]
    actual = read_chat(messages=[*messages, {"role": "user", "content": parts}]).messages
    assert actual == [
        {"role": "system", "content": "be short"},
        HELLO,
        {"role": "assistant", "content": "hi"},
        {"role": "user", "content": "two parts"},
    ]


def test_consecutive_user_messages_are_joined():
    assert read_chat(messages=[HELLO, HELLO]).messages == [
        {"role": "user", "content": "hello\n\nhello"}
    ]


@pytest.mark.parametrize(
    ("messages", "start"),
    [
        (None, "messages=None"),
        ([], "messages=[]"),
        ("hello", "messages='hello'"),
        (["hello"], "messages[0].role='hello'"),
        ([{"role": "tool", "content": "5"}], "messages[0].role='tool'"),
        ([{"content": "5"}], "messages[0].role=None"),
        ([{"role": ["user"], "content": "5"}], "messages[0].role=['user']"),
        ([{"role": "user", "content": 5}], "messages[0].content=5"),
        ([{"role": "user", "content": "half \ud83d"}], "messages[0].content="),
        ([{"role": "user", "content": [{"type": "image_url"}]}], "messages[0].content="),
        ([{**HELLO, "name": "bob"}], "messages[0].name='bob'"),
        (
            [HELLO, {"role": "assistant", "content": "", "tool_calls": [{"id": "1"}]}, HELLO],
            "messages[1].tool_calls=",
        ),
        ([HELLO, {"role": "assistant", "content": "so"}], "messages[-1].role='assistant'"),
        ([{"role": "system", "content": "rules"}], "messages[-1].role='system'"),
    ],
)
def test_invalid_messages_are_refused(messages, start):
    with pytest.raises(RequestRefusedError) as refused:
        read_chat(messages=messages)
    message = refused.value.message
    assert message.startswith(start) and allowed(message) and fix(message)


def test_long_values_are_cut_in_errors():
    with pytest.raises(RequestRefusedError) as refusal:
        read_chat(logit_bias={str(token): 1 for token in range(9999)})
    assert len(refusal.value.message) < 400


def test_many_user_messages_are_joined_in_one_pass():
    texts = [f"m{number}" for number in range(MAX_MESSAGES - 2)]
    messages = [{"role": "system", "content": "s"}, {"role": "system", "content": "t"}]
    request = read_chat(
        messages=[*messages, *({"role": "user", "content": text} for text in texts)]
    )
    assert request.messages == [*messages, {"role": "user", "content": "\n\n".join(texts)}]


@pytest.mark.parametrize("count", [MAX_MESSAGES + 1, 300_000])
def test_number_of_messages_is_bounded(count):
    with pytest.raises(RequestRefusedError) as refusal:
        read_chat(messages=[HELLO] * count)
    assert (refusal.value.status, refusal.value.param) == (400, "messages")


@pytest.mark.parametrize("value", [["x" * 10_000_000], {"k": ["y" * 1_000_000] * 9}, 10**4000])
def test_error_message_about_a_huge_value_is_short(value):
    with pytest.raises(RequestRefusedError) as refusal:
        read_chat(tools=value)
    assert len(str(refusal.value)) < 500


# ---------------------------------------------------------------- tools

TOOL_RULES = replace(RULES, renders_tools=True)
LOOK = make_tool_schema("look", ["place"])
CALL = make_tool_call("look", '{"place": "attic"}', "call00003")
MALFORMED_ARGUMENTS = ("{", "[]", '{"place": "\\ud800"}', '{"place": NaN}')
RESULT = {"role": "tool", "tool_call_id": "call00003", "content": "A mug."}


def read_tool_chat(messages, **changes):
    body = {"model": "policy", "messages": messages, "tools": [LOOK], **changes}
    return read_request(body, TOOL_RULES)


def test_calls_and_results_become_messages_of_the_template():
    reply = {"role": "assistant", "content": None, "tool_calls": [CALL], "refusal": None}
    result = {**RESULT, "name": "look"}  # some clients send the name
    request = read_tool_chat([HELLO, reply, result], tool_choice="auto")
    assert request.tools == [LOOK]
    parsed_call = make_tool_call("look", {"place": "attic"}, "call00003")
    assert request.messages == [
        HELLO,
        {"role": "assistant", "content": "", "tool_calls": [parsed_call]},
        {**RESULT, "name": "look"},
    ]
    with pytest.raises(RequestRefusedError, check=mentions("tool_choice='none'")):
        read_tool_chat([HELLO], tool_choice="none")


@pytest.mark.parametrize(
    "keys", [["reasoning_content"], ["reasoning"], ["thinking"], ["reasoning_content", "reasoning"]]
)
def test_thought_of_an_earlier_reply_is_read(keys):
    reply = {"role": "assistant", "content": "b", **dict.fromkeys(keys, "hm")}
    body = {"model": "policy", "messages": [HELLO, reply, HELLO]}
    request = read_request(body, replace(RULES, renders_thoughts=True))
    message = {"role": "assistant", "content": "b", "reasoning_content": "hm"}
    assert request.messages == [HELLO, message, HELLO]
    with pytest.raises(RequestRefusedError, check=mentions(f"messages[1].{keys[0]}='hm'")):
        read_request(body, RULES)


@pytest.mark.parametrize(
    ("role", "fields"),
    [
        ("user", {"reasoning_content": "hm"}),
        ("assistant", {"reasoning_content": ["hm"]}),
        ("assistant", {"reasoning_content": "\ud800"}),
        ("assistant", {"reasoning_content": "hm", "reasoning": "other"}),
    ],
)
def test_thought_that_no_reply_has_is_refused(role, fields):
    body = {"model": "policy", "messages": [{"role": role, "content": "b", **fields}, HELLO]}
    with pytest.raises(RequestRefusedError, check=mentions(f"messages[0].{list(fields)[-1]}")):
        read_request(body, replace(RULES, renders_thoughts=True))


def test_thought_of_a_reply_is_separate_from_its_content():
    body = Reply("b", StopReason.STOP, 5, 7, thought="hm").build_completion_body()
    (choice,) = body["choices"]
    message = {"role": "assistant", "content": "b", "reasoning_content": "hm", "reasoning": "hm"}
    assert choice["message"] == message


def test_reply_with_calls_has_the_format_of_openai():
    call = make_tool_call("look", {"place": "attic"}, "call00003")
    body = Reply("", StopReason.STOP, 5, 7, tool_calls=[call]).build_completion_body()
    (choice,) = body["choices"]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"] == {"role": "assistant", "content": None, "tool_calls": [CALL]}


@pytest.mark.parametrize(
    "tool",
    [
        "look",
        {"type": "function"},
        {"type": "custom", "function": {"name": "look"}},
        {"type": "function", "function": {"name": "two words"}},
        {"type": "function", "function": {"name": "look", "parameters": []}},
        {"type": "function", "function": {"name": "look", "description": "\ud800"}},
        {"type": "function", "function": {"name": "look", "strict": True}},
    ],
)
def test_malformed_tools_are_refused(tool):
    with pytest.raises(RequestRefusedError, check=mentions("tools[0]")) as caught:
        read_tool_chat([HELLO], tools=[tool])
    assert (caught.value.param or "").startswith("tools[0]")


@pytest.mark.parametrize(
    ("messages", "key"),
    [
        ([HELLO, RESULT], "messages[1].tool_call_id"),
        ([HELLO, {"role": "tool", "content": "A mug."}], "messages[1].tool_call_id"),
        (
            [HELLO, {"role": "assistant", "tool_calls": [CALL]}, {**RESULT, "name": "go"}],
            "messages[2].name",
        ),
        (
            [HELLO, {"role": "assistant", "content": {}, "tool_calls": [CALL]}, RESULT],
            "messages[1].content",
        ),
        ([{**HELLO, "tool_calls": [CALL]}], "messages[0].tool_calls"),
        ([HELLO, {"role": "assistant", "tool_calls": [CALL]}], "messages[-1].role"),
        *(
            ([HELLO, {"role": "assistant", "tool_calls": [call]}, HELLO], "messages[1].tool_calls")
            for call in (
                "x",
                {"id": "1"},
                {**CALL, "id": 5},
                *(make_tool_call("look", text, "1") for text in MALFORMED_ARGUMENTS),
            )
        ),
    ],
)
def test_malformed_calls_and_results_are_refused(messages, key):
    with pytest.raises(RequestRefusedError) as caught:
        read_tool_chat(messages)
    assert (caught.value.param or "").startswith(key)


def test_tools_need_a_template_that_renders_them():
    with pytest.raises(RequestRefusedError, check=mentions("env.history=chat")):
        read_chat(tools=[LOOK])
    with pytest.raises(RequestRefusedError, check=mentions("rename")):
        read_tool_chat([HELLO], tools=[LOOK, LOOK])
