"""A chat request, read: what would sample otherwise than the run does is refused, never ignored."""

import itertools
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any, TypeGuard

from agent_system.endpoint.forms import MODEL, Refused
from agent_system.tokens.template import Message

ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
# Keys with the values that ask for nothing; null asks for nothing anywhere.
NEUTRAL: dict[str, tuple[Any, ...]] = {
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
# They say who asks, and nothing about what is sampled.
LABELS = ("user", "metadata", "store", "service_tier", "safety_identifier", "prompt_cache_key")
LENGTHS = ("max_tokens", "max_completion_tokens")
READ = ("model", "messages", "stop", *LENGTHS)
MAX_STOPS = 4
MAX_MESSAGES = 10_000  # of a request
SHOWN = 120  # characters of a value in an error
# Bounded: the repr of a whole body would take seconds.
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _SHORT.maxlong = SHOWN


@dataclass(frozen=True, slots=True)
class SamplingRules:
    """How the run samples; ``max_tokens`` bounds a turn."""

    temperature: float
    top_p: float
    top_k: int
    max_tokens: int


@dataclass(frozen=True, slots=True)
class ChatRequest:
    """What is to be continued: messages of which no two in a row are the user's, and the last one
    is. ``stop`` are strings that end the turn beside the run's own.
    """

    messages: list[Message]
    stop: tuple[str, ...]
    max_tokens: int


def read_request(body: Mapping[str, Any], rules: SamplingRules) -> ChatRequest:
    """The request in ``body``. Raises ``Refused``."""
    said = {key: value for key, value in body.items() if value is not None}
    if said.get("model") != MODEL:
        raise Refused(
            f"model={_short(said.get('model'))}: there is one model; allowed: {MODEL!r}; "
            f"fix: model={MODEL!r}",
            status=404,
            param="model",
            code="model_not_found",
        )
    _refuse_other_sampling(said, rules)
    return ChatRequest(
        messages=_messages(said.get("messages")),
        stop=_stop(said.get("stop", [])),
        max_tokens=_max_tokens(said, rules),
    )


def wrong(key: str, value: object, why: str, allowed: str, fix: str) -> Refused:
    """The refusal of ``value`` under ``key``."""
    message = f"{key}={_short(value)}: {why}; allowed: {allowed}; fix: {fix}"
    return Refused(message, param=key)


def _refuse_other_sampling(said: Mapping[str, Any], rules: SamplingRules) -> None:
    sampling = {
        "temperature": (rules.temperature,),
        "top_p": (rules.top_p,),
        "top_k": (rules.top_k,),
    }
    understood = NEUTRAL | sampling
    for key, value in said.items():
        if key in READ or key in LABELS:
            continue
        # A key that nobody reads here could ask for anything: no value of it asks for nothing.
        allowed = understood.get(key, ())
        if value not in allowed:
            values = ", ".join(map(repr, allowed)) or "none"
            why = "turns are sampled in the run's own way, and answered as whole texts"
            raise wrong(key, value, why, values, f"leave {key} out")


def _max_tokens(said: Mapping[str, Any], rules: SamplingRules) -> int:
    fewest = rules.max_tokens
    for key in LENGTHS:
        value = said.get(key, fewest)
        if type(value) is not int or not 1 <= value <= rules.max_tokens:
            why = "a turn has as many tokens at most as env.max_turn_tokens says"
            allowed = f"1 to {rules.max_tokens}"
            raise wrong(key, value, why, allowed, f"leave {key} out, or raise that bound")
        fewest = min(fewest, value)
    return fewest


def _stop(value: Any) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    good = isinstance(stops, list) and len(stops) <= MAX_STOPS
    if not good or not all(_is_text(stop) and stop for stop in stops):
        why = "it ends no turn"
        allowed = f"a text that is not empty, or a list of {MAX_STOPS} at most"
        raise wrong("stop", value, why, allowed, "leave stop out")
    return tuple(stops)


def _messages(value: Any) -> list[Message]:
    if not isinstance(value, list) or not value:
        raise wrong("messages", value, "nothing to continue", "a list of messages", "say something")
    if len(value) > MAX_MESSAGES:
        allowed = f"at most {MAX_MESSAGES} messages"
        raise wrong("messages", len(value), "too many messages", allowed, "shorten the history")
    read = [_message(said, f"messages[{place}]") for place, said in enumerate(value)]
    messages = _join_user_messages(read)
    if messages[-1]["role"] != "user":
        why = "a turn answers the user"
        raise wrong("messages[-1].role", messages[-1]["role"], why, "'user'", "end with the user")
    return messages


def _join_user_messages(messages: Sequence[Message]) -> list[Message]:
    """Return ``messages`` with neighbouring user messages joined: chat templates refuse them."""
    joined: list[Message] = []
    for role, same in itertools.groupby(messages, key=itemgetter("role")):
        if role == "user":
            joined.append({"role": role, "content": "\n\n".join(one["content"] for one in same)})
        else:
            joined.extend(same)
    return joined


def _message(said: Any, where: str) -> Message:
    role = said.get("role") if isinstance(said, dict) else said
    if not isinstance(said, dict) or not isinstance(role, str) or role not in ROLES:
        why = "the chat template has no words for it"
        raise wrong(f"{where}.role", role, why, ", ".join(ROLES), "tell results as the user")
    for key, value in said.items():
        # Clients send back what they were answered, with fields that are empty.
        if value and key not in ("role", "content"):
            why = "only text is shown to the policy"
            raise wrong(f"{where}.{key}", value, why, "left out", "write it into the content")
    text = _text(said.get("content"))
    if text is None:
        why = "only text is shown to the policy"
        allowed = "a text, or a list of parts {type: text, text: ...}"
        raise wrong(f"{where}.content", said.get("content"), why, allowed, "write it as text")
    return {"role": ROLES[role], "content": text}


def _text(content: Any) -> str | None:
    """``content`` as one text; None where it is none."""
    parts = content if isinstance(content, list) else [{"type": "text", "text": content}]
    texts: list[str] = []
    for part in parts:
        if not isinstance(part, dict) or part.get("type") != "text":
            return None
        text = part.get("text")
        if not _is_text(text):
            return None
        texts.append(text)
    return "".join(texts)


def _is_text(value: object) -> TypeGuard[str]:
    """Whether ``value`` is text of whole characters: tokenizers refuse half a surrogate pair."""
    if not isinstance(value, str):
        return False
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _short(value: object) -> str:
    text = _SHORT.repr(value)
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}..."
