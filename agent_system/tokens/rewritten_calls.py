"""Tool calls in Python syntax and in DSML tags, rewritten as JSON before a reply is parsed.

LFM models write calls in Python syntax. They are parsed, and never executed::

    <|tool_call_start|>[look(place='desk 1'), go(steps=2)]<|tool_call_end|>

DeepSeek V3.2 and V4 write calls in DSML tags. The bars have full width in the models' text. V4
writes ``tool_calls`` in place of ``function_calls``::

    <|DSML|function_calls>
    <|DSML|invoke name="look">
    <|DSML|parameter name="place" string="true">desk</|DSML|parameter>
    <|DSML|parameter name="times" string="false">2</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>
"""

import ast
import json
import re
from collections.abc import Mapping
from typing import Any

BEGIN_CALLS, END_CALLS = "<|tool_call_start|>", "<|tool_call_end|>"
# A string, or the name of a function or argument. Names such as "from" and "get-item" are allowed,
# although they are invalid in Python.
PYTHON_NAME_OR_STRING = re.compile(
    r"""(?P<string>'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*")|(?<![\w.-])[^\W\d][\w.-]*(?=\s*[=(])""",
    re.DOTALL,
)
VALID_ESCAPE_LETTERS = "\\'\"nrtbfu"
# Names of JSON constants. The templates write mappings as JSON, and other values as Python.
JSON_CONSTANTS = {"true": True, "false": False, "null": None}


def rewrite_python_calls(reply: str) -> str:
    """Return ``reply`` with each call as one JSON object between two tags.

        <|tool_call_start|>[look(place='desk')]<|tool_call_end|>
        <|tool_call_start|>{"name": "look", "arguments": {"place": "desk"}}<|tool_call_end|>

    Calls stay as they are if they are malformed or an argument is no literal.
    """

    def write_json_calls(match: re.Match[str]) -> str:
        try:
            calls = [json.dumps(call) for call in parse_python_calls(match[1])]
        except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
            return match[0]
        return "".join(f"{BEGIN_CALLS}{call}{END_CALLS}" for call in calls)

    begin, end = re.escape(BEGIN_CALLS), re.escape(END_CALLS)
    # A region has no second opening tag: the search is linear in the length of the reply.
    region = rf"{begin}((?:(?!{begin}).)*?){end}"
    return re.sub(region, write_json_calls, reply, flags=re.DOTALL)


def parse_python_calls(text: str) -> list[dict[str, Any]]:
    """Return name and arguments of each call of ``text``, a list of calls in Python syntax.

    Raises:
        SyntaxError: The text is no Python expression.
        ValueError: The text is no list of calls, or an argument is no literal.
    """
    names: dict[str, str] = {}  # placeholder -> name that the policy wrote
    prefix = "name"
    while prefix in text:
        prefix += "_"

    def rewrite_token(match: re.Match[str]) -> str:
        if match["string"]:
            return _escape_string(match[0])
        placeholder = f"{prefix}{len(names)}"
        names[placeholder] = match[0]
        return placeholder

    body = ast.parse(PYTHON_NAME_OR_STRING.sub(rewrite_token, text.strip()), mode="eval").body
    if not isinstance(body, ast.List):
        raise ValueError("the calls are in no list")
    calls = []
    for node in body.elts:
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name) or node.args:
            raise ValueError("an element of the list is no call with named arguments")
        arguments = {
            _restore_argument_name(keyword.arg, names): _read_literal(keyword.value)
            for keyword in node.keywords
        }
        calls.append({"name": _restore_argument_name(node.func.id, names), "arguments": arguments})
    return calls


def _restore_argument_name(name: str | None, names: Mapping[str, str]) -> str:
    """Return the name that the policy wrote instead of the placeholder ``name``.

    All names of a call were replaced by placeholders before it was parsed: ``name0`` stands for
    ``names["name0"]``. Raises ``ValueError`` if ``name`` is None, as in ``f(**arguments)``, or if
    it is no placeholder because a comment followed it.
    """
    if name is None or name not in names:
        raise ValueError(f"{name!r} is no name of a function or argument")
    return names[name]


def _escape_string(literal: str) -> str:
    """Escape line breaks and single backslashes, which some chat templates write unescaped."""

    def escape_pair(match: re.Match[str]) -> str:
        return match[0] if match[1] in VALID_ESCAPE_LETTERS else "\\" + match[0]

    escaped = re.sub(r"\\(.)", escape_pair, literal, flags=re.DOTALL)
    return escaped.replace("\n", "\\n").replace("\r", "\\r")


def _read_literal(node: ast.expr) -> Any:
    return ast.literal_eval(_ConstantReplacer().visit(node))


class _ConstantReplacer(ast.NodeTransformer):
    """Transformer of syntax trees: replaces ``true``, ``false`` and ``null`` by their values."""

    def visit_Name(self, node: ast.Name) -> ast.expr:
        return ast.Constant(JSON_CONSTANTS[node.id]) if node.id in JSON_CONSTANTS else node


# ---- calls in DSML tags --------------------------------------------------------------------------

DSML = "\uff5cDSML\uff5c"
# Tags of a call that is rewritten as JSON.
BEGIN_DSML_CALL, END_DSML_CALL = f"<{DSML}call>", f"</{DSML}call>"


def _compile_tag(tag: str, attributes: str = "") -> re.Pattern[str]:
    """Return the pattern of a tag pair whose text contains no other start of ``tag``.

    This keeps the search linear in the length of the reply.
    """
    text = rf"(?P<text>(?:(?!<{DSML}{tag}).)*?)"
    return re.compile(rf"<{DSML}(?P<tag>{tag}){attributes}>{text}</{DSML}(?P=tag)>", re.DOTALL)


DSML_GROUP = _compile_tag("(?:function|tool)_calls")
DSML_CALL = _compile_tag("invoke", r' name="(?P<name>[^\s<>{}\[\]"]+)"')
DSML_PARAMETER = _compile_tag(
    "parameter", ' name="(?P<key>[^<>"]+)" string="(?P<is_text>true|false)"'
)


def rewrite_dsml_calls(reply: str) -> str:
    """Return ``reply`` with each call as one JSON object between two tags.

    A group of calls stays as it is if one of them is malformed.
    """

    def write_json_calls(match: re.Match[str]) -> str:
        try:
            calls = [
                {"name": call["name"], "arguments": _parse_parameters(call["text"])}
                for call in _match_all(DSML_CALL, match["text"])
            ]
        except (ValueError, RecursionError):
            return match[0]
        texts = [f"{BEGIN_DSML_CALL}{json.dumps(call)}{END_DSML_CALL}" for call in calls]
        return "".join(texts) or match[0]  # a group without calls stays as it is

    return DSML_GROUP.sub(write_json_calls, reply)


def _parse_parameters(text: str) -> dict[str, Any]:
    return {
        parameter["key"]: (
            parameter["text"] if parameter["is_text"] == "true" else json.loads(parameter["text"])
        )
        for parameter in _match_all(DSML_PARAMETER, text)
    }


def _match_all(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the matches of ``pattern``. Raise ``ValueError`` if there is text between them."""
    if pattern.sub("", text).strip():
        raise ValueError("there is text between the tags")
    return list(pattern.finditer(text))
