"""Formats in which families of models write thoughts and tool calls.

They are fields of the response templates of transformers (``tokenizer.parse_response``). ``END``
stands for the tokens that end a turn. Most are adapted from TRL 1.16 (Apache License 2.0), which
adds the same formats to tokenizers without one.
"""

from typing import Any

Fields = dict[str, dict[str, Any]]

_CALL = {"type": "function", "function": {"name": "{name}", "arguments": "{content}"}}
_THOUGHT = {"open": "<think>", "close_pattern": r"</think>\s*", "content": "text"}
_TEXT = {"close_pattern": r"(?:END)\s*|$", "content": "text"}
# Arguments stay text where the format does not show their type. The schema of the tool decides.
_RAW = {"name": "text"}


def _make_call_field(
    open_pattern: str, close_pattern: str, content: str = "json", **args: Any
) -> Fields:
    field: dict[str, Any] = {
        "open_pattern": open_pattern,
        "close_pattern": close_pattern,
        "repeats": True,
        "content": content,
        "transform": _CALL,
    }
    if args:
        field["content_args"] = args
    return {"tool_calls": field}


def _make_tag_args(pattern: str, value_parser: dict[str, Any]) -> dict[str, Any]:
    return {"content": "xml-inline", "tag_pattern": pattern, "value_parser": value_parser}


# An argument of LFM2.5 is a quoted text, a list or mapping, or a literal up to the next comma.
_ATOM = r"[^\[\]{}'\"]|'[^']*'|\"[^\"]*\""
_NESTED = rf"{_ATOM}|[\[{{](?:{_ATOM})*[\]}}]"
_LFM_VALUE = rf"'[^']*'|[\[{{](?:{_NESTED})*[\]}}]|[^,)]*"

# Name of each format, with the families that use it in a comment.
REPLY_FORMATS: dict[str, Fields] = {
    # Qwen2.5, Qwen3, Hermes
    "hermes": {
        "reasoning_content": _THOUGHT,
        "tool_calls": {
            "open": "<tool_call>",
            "close_pattern": r"</tool_call>\s*",
            "repeats": True,
            "content": "json",
            "transform": {"type": "function", "function": "{content}"},
        },
        "content": _TEXT,
    },
    # Qwen3-Coder, Qwen3.5, Nemotron 3
    "qwen3_xml": {
        "reasoning_content": _THOUGHT,
        **_make_call_field(
            r"<tool_call>\s*<function=(?P<name>[^\n>]+)>",
            r"</tool_call>\s*",
            **_make_tag_args(r"<parameter=(?P<key>[^>\n]+)>\s*(?P<value>.*?)\s*</parameter>", _RAW),
        ),
        "content": _TEXT,
    },
    # GLM-4.5 and later
    "glm": {
        "reasoning_content": _THOUGHT,
        **_make_call_field(
            r"<tool_call>(?P<name>[^\s<]+)\n?",
            r"</tool_call>\s*",
            **_make_tag_args(
                r"<arg_key>(?P<key>[^<]+)</arg_key>\s*<arg_value>(?P<value>.*?)</arg_value>", _RAW
            ),
        ),
        "content": _TEXT,
    },
    # Llama 3.1 and later
    "llama3_json": {
        **_make_call_field(
            r'\{"name":\s*"(?P<name>[^"]+)",\s*"parameters":\s*', r"\}\s*(?:END)\s*|\}\s*$"
        ),
        "content": _TEXT,
    },
    # gpt-oss
    "harmony": {
        "thinking": {
            "open": "<|channel|>analysis<|message|>",
            "close_pattern": r"<\|end\|>(?:<\|start\|>assistant)?\s*",
            "content": "text",
        },
        **_make_call_field(
            r"\s*to=functions\.(?P<name>\S+?)<\|channel\|>commentary\s+json<\|message\|>",
            r"<\|call\|>\s*|$",
        ),
        "content": {
            "open": "<|channel|>final<|message|>",
            "close_pattern": r"(?:END|<\|end\|>)\s*|$",
            "content": "text",
        },
    },
    # LFM2.5
    "lfm2": {
        "thinking": _THOUGHT,
        **_make_call_field(
            r"(?:<\|tool_call_start\|>\[|,\s*)(?P<name>\w+)\(",
            r"\)(?:\]<\|tool_call_end\|>)?\s*",
            **_make_tag_args(
                rf"(?P<key>\w+)=(?P<value>{_LFM_VALUE})",
                {"name": "json", "args": {"string_delims": [["'", "'"]], "allow_non_json": True}},
            ),
        ),
        "content": _TEXT,
    },
    # Gemma 4
    "gemma4": {
        "reasoning_content": {
            "open": "<|channel>thought\n",
            "close_pattern": r"<channel\|>\s*",
            "content": "text",
        },
        **_make_call_field(
            r"<\|tool_call>call:(?P<name>\w+)",
            r"<tool_call\|>\s*",
            string_delims=[['<|"|>', '<|"|>']],
            unquoted_keys=True,
        ),
        "content": _TEXT,
    },
    # Muse
    "atem": {
        **_make_call_field(
            r"\s*(?:to=\S+?<\|message\|>)?<atem:function_calls>\s*"
            r'<atem:invoke name="(?P<name>[^"]+)">',
            r"</atem:function_calls>\s*",
            **_make_tag_args(
                r'<atem:parameter name="(?P<key>[^"]+)">(?P<value>.*?)</atem:parameter>', _RAW
            ),
        ),
        "content": _TEXT,
    },
}
