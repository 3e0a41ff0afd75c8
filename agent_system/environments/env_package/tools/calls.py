"""Text format of tool calls and of their results::

    <tool_call>{"name": "lookup", "arguments": {"item": "lamp", "field": "price"}}</tool_call>
    <tool_response>{"name": "lookup", "result": 12}</tool_response>

The results of several calls in one turn come in the order of the calls. A text without a call is
the final answer.
"""

import json
import re
from dataclasses import dataclass
from typing import Any

_CALL_PATTERN = re.compile(r"<tool_call>(.*?)(?:</tool_call>|\Z)", re.DOTALL)
_THOUGHT_PATTERN = re.compile(r"<level>.*?</level>|<think>.*?(?:</think>|\Z)", re.DOTALL)
_ACTION_PATTERN = re.compile(r"<action>(.*?)(?:</action>|\Z)", re.DOTALL)
# Only the environment writes results. A result in the text of the model is invented. It is removed
# together with all text after it.
_RESPONSE_PATTERN = re.compile(r"<tool_response>.*", re.DOTALL)
# Start of a tag of a tool call, a tool result, a thinking level, a thought or an action.
_TAG_START = re.compile("<(?=/?(?:tool_call|tool_response|level|think|action)>)")


class MalformedCallError(ValueError):
    """Error: a call is malformed. The message is shown to the model."""


@dataclass(frozen=True, slots=True)
class Call:
    name: str
    arguments: dict[str, Any]


def parse_action_with_calls(text: str) -> tuple[str, bool]:
    """Return the action in ``text``, and True if it is well formed.

    The action is the content of the ``<action>`` tags, or the whole text if it has none. Thoughts,
    and tool results that the model invented, are removed first. The action is well formed if it is
    not empty and every call has a closing tag.
    """
    text_without_thoughts = _THOUGHT_PATTERN.sub("", text)
    # A closing tag without an opening tag: the prompt contains the opening tag, so all text before
    # belongs to a thought.
    text_without_thoughts = text_without_thoughts.rpartition("</think>")[2]
    text_without_thoughts = _RESPONSE_PATTERN.sub("", text_without_thoughts)
    action_match = _ACTION_PATTERN.search(text_without_thoughts)
    action = (action_match.group(1) if action_match else text_without_thoughts).strip()
    has_only_closed_calls = action.count("<tool_call>") == action.count("</tool_call>")
    return action, bool(action) and has_only_closed_calls


def find_call_texts(action: str) -> list[str]:
    return [content.strip() for content in _CALL_PATTERN.findall(action)]


def parse_call(text: str) -> Call:
    """Parse a call from JSON ``text``. Raises ``MalformedCallError``."""
    try:
        call = json.loads(text)
    # Deeply nested JSON raises RecursionError.
    except (ValueError, RecursionError) as error:
        raise MalformedCallError(f"not JSON: {error}") from error
    if not isinstance(call, dict) or not isinstance(call.get("name"), str):
        raise MalformedCallError('a call is an object {"name": ..., "arguments": {...}}')
    arguments = call.get("arguments", {})
    # As in OpenAI's format, the arguments may be a string that contains JSON.
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            raise MalformedCallError(f"arguments are not JSON: {error}") from error
    if not isinstance(arguments, dict):
        raise MalformedCallError(f"arguments are a {type(arguments).__name__}, not an object")
    return Call(call["name"], arguments)


def format_call(name: str, arguments: dict[str, Any]) -> str:
    """Return a tool call as a model writes it: JSON in ``<tool_call>`` tags.

    Tags in the arguments are escaped (``\\u003c`` for ``<``): otherwise they would be read as tags.
    """
    # Outside of strings JSON has no "<".
    call = _TAG_START.sub(r"\\u003c", json.dumps({"name": name, "arguments": arguments}))
    return f"<tool_call>{call}</tool_call>"


def format_response(name: str | None, result: object, error: str | None, max_length: int) -> str:
    """Return one result or error as the model reads it: JSON in ``<tool_response>`` tags.

    A text of more than ``max_length`` characters is cut.
    """
    key, value = ("result", result) if error is None else ("error", error)
    value_text = json.dumps(value, default=str) if not isinstance(value, str) else value
    if len(value_text) > max_length:
        value = f"{value_text[:max_length]} ... ({len(value_text) - max_length} characters cut)"
    response = {**({"name": name} if name else {}), key: value}
    return f"<tool_response>{json.dumps(response, default=str)}</tool_response>"


def parse_tool_response(response: str) -> str:
    """Return the result or error in a ``<tool_response>`` text, without the function's name.

    Lone surrogates, which tokenizers refuse, are replaced by question marks.

    >>> parse_tool_response('<tool_response>{"name": "lookup", "result": 12}</tool_response>')
    '12'
    """
    response_fields = json.loads(
        response.removeprefix("<tool_response>").removesuffix("</tool_response>")
    )
    if "error" in response_fields:
        text = f"Error: {response_fields['error']}"
    else:
        value = response_fields["result"]
        text = value if isinstance(value, str) else json.dumps(value)
    return text.encode(errors="replace").decode()
