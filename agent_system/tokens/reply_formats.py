"""Formats in which families of models write thoughts and tool calls.

Each format follows from the text that the chat templates of the family write:

    template    <tool_call>\\n<function=look>\\n<parameter=place>\\ndesk\\n</parameter>\\n...
    format      begins  "<tool_call> <function={name}>"
                pair    "<parameter={key}> {value} </parameter>"
                ends    "</function> </tool_call>"

``REPLY_FORMATS`` contains the formats as fields of response templates, which transformers reads
(``tokenizer.parse_response``). Its caller removes the end-of-turn tokens from a reply before.
"""

import re
from dataclasses import dataclass, field
from typing import Any

from agent_system.tokens.python_calls import BEGIN_CALLS, END_CALLS

Field = dict[str, Any]
Fields = dict[str, Field]

PLACEHOLDERS = {
    "{name}": r'(?P<name>[^\s<>{}"]+)',
    "{key}": r'(?P<key>[^<>"]+)',
    "{value}": r"(?P<value>.*?)",
    # Type of the arguments in gpt-oss's calls: "json" or "<|constrain|>json".
    "{type}": r"(?:<\|constrain\|>|[\w\s])*",
}


def build_regex(text: str, white_space: str = r"\s*") -> str:
    """Return the regular expression that matches ``text``.

    A placeholder in ``text``, such as ``{name}``, matches any name, key or value. A space matches
    the pattern ``white_space``.
    """
    parts = re.split(r"(\{\w+\}| )", text)
    return "".join(
        white_space if part == " " else PLACEHOLDERS.get(part) or re.escape(part) for part in parts
    )


def make_text_field(begins: str = "", ends: str = "") -> Field:
    """Return the response template field of the text between two tags.

    Without tags, it is the field of all text that no other field contains.
    """
    if not begins:
        return {"content": "text", "repeats": True, "join": "\n"}
    return {
        "content": "text",
        "open_pattern": build_regex(begins),
        "close_pattern": rf"{build_regex(ends)}\s*",
    }


@dataclass(frozen=True)
class CallFormat:
    """Format of one tool call.

    Attributes:
        begins: Alternative texts before the arguments. They may contain ``{name}``.
        ends: Text after the arguments. Empty: the whole reply is one call.
        pair: Text of one argument, with ``{key}`` and ``{value}``. The schema of the tool gives the
            type of the value. A space stands for at most one character, because white space may
            belong to the value. Empty: the arguments are JSON.
        arguments_key: Key of the arguments, if they and the name are in one JSON object.
        json_args: Options of the JSON parser of transformers.
    """

    begins: tuple[str, ...] = ()
    ends: str = ""
    pair: str = ""
    arguments_key: str = ""
    json_args: dict[str, Any] = field(default_factory=dict)

    def make_field(self) -> Field:
        """Return the response template field ``tool_calls`` of this format.

        transformers parses tool calls with it.
        """
        ends = rf"{build_regex(self.ends)}\s*"
        begins = rf"(?:{'|'.join(map(build_regex, self.begins))})\s*"
        call: Field = {"repeats": True, "transform": self._make_transform()}
        if self.pair:
            tag_pattern = build_regex(self.pair, white_space=r"\s?")
            call |= {"content": "xml-inline", "content_args": {"tag_pattern": tag_pattern}}
            # Require the text that ends a call: of a truncated call the parser would omit
            # arguments.
            begins += rf"(?=.*{ends})"
        else:
            call |= {"content": "json", "content_args": self.json_args}
        if not self.ends:
            return call | {"open_pattern": r"\A\s*(?=\{)"}
        return call | {"open_pattern": begins, "close_pattern": ends}

    def _make_transform(self) -> dict[str, Any]:
        name, arguments = "{name}", "{content}"
        if self.arguments_key:
            name, arguments = "{content.name}", f"{{content.{self.arguments_key}}}"
        return {"type": "function", "function": {"name": name, "arguments": arguments}}


THINK_TAGS = make_text_field("<think>", "</think>")
OTHER_TEXT = make_text_field()


def make_response_fields(
    call: CallFormat,
    thought_key: str = "reasoning_content",
    thought: Field = THINK_TAGS,
    content: Field = OTHER_TEXT,
) -> Fields:
    """Return the fields from which transformers parses the replies of a model family.

    ``call``, ``thought`` and ``content`` say how a reply writes tool calls, thoughts and the rest.
    The chat templates of the family read thoughts from the message key ``thought_key``.
    """
    return {thought_key: thought, "tool_calls": call.make_field(), "content": content}


REPLY_FORMATS: dict[str, Fields] = {
    # <tool_call>\n{"name": "look", "arguments": {"place": "desk"}}\n</tool_call>
    "hermes": make_response_fields(
        CallFormat(("<tool_call>",), "</tool_call>", arguments_key="arguments")
    ),
    "qwen3_xml": make_response_fields(
        CallFormat(
            ("<tool_call> <function={name}>",),
            "</function> </tool_call>",
            pair="<parameter={key}> {value} </parameter>",
        )
    ),
    "glm": make_response_fields(
        CallFormat(
            ("<tool_call>{name}",),
            "</tool_call>",
            pair="<arg_key>{key}</arg_key> <arg_value>{value}</arg_value>",
        )
    ),
    # {"name": "look", "parameters": {"place": "desk"}}
    "llama3_json": make_response_fields(CallFormat(arguments_key="parameters")),
    # <|channel|>analysis<|message|>hm<|end|><|start|>assistant to=functions.look<|channel|>...
    "harmony": make_response_fields(
        CallFormat(
            (
                "to=functions.{name} <|channel|>commentary{type}<|message|>",
                "<|channel|>commentary to=functions.{name} {type}<|message|>",
            ),
            "<|call|>",
        ),
        "thinking",
        make_text_field("<|channel|>analysis<|message|>", "<|end|>"),
        make_text_field("<|channel|>final<|message|>", "<|end|>"),
    ),
    # rewrite_python_calls writes these objects in place of Python-style calls.
    "lfm2": make_response_fields(
        CallFormat((BEGIN_CALLS,), END_CALLS, arguments_key="arguments"), "thinking"
    ),
    # <|channel>thought\nhm\n<channel|><|tool_call>call:look{place:<|"|>desk<|"|>}<tool_call|>
    "gemma4": make_response_fields(
        CallFormat(
            ("<|tool_call>call:{name}",),
            "<tool_call|>",
            json_args={"unquoted_keys": True, "string_delims": [['<|"|>', '<|"|>']]},
        ),
        thought=make_text_field("<|channel>thought", "<channel|>"),
    ),
    # to=self<|message|>hm<|eom|><|start|>assistant to=look<|message|><atem:function_calls>...
    "atem": make_response_fields(
        CallFormat(
            ('<atem:invoke name="{name}">',),
            "</atem:invoke>",
            pair='<atem:parameter name="{key}">{value}</atem:parameter>',
        ),
        thought=make_text_field("to=self<|message|>", "<|eom|>"),
        content=make_text_field("to=user<|message|>", "<|eom|>"),
    ),
}
# Formats in which a reply has tags also without thoughts and calls.
TAGGED_CONTENT = ("harmony", "atem")
