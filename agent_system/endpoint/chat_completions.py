"""Requests and responses of the endpoint, in the format of OpenAI's chat completions.

Keys of a request that would change the sampling settings of the run are refused.
"""

import itertools
import json
import re
import reprlib
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Any, TypeGuard

from verl.names import POLICY_MODEL
from verl.utils.chat_template import (
    THOUGHT_KEY,
    THOUGHT_KEYS,
    Message,
    Tools,
    is_encodable_json,
    make_tool_call,
)
from verl.utils.sampling import StopReason

MODEL_NAME = POLICY_MODEL  # model name that clients send; the same for every policy
ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Request keys that are accepted only with the values below, which are defaults without effect. null
# is always accepted.
VALUES_WITHOUT_EFFECT: dict[str, tuple[Any, ...]] = {
    "n": (1,),
    "stream": (False,),
    "logprobs": (False,),
    "top_logprobs": (0,),
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "parallel_tool_calls": (True,),
    "functions": ([],),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
}
# Keys that identify the client and have no effect on sampling.
CLIENT_LABEL_KEYS = (
    "user",
    "metadata",
    "store",
    "service_tier",
    "safety_identifier",
    "prompt_cache_key",
)
# Keys of messages with tool calls and with results of calls, by role
TOOL_CALL_KEYS = {"assistant": ("tool_calls",), "tool": ("tool_call_id", "name")}
MAX_TOKENS_KEYS = ("max_tokens", "max_completion_tokens")
PARSED_KEYS = ("model", "messages", "stop", "tools", *MAX_TOKENS_KEYS)
FUNCTION_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.-]{1,64}")
# Parts of the error messages below: reason, or fix.
ONLY_TEXT_REASON = "only text is shown to the policy"
NO_TOOLS_REASON = "the run renders no tools"
CHAT_HISTORY_FIX = "env.history=chat, with a model whose chat template writes tool calls"
MAX_STOP_STRINGS = 4  # stop strings in one request, as in OpenAI's API
MAX_MESSAGES = 10_000  # messages in one request
MAX_TOOLS = 128  # functions in one request
MAX_ERROR_VALUE_CHARACTERS = 120  # characters of a value that an error message shows
# ``reprlib`` shortens values in error messages: the ``repr`` of a whole body would take seconds.
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = MAX_ERROR_VALUE_CHARACTERS


