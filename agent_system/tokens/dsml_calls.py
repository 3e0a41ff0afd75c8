"""Tool calls in the DSML tags of DeepSeek V3.2 and V4.

    <|DSML|function_calls>
    <|DSML|invoke name="look">
    <|DSML|parameter name="place" string="true">desk</|DSML|parameter>
    <|DSML|parameter name="times" string="false">2</|DSML|parameter>
    </|DSML|invoke>
    </|DSML|function_calls>

The bars have full width in the models' text. V4 writes ``tool_calls`` in place of
``function_calls``.
"""

import json
import re
from typing import Any

DSML = "\uff5cDSML\uff5c"
# Tags of a call that is rewritten as JSON.
BEGIN_DSML_CALL, END_DSML_CALL = f"<{DSML}call>", f"</{DSML}call>"


def _compile_tag(tag: str, attributes: str = "") -> re.Pattern[str]:
    """Return the pattern of a tag pair whose text contains no other start of ``tag``.

    This keeps the search linear in the length of the reply.
    """
    text = rf"(?P<text>(?:(?!<{DSML}{tag}).)*?)"
    return re.compile(rf"<{DSML}(?P<tag>{tag}){attributes}>{text}</{DSML}(?P=tag)>", re.DOTALL)


GROUP = _compile_tag("(?:function|tool)_calls")
CALL = _compile_tag("invoke", r' name="(?P<name>[^\s<>{}\[\]"]+)"')
PARAMETER = _compile_tag("parameter", ' name="(?P<key>[^<>"]+)" string="(?P<is_text>true|false)"')


def rewrite_dsml_calls(reply: str) -> str:
    """Return ``reply`` with each call as one JSON object between two tags.

    The attribute ``string`` says if a value is text or JSON. A group of calls stays as it is if one
    of them is malformed.
    """

    def write_json_calls(match: re.Match[str]) -> str:
        try:
            calls = [
                {"name": call["name"], "arguments": _parse_parameters(call["text"])}
                for call in _match_all(CALL, match["text"])
            ]
        except (ValueError, RecursionError):
            return match[0]
        texts = [f"{BEGIN_DSML_CALL}{json.dumps(call)}{END_DSML_CALL}" for call in calls]
        return "".join(texts) or match[0]  # a group without calls stays as it is

    return GROUP.sub(write_json_calls, reply)


def _parse_parameters(text: str) -> dict[str, Any]:
    return {
        parameter["key"]: (
            parameter["text"] if parameter["is_text"] == "true" else json.loads(parameter["text"])
        )
        for parameter in _match_all(PARAMETER, text)
    }


def _match_all(pattern: re.Pattern[str], text: str) -> list[re.Match[str]]:
    """Return the matches of ``pattern``. Raise ``ValueError`` if there is text between them."""
    if pattern.sub("", text).strip():
        raise ValueError("there is text between the tags")
    return list(pattern.finditer(text))
