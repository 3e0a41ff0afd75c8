"""Requests and responses of the endpoint, in the format of OpenAI's chat completions.

Keys of a request that would change the sampling settings of the run are refused.
"""

import itertools
import reprlib
import time
import uuid
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeGuard

from verl.names import POLICY_MODEL
from verl.utils.chat_template import Message
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
    "tools": ([],),
    "tool_choice": ("none",),
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
MAX_TOKENS_KEYS = ("max_tokens", "max_completion_tokens")
PARSED_KEYS = ("model", "messages", "stop", *MAX_TOKENS_KEYS)
ONLY_TEXT = "only text is shown to the policy"
MAX_STOP_STRINGS = 4
MAX_MESSAGES = 10_000  # messages in one request
MAX_ERROR_VALUE_CHARACTERS = 120  # characters of a value that an error message shows
# ``reprlib`` shortens values in error messages: the ``repr`` of a whole body would take seconds.
_SHORT_REPR = reprlib.Repr()
_SHORT_REPR.maxstring = _SHORT_REPR.maxother = _SHORT_REPR.maxlong = MAX_ERROR_VALUE_CHARACTERS


class RequestRefused(Exception):
    """Refusal of a request.

    ``status`` is the HTTP status, ``param`` the invalid key, and ``code`` OpenAI's error code if
    there is one.
    """

    def __init__(
        self, message: str, *, status: int = 400, param: str | None = None, code: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.status = status
        self.param = param
        self.code = code

    def build_error_body(self) -> dict[str, Any]:
        """Return the JSON body of the error."""
        kind = "server_error" if self.status >= 500 else "invalid_request_error"
        fields = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return {"error": fields}


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling settings of the run. ``max_tokens`` is the maximum length of a turn.

    ``models`` are the models that clients can name: the policy, and those that are not trained.
    """

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int
    models: tuple[str, ...] = (MODEL_NAME,)


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages to continue, with the limits of the turn.

    The last message is the user's, and no two user messages are neighbours. ``stop`` are strings
    that end the turn in addition to those of the run.
    """

    messages: list[Message]
    stop: tuple[str, ...]
    max_tokens: int
    model: str = MODEL_NAME


def read_request(body: Mapping[str, Any], rules: SamplingRules) -> ChatRequest:
    """Parse and check the request in ``body``. Raises ``RequestRefused``."""
    values = {key: value for key, value in body.items() if value is not None}
    model = values.get("model")
    if model not in rules.models:
        raise RequestRefused(
            f"model={_shorten_value(model)}: this model does not exist; allowed: "
            f"{', '.join(map(repr, rules.models))}; fix: model={MODEL_NAME!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    _refuse_sampling_overrides(values, rules)
    return ChatRequest(
        messages=_read_messages(values.get("messages")),
        stop=_read_stop(values.get("stop", [])),
        max_tokens=_read_max_tokens(values, rules),
        model=model,
    )


def build_value_refusal(
    key: str, value: object, reason: str, allowed: str, fix: str
) -> RequestRefused:
    """Return the error for a request whose ``key`` has an invalid ``value``."""
    message = f"{key}={_shorten_value(value)}: {reason}; allowed: {allowed}; fix: {fix}"
    return RequestRefused(message, param=key)


def _refuse_sampling_overrides(request_values: Mapping[str, Any], rules: SamplingRules) -> None:
    accepted_values = VALUES_WITHOUT_EFFECT | {
        "temperature": (rules.temperature,),
        "top_p": (rules.top_p,),
        "top_k": (rules.top_k,),
    }
    for key, value in request_values.items():
        if key in PARSED_KEYS or key in CLIENT_LABEL_KEYS:
            continue
        # An unknown key could change the sampling, so no value of it is allowed.
        allowed = accepted_values.get(key, ())
        if value not in allowed:
            values = ", ".join(map(repr, allowed)) or "none"
            reason = "the settings of the run determine the sampling, and replies are whole texts"
            raise build_value_refusal(key, value, reason, values, f"remove {key}")


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
    if not is_valid_list or not all(
        _is_valid_unicode(stop_string) and stop_string for stop_string in stop_strings
    ):
        reason = "it cannot end a turn"
        allowed = f"a text that is not empty, or a list of at most {MAX_STOP_STRINGS} of them"
        raise build_value_refusal("stop", value, reason, allowed, "remove stop")
    return tuple(stop_strings)


def _read_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        reason, allowed = "there is nothing to continue", "a list of messages"
        raise build_value_refusal("messages", value, reason, allowed, "send at least one message")
    if len(value) > MAX_MESSAGES:
        reason, allowed = "too many messages", f"at most {MAX_MESSAGES} messages"
        raise build_value_refusal("messages", len(value), reason, allowed, "shorten the history")
    parsed_messages = [
        _read_message(raw_message, f"messages[{i}]") for i, raw_message in enumerate(value)
    ]
    messages: list[Message] = []
    for role, same_role_messages in itertools.groupby(parsed_messages, key=itemgetter("role")):
        if role == "user":
            # Join neighbouring user messages, because chat templates refuse them.
            texts = [message["content"] for message in same_role_messages]
            messages.append({"role": role, "content": "\n\n".join(texts)})
        else:
            messages.extend(same_role_messages)
    if messages[-1]["role"] != "user":
        reason = "the policy answers a user message"
        fix = "end with a user message"
        raise build_value_refusal("messages[-1].role", messages[-1]["role"], reason, "'user'", fix)
    return messages


def _read_message(message: Any, location: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else message
    if not isinstance(message, dict) or not isinstance(role, str) or role not in ROLES:
        reason, fix = "the chat template does not support it", "send results as user messages"
        raise build_value_refusal(f"{location}.role", role, reason, ", ".join(ROLES), fix)
    for key, value in message.items():
        # Accept empty fields: clients send earlier replies back with all fields, most of them
        # empty.
        if value and key not in ("role", "content"):
            fix = "write it into the content"
            raise build_value_refusal(f"{location}.{key}", value, ONLY_TEXT, "no such key", fix)
    content = message.get("content")
    content_parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for content_part in content_parts:
        text = (
            content_part.get("text")
            if isinstance(content_part, dict) and content_part.get("type") == "text"
            else None
        )
        if not _is_valid_unicode(text):
            key, fix = f"{location}.content", "write it as text"
            allowed = "a text, or a list of parts {type: text, text: ...}"
            raise build_value_refusal(key, content, ONLY_TEXT, allowed, fix)
        texts.append(text)
    return {"role": ROLES[role], "content": "".join(texts)}


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
    return (
        text
        if len(text) <= MAX_ERROR_VALUE_CHARACTERS
        else f"{text[:MAX_ERROR_VALUE_CHARACTERS]}..."
    )


@dataclass(frozen=True, slots=True)
class Reply:
    """One sampled turn in the form that a client receives."""

    text: str
    stop_reason: StopReason
    prompt_tokens: int
    sampled_tokens: int
    model: str = MODEL_NAME

    def build_completion_body(self) -> dict[str, Any]:
        """Return the JSON body of the chat completion."""
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": self.text},
            "finish_reason": self.stop_reason.value,
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


def build_model_list(names: Iterable[str]) -> dict[str, Any]:
    """Return the JSON body of the list of models."""
    model = {"object": "model", "created": 0, "owned_by": "rlvcr"}
    return {"object": "list", "data": [{"id": name, **model} for name in names]}