class RequestRefusedError(Exception):
    """Error for a refused request: HTTP status, invalid key, and OpenAI's error code."""

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def build_error_body(self) -> dict[str, Any]:
        """Return the JSON body of the HTTP response, in OpenAI's error format."""
        error_type = "server_error" if self.status >= 500 else "invalid_request_error"
        error_fields = {
            "message": self.message,
            "type": error_type,
            "param": self.param,
            "code": self.code,
        }
        return {"error": error_fields}


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling settings of the run, against which each request of a client is checked."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int  # maximum length of a turn
    models: tuple[str, ...] = (MODEL_NAME,)  # the policy, and models that are not trained
    renders_tools: bool = False  # the chat template renders tools, with calls in a known format
    renders_thoughts: bool = False  # the chat template reads thoughts of assistant messages
    # Sampling parameters of training. A request in validation may have them too, without effect,
    # because an agent does not know that it is validated.
    training_values: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Checked request of a client: the messages that the next sampled turn answers.

    The last message is the user's or the result of a tool call. No two user messages are
    neighbours. The strings in ``stop`` are additional to those of the run.
    """

    messages: list[Message]
    stop: tuple[str, ...]
    max_tokens: int
    model: str = MODEL_NAME
    tools: Tools = ()


def read_request(body: Mapping[str, Any], rules: SamplingRules) -> ChatRequest:
    """Parse and check the request in ``body``. Raises ``RequestRefusedError``."""
    request_values = {key: value for key, value in body.items() if value is not None}
    model = request_values.get("model")
    if model not in rules.models:
        raise RequestRefusedError(
            f"model={_shorten_value(model)}: this model does not exist; allowed: "
            f"{', '.join(map(repr, rules.models))}; fix: model={MODEL_NAME!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    _refuse_sampling_overrides(request_values, rules)
    return ChatRequest(
        messages=_read_messages(request_values.get("messages"), rules),
        stop=_read_stop(request_values.get("stop", [])),
        max_tokens=_read_max_tokens(request_values, rules),
        model=model,
        tools=_read_tools(request_values, rules),
    )


def build_value_refusal(
    key: str, value: object, reason: str, allowed: str, fix: str
) -> RequestRefusedError:
    """Return the error for a request whose ``key`` has an invalid ``value``."""
    message = f"{key}={_shorten_value(value)}: {reason}; allowed: {allowed}; fix: {fix}"
    return RequestRefusedError(message, param=key)


def _refuse_sampling_overrides(request_values: Mapping[str, Any], rules: SamplingRules) -> None:
    accepted_values = VALUES_WITHOUT_EFFECT | {
        "temperature": (rules.temperature,),
        "top_p": (rules.top_p,),
        "top_k": (rules.top_k,),
        "tool_choice": ("auto",) if request_values.get("tools") else ("auto", "none"),
    }
    for key, value in rules.training_values.items():
        if value not in accepted_values[key]:
            accepted_values[key] += (value,)
    for key, value in request_values.items():
        if key in PARSED_KEYS or key in CLIENT_LABEL_KEYS:
            continue
        # An unknown key could change the sampling, so no value of it is allowed.
        allowed = accepted_values.get(key, ())
        if value not in allowed:
            allowed_text = ", ".join(map(repr, allowed)) or "none"
            reason = "the settings of the run determine the sampling, and replies are whole texts"
            raise build_value_refusal(key, value, reason, allowed_text, f"remove {key}")


def _read_max_tokens(request_values: Mapping[str, Any], rules: SamplingRules) -> int:
    max_tokens = rules.max_tokens
    for key in MAX_TOKENS_KEYS:
        value = request_values.get(key, max_tokens)
        if type(value) is not int or not 1 <= value <= rules.max_tokens:
            reason = "env.max_turn_tokens limits the tokens of a turn"
            allowed = f"1 to {rules.max_tokens}"
            raise build_value_refusal(
                key, value, reason, allowed, f"remove {key}, or raise that limit"
            )
        max_tokens = min(max_tokens, value)
    return max_tokens


def _read_stop(value: Any) -> tuple[str, ...]:
    stop_strings = [value] if isinstance(value, str) else value
    is_valid_list = isinstance(stop_strings, list) and len(stop_strings) <= MAX_STOP_STRINGS
    if not is_valid_list or not all(_is_valid_unicode(text) and text for text in stop_strings):
        reason = "it cannot end a turn"
        allowed = f"a text that is not empty, or a list of at most {MAX_STOP_STRINGS} of them"
        raise build_value_refusal("stop", value, reason, allowed, "remove stop")
    return tuple(stop_strings)


def _read_tools(request_values: Mapping[str, Any], rules: SamplingRules) -> Tools:
    tools = request_values.get("tools", [])
    if not isinstance(tools, list) or len(tools) > MAX_TOOLS:
        reason, allowed = "not a list of functions", f"a list of at most {MAX_TOOLS} functions"
        raise build_value_refusal("tools", tools, reason, allowed, "send such a list")
    if tools and not rules.renders_tools:
        fix = f"{CHAT_HISTORY_FIX}, or write the tools into a message"
        raise build_value_refusal("tools", tools, NO_TOOLS_REASON, "[]", fix)
    for index, tool in enumerate(tools):
        _check_tool(tool, f"tools[{index}]")
    function_names = [tool["function"]["name"] for tool in tools]
    if len(set(function_names)) < len(function_names):
        reason, allowed = "two functions have the same name", "different names"
        raise build_value_refusal("tools", function_names, reason, allowed, "rename one of them")
    return tools


def _check_tool(tool: Any, location: str) -> None:
    """Raise ``RequestRefusedError`` unless ``tool`` describes a function in OpenAI's format."""
    if not _is_valid_function_tool(tool):
        allowed = (
            "{type: function, function: {name, description, parameters}}, the name of at most 64 "
            "letters, digits, '_', '.' and '-'"
        )
        fix = "describe a function in this format"
        raise build_value_refusal(location, tool, "not a function", allowed, fix)
    strict = tool["function"].get("strict")
    if strict:
        reason = "the sampling of the run is not constrained to a schema"
        key = f"{location}.function.strict"
        raise build_value_refusal(key, strict, reason, "false", "remove strict")


