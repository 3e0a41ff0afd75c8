"""Parser of chat requests. Keys that would change the sampling settings of the run are refused."""

import itertools
import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeGuard

from agent_system.endpoint.forms import MODEL, RequestRefused
from verl.utils.chat_template import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Keys that are accepted only with these values, which have no effect. null is always accepted.
NEUTRAL_VALUES: dict[str, tuple[Any, ...]] = {
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
LABEL_KEYS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
LENGTH_KEYS = ("max_tokens", "max_completion_tokens")
HANDLED_KEYS = ("model", "messages", "stop", *LENGTH_KEYS)
ONLY_TEXT = "only text is shown to the policy"
MAX_STOPS = 4
MAX_MESSAGES = 10_000  # of a request
MAX_VALUE_CHARACTERS = 120  # characters of a value in an error
# Limited length, because the repr of a whole request body would take seconds.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = MAX_VALUE_CHARACTERS


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """Sampling settings of the run. ``max_tokens`` is the maximum length of a turn."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """Messages to continue, with the limits of the turn.

    The last message is the user's, and no two user messages are neighbours. ``stop`` are strings
    that end the turn in addition to those of the run.
    """

    messages: list[Message]
    stop: tuple[str, ...]
    max_tokens: int


def read_request(body: Mapping[str, Any], rules: SamplingRules) -> ChatRequest:
    """Parse and check the request in ``body``. Raises ``RequestRefused``."""
    values = {key: value for key, value in body.items() if value is not None}
    if values.get("model") != MODEL:
        raise RequestRefused(
            f"model={_shorten_value(values.get('model'))}: this model does not exist; allowed: "
            f"{MODEL!r}; fix: model={MODEL!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    _refuse_other_sampling(values, rules)
    return ChatRequest(
        messages=_read_messages(values.get("messages")),
        stop=_read_stop(values.get("stop", [])),
        max_tokens=_read_max_tokens(values, rules),
    )


def refusal_of_value(key: str, value: object, why: str, allowed: str, fix: str) -> RequestRefused:
    """Return the error for a request whose ``key`` has an invalid ``value``."""
    message = f"{key}={_shorten_value(value)}: {why}; allowed: {allowed}; fix: {fix}"
    return RequestRefused(message, param=key)


def _refuse_other_sampling(request_values: Mapping[str, Any], rules: SamplingRules) -> None:
    accepted_values = NEUTRAL_VALUES | {
        "temperature": (rules.temperature,),
        "top_p": (rules.top_p,),
        "top_k": (rules.top_k,),
    }
    for key, value in request_values.items():
        if key in HANDLED_KEYS or key in LABEL_KEYS:
            continue
        # An unknown key could change the sampling, so no value of it is allowed.
        allowed = accepted_values.get(key, ())
        if value not in allowed:
            values = ", ".join(map(repr, allowed)) or "none"
            why = "the settings of the run determine the sampling, and replies are whole texts"
            raise refusal_of_value(key, value, why, values, f"remove {key}")


def _read_max_tokens(request_values: Mapping[str, Any], rules: SamplingRules) -> int:
    fewest = rules.max_tokens
    for key in LENGTH_KEYS:
        value = request_values.get(key, fewest)
        if type(value) is not int or not 1 <= value <= rules.max_tokens:
            why = "env.max_turn_tokens limits the tokens of a turn"
            allowed = f"1 to {rules.max_tokens}"
            raise refusal_of_value(key, value, why, allowed, f"remove {key}, or raise that limit")
        fewest = min(fewest, value)
    return fewest


def _read_stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    is_valid_list = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not is_valid_list or not all(_is_text(stop) and stop for stop in stops):
        why = "it cannot end a turn"
        allowed = f"a text that is not empty, or a list of at most {MAX_STOPS} of them"
        raise refusal_of_value("stop", value, why, allowed, "remove stop")
    return tuple(stops)


def _read_messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        why, allowed = "there is nothing to continue", "a list of messages"
        raise refusal_of_value("messages", value, why, allowed, "send at least one message")
    if len(value) > MAX_MESSAGES:
        why, allowed = "too many messages", f"at most {MAX_MESSAGES} messages"
        raise refusal_of_value("messages", len(value), why, allowed, "shorten the history")
    parsed_messages = [_read_message(item, f"messages[{i}]") for i, item in enumerate(value)]
    messages: list[Message] = []
    for role, role_messages in itertools.groupby(parsed_messages, key=itemgetter("role")):
        if role == "user":
            # Join neighbouring user messages, because chat templates refuse them.
            texts = [message["content"] for message in role_messages]
            messages.append({"role": role, "content": "\n\n".join(texts)})
        else:
            messages.extend(role_messages)
    if messages[-1]["role"] != "user":
        why = "the policy answers a user message"
        fix = "end with a user message"
        raise refusal_of_value("messages[-1].role", messages[-1]["role"], why, "'user'", fix)
    return messages


def _read_message(message: Any, where: str) -> Message:
    role = message.get("role") if isinstance(message, dict) else message
    if not isinstance(message, dict) or not isinstance(role, str) or role not in ROLES:
        why, fix = "the chat template does not support it", "send results as user messages"
        raise refusal_of_value(f"{where}.role", role, why, ", ".join(ROLES), fix)
    for key, value in message.items():
        # Clients send earlier replies back with all fields, of which most are empty.
        if value and key not in ("role", "content"):
            fix = "write it into the content"
            raise refusal_of_value(f"{where}.{key}", value, ONLY_TEXT, "no such key", fix)
    content = message.get("content")
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type") == "text" else None
        if not _is_text(text):
            key, fix = f"{where}.content", "write it as text"
            allowed = "a text, or a list of parts {type: text, text: ...}"
            raise refusal_of_value(key, content, ONLY_TEXT, allowed, fix)
        texts.append(text)
    return {"role": ROLES[role], "content": "".join(texts)}


def _is_text(value: object) -> TypeGuard[str]:
    """Return True if ``value`` is valid Unicode text: tokenizers refuse lone surrogates."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _shorten_value(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= MAX_VALUE_CHARACTERS else f"{text[:MAX_VALUE_CHARACTERS]}..."
