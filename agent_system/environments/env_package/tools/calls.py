"""Text format of tool calls and of their results::

    <tool_call>{"name": "lookup", "arguments": {"item": "lamp", "field": "price"}}</tool_call>
    <tool_response>{"name": "lookup", "result": 12}</tool_response>

Several calls in one turn are answered in their order. A text without a call is the final answer.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHT = re.compile(r"<level>.*?</level>|<think>.*?(?:</think>|\Z)", re.DOTALL)
_ACTION = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.DOTALL)
# A result in the text of the model is invented: only the environment writes results. It is removed
# with all text after it.
_RESPONSE = re.compile(r"<tool_response>.*", re.DOTALL)


class BadCall(ValueError):
    """A call is malformed. The message is shown to the model."""


@dataclass(frozen=True, slots=True)
class Call:
    """Parsed call: name of the function, and its arguments."""

    name: str
    arguments: dict[str, Any]


def project_calls(text: str) -> tuple[str, bool]:
    """Return ``text`` without thoughts and invented results, and True if it is well formed.

    Well formed means: not empty, and every call is closed.
    """
    visible = _RESPONSE.sub("", _THOUGHT.sub("", text))
    action_match = _ACTION.search(visible)
    action = (action_match.group(1) if action_match else visible).strip()
    all_closed = action.count("<tool_call>") == action.count("</tool_call>")
    return action, bool(action) and all_closed


def find_calls(action: str) -> list[str]:
    return [content.strip() for content in _CALL.findall(action)]


def parse_call(text: str) -> Call:
    """Parse a call from JSON ``text``. Raises ``BadCall``."""
    try:
        call = json.loads(text)
    except ValueError as error:
        raise BadCall(f"not JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise BadCall('a call is an object {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    # In the OpenAI format the arguments are a JSON string inside the JSON.
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise BadCall(f"arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise BadCall(f"arguments are a {type(arguments).__name__}, not an object")
    return Call(call["name"], arguments)


def format_call(name: str, **arguments: Any) -> str:
    """Return a call in the format that the model writes."""
    return f"<tool_call>{json.dumps({'name': name, 'arguments': arguments})}</tool_call>"


def format_response(name: str | None, result: Any, error: str | None, longest: int) -> str:
    """Return one result or error in the format that the model reads, cut to ``longest``
    characters.
    """
    key, value = ("result", result) if error is None else ("error", error)
    value_text = json.dumps(value, default=str) if not isinstance(value, str) else value
    if len(value_text) > longest:
        value = f"{value_text[:longest]} ... ({len(value_text) - longest} characters cut)"
    answer = {**({"name": name} if name else {}), key: value}
    return f"<tool_response>{json.dumps(answer, default=str)}</tool_response>"


def read_result(response: str) -> str:
    """Return the result in a text of ``format_response``, without the name of the function.

    >>> read_result('<tool_response>{"name": "lookup", "result": 12}</tool_response>')
    '12'
    """
    answer = json.loads(response.removeprefix("<tool_response>").removesuffix("</tool_response>"))
    if "error" in answer:
        return f"Error: {answer['error']}"
    value = answer["result"]
    return value if isinstance(value, str) else json.dumps(value)