def _is_valid_function_tool(tool: Any) -> bool:
    function = tool.get("function") if isinstance(tool, dict) else None
    if not isinstance(function, dict) or tool.get("type") != "function":
        return False
    name = function.get("name")
    return (
        isinstance(name, str)
        and FUNCTION_NAME_PATTERN.fullmatch(name) is not None
        and isinstance(function.get("parameters"), dict | None)
        and isinstance(function.get("description"), str | None)
        and is_encodable_json(tool)
    )


def _read_messages(value: object, rules: SamplingRules) -> list[Message]:
    if not isinstance(value, list) or not value:
        reason, allowed = "there is nothing to continue", "a list of messages"
        raise build_value_refusal("messages", value, reason, allowed, "send at least one message")
    if len(value) > MAX_MESSAGES:
        reason, allowed = "too many messages", f"at most {MAX_MESSAGES} messages"
        raise build_value_refusal("messages", len(value), reason, allowed, "shorten the history")
    parsed_messages = [
        _read_message(raw_message, f"messages[{i}]", rules) for i, raw_message in enumerate(value)
    ]
    _add_function_names(parsed_messages)
    messages: list[Message] = []
    for role, same_role_messages in itertools.groupby(parsed_messages, key=itemgetter("role")):
        if role == "user":
            texts = [message["content"] for message in same_role_messages]
            messages.append({"role": role, "content": "\n\n".join(texts)})
        else:
            messages.extend(same_role_messages)
    if messages[-1]["role"] not in ("user", "tool"):
        reason = "the policy answers a user message or the result of a tool call"
        fix = "end with such a message"
        raise build_value_refusal(
            "messages[-1].role", messages[-1]["role"], reason, "'user', 'tool'", fix
        )
    return messages


def _add_function_names(messages: Sequence[Message]) -> None:
    """Add to each result of a tool call the name of the called function, for chat templates.

    Raises ``RequestRefusedError`` for a result without a call, or with the name of another
    function.
    """
    names: dict[str, str] = {}
    for index, message in enumerate(messages):
        names |= {call["id"]: call["function"]["name"] for call in message.get("tool_calls", ())}
        if message["role"] == "tool":
            call_id = message["tool_call_id"]
            if call_id not in names:
                key, reason = f"messages[{index}].tool_call_id", "no call before it has this id"
                allowed = _shorten_value(list(names))
                raise build_value_refusal(key, call_id, reason, allowed, "send the call too")
            name = message.setdefault("name", names[call_id])
            if name != names[call_id]:
                key, reason = f"messages[{index}].name", "the call has another name"
                allowed = _shorten_value(names[call_id])
                raise build_value_refusal(key, name, reason, allowed, "remove name")


def _read_message(message: object, location: str, rules: SamplingRules) -> Message:
    role = message.get("role") if isinstance(message, dict) else message
    roles = ROLES | ({"tool": "tool"} if rules.renders_tools else {})
    if not isinstance(message, dict) or not isinstance(role, str) or role not in roles:
        reason, fix = "the chat template does not support it", "send results as user messages"
        raise build_value_refusal(f"{location}.role", role, reason, ", ".join(roles), fix)
    parsed_keys = ("role", "content")
    if rules.renders_tools:
        parsed_keys += TOOL_CALL_KEYS.get(role, ())
    if rules.renders_thoughts and role == "assistant":
        parsed_keys += THOUGHT_KEYS
    for key, value in message.items():
        # Clients send earlier replies back with all fields, most of them empty.
        if value and key not in parsed_keys:
            fix = "write it into the content"
            raise build_value_refusal(
                f"{location}.{key}", value, ONLY_TEXT_REASON, "no such key", fix
            )
    parsed_message: Message = {"role": roles[role]}
    content = message.get("content")
    if role == "tool":
        call_id = message.get("tool_call_id")
        if not _is_valid_unicode(call_id):
            fix = "send the id of the call"
            raise build_value_refusal(
                f"{location}.tool_call_id", call_id, "the result has no call", "an id", fix
            )
        parsed_message |= {key: message[key] for key in TOOL_CALL_KEYS["tool"] if message.get(key)}
    elif role == "assistant":
        parsed_message |= _read_thought(message, location)
        if message.get("tool_calls"):
            parsed_message["tool_calls"] = _read_tool_calls(message["tool_calls"], location)
        # Clients replace an empty text by null.
        content = "" if content is None else content
    content_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in content_parts:
        is_text = isinstance(part, dict) and part.get("type") == "text"
        text = part.get("text") if is_text else None
        if not _is_valid_unicode(text):
            key, fix = f"{location}.content", "write it as text"
            allowed = "a text, or a list of parts {type: text, text: ...}"
            raise build_value_refusal(key, content, ONLY_TEXT_REASON, allowed, fix)
        texts.append(text)
    return {**parsed_message, "content": "".join(texts)}


def _read_thought(message: dict[str, Any], location: str) -> Message:
    """Return the thought of an assistant message under ``THOUGHT_KEY``; {} without a thought."""
    thoughts = {key: message[key] for key in THOUGHT_KEYS if message.get(key)}
    thought = next(iter(thoughts.values()), None)
    for key, text in thoughts.items():
        if not _is_valid_unicode(text) or text != thought:
            reason, allowed = "no thought of this message", "the same text in all keys of thoughts"
            fix = "send the thought as it was received"
            raise build_value_refusal(f"{location}.{key}", text, reason, allowed, fix)
    return {THOUGHT_KEY: thought} if thoughts else {}


def _read_tool_calls(calls: object, location: str) -> list[dict[str, Any]]:
    """Return the tool calls of an assistant message, with their arguments as a dict."""
    parsed_calls: list[dict[str, Any]] = []
    for index, call in enumerate(calls if isinstance(calls, list) else [calls]):
        parsed_call = _parse_tool_call(call)
        if parsed_call is None:
            allowed = "{id, type: function, function: {name, arguments: a JSON object as text}}"
            key, fix = f"{location}.tool_calls[{index}]", "send the calls of the reply"
            raise build_value_refusal(key, call, "not a call", allowed, fix)
        parsed_calls.append(parsed_call)
    return parsed_calls


def _parse_tool_call(call: Any) -> dict[str, Any] | None:
    """Return ``call`` with its arguments as a dict, or None if it is malformed."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict):
        return None
    call_id, name, text = call.get("id"), function.get("name"), function.get("arguments")
    if not (_is_valid_unicode(call_id) and _is_valid_unicode(name) and isinstance(text, str)):
        return None
    try:
        arguments = json.loads(text)
    except (ValueError, RecursionError):
        return None
    if not isinstance(arguments, dict) or not is_encodable_json(arguments):
        return None
    return make_tool_call(name, arguments, call_id)


def _is_valid_unicode(value: object) -> TypeGuard[str]:
    """Return True if ``value`` is valid Unicode text: tokenizers refuse lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shorten_value(value: object) -> str:
    text = _SHORT_REPR.repr(value)
    is_short = len(text) <= MAX_ERROR_VALUE_CHARACTERS
    return text if is_short else f"{text[:MAX_ERROR_VALUE_CHARACTERS]}..."


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled turn in the form that a client receives; ``text`` excludes calls and thought."""

    text: str
    stop_reason: StopReason
    prompt_tokens: int
    sampled_tokens: int
    model: str = MODEL_NAME
    tool_calls: Sequence[Mapping[str, Any]] = ()
    thought: str = ""

    def build_completion_body(self) -> dict[str, Any]:
        """Return the JSON body of the chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": self.text}
        if self.thought:
            # vLLM has used both names.
            message |= {"reasoning_content": self.thought, "reasoning": self.thought}
        if self.tool_calls:
            message["content"] = self.text or None
            message["tool_calls"] = [
                make_tool_call(
                    call["function"]["name"], json.dumps(call["function"]["arguments"]), call["id"]
                )
                for call in self.tool_calls
            ]
        choice = {
            "index": 0,
            "message": message,
            "finish_reason": "tool_calls" if self.tool_calls else self.stop_reason.value,
            "logprobs": None,
        }
        usage = {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.sampled_tokens,
            "total_tokens": self.prompt_tokens + self.sampled_tokens,
        }
        return {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "object": "chat.completion",
            "created": int(time.time()),
            "model": self.model,
            "choices": [choice],
            "usage": usage,
        }
