"""Formats in which families of models write thoughts and tool calls.

Each format follows from the text that the chat templates of the family write:

    template    <tool_call>\\n<function=look>\\n<parameter=place>\\ndesk\\n</parameter>\\n...
    format      opening   "<tool_call> <function={name}>"
                argument  "<parameter={key}> {value} </parameter>"
                closing   "</function> </tool_call>"

``REPLY_FORMATS`` contains the formats as fields of response templates, which transformers reads
(``tokenizer.parse_response``). Its caller removes the end-of-turn tokens from a reply before.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from agent_system.tokens.rewritten_calls import (
    BEGIN_CALLS,
    BEGIN_DSML_CALL,
    END_CALLS,
    END_DSML_CALL,
    rewrite_dsml_calls,
    rewrite_python_calls,
)
from verl.utils.chat_template import THOUGHT_KEY

Field = dict[str, Any]
Fields = dict[str, Field]

# Maps each placeholder in the text of a format to the regular expression that it stands for.
PLACEHOLDERS = {
    "{name}": r'(?P<name>[^\s<>{}\[\]"]+)',
    "{id}": r'(?P<id>[^\s<>{}\[\]"]+)',
    # Id with the name of the function, such as functions.look:0.
    "{named_id}": r'(?P<id>(?:functions\.)?(?P<name>[^\s<>{}\[\]"]+):\d+)',
    # Empty id: default for objects without the key "id".
    "{no_id}": "(?P<id>)",
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


def make_text_field(opening_text: str = "", closing_text: str = "") -> Field:
    """Return the response template field of the text between two tags.

    Without tags, it is the field of all text that no other field contains.
    """
    if not opening_text:
        return {"content": "text", "repeats": True, "join": "\n"}
    return {
        "content": "text",
        "open_pattern": build_regex(opening_text),
        "close_pattern": rf"{build_regex(closing_text)}\s*",
    }


@dataclass(frozen=True)
class CallFormat:
    """Format of one tool call.

    Attributes:
        opening_texts: Alternative texts before the arguments. They may contain ``{name}`` and
            ``{id}``, or ``{named_id}``. Empty: the whole reply is one call.
        closing_text: Text after the arguments. Empty: the next call or the end of the reply ends a
            call.
        texts_around_calls: Texts before the first call and after the last one, if there are such
            texts.
        argument_template: Text of one argument, with ``{key}`` and ``{value}``. The schema of the
            tool gives the type of the value. A space stands for at most one character, because
            white space may belong to the value. Empty: the arguments are JSON.
        arguments_key: Key of the arguments, if they and the name are in one JSON object.
        name_key: Key of the name in this object.
        is_list: True if the text between ``opening_texts`` and ``closing_text`` is a list of such
            objects.
        json_args: Options of the JSON parser of transformers.
    """

    opening_texts: tuple[str, ...] = ()
    closing_text: str = ""
    texts_around_calls: tuple[str, str] = ("", "")
    argument_template: str = ""
    arguments_key: str = ""
    name_key: str = "name"
    is_list: bool = False
    json_args: dict[str, Any] = field(default_factory=dict)

    def make_field(self) -> Field:
        """Return the response template field ``tool_calls`` of this format."""
        optional_prefix, optional_suffix = (
            rf"(?:{build_regex(text)}\s*)?" if text else "" for text in self.texts_around_calls
        )
        closing_pattern = rf"{build_regex(self.closing_text)}\s*{optional_suffix}"
        opening_pattern = (
            rf"{optional_prefix}(?:{'|'.join(map(build_regex, self.opening_texts))})\s*"
        )
        call: Field = {"repeats": True, "transform": self._make_call_template()}
        if self.argument_template:
            tag_pattern = build_regex(self.argument_template, white_space=r"\s?")
            call |= {"content": "xml-inline", "content_args": {"tag_pattern": tag_pattern}}
            # Require the text that ends a call: otherwise the parser would accept a truncated
            # call, without some of its arguments.
            opening_pattern += rf"(?=.*{closing_pattern})"
        else:
            call |= {"content": "json", "content_args": self.json_args}
        if self.is_list:
            call |= {"transform_each": True}
        if not self.opening_texts:
            return call | {"open_pattern": r"\A\s*(?=\{)"}
        call_end_pattern = closing_pattern if self.closing_text else f"(?={opening_pattern})"
        return call | {"open_pattern": opening_pattern, "close_pattern": call_end_pattern}

    def _make_call_template(self) -> dict[str, Any]:
        name, arguments = "{name}", "{content}"
        if self.arguments_key:
            # The parser provides an object as "content", but the keys of a listed object directly.
            path_prefix = "" if self.is_list else "content."
            name, arguments = (
                f"{{{path_prefix}{self.name_key}}}",
                f"{{{path_prefix}{self.arguments_key}}}",
            )
        call = {"type": "function", "function": {"name": name, "arguments": arguments}}
        has_id = any("id}" in text for text in self.opening_texts)
        return call | ({"id": "{id}"} if has_id else {})


THINK_TAGS = make_text_field("<think>", "</think>")
OTHER_TEXT = make_text_field()
MISTRAL_THOUGHT = make_text_field("[THINK]", "[/THINK]")


def make_deepseek_token(words: str) -> str:
    """Return a control token of DeepSeek, for example "tool sep" between bars of full width."""
    return f"<\uff5c{words}\uff5c>".replace(" ", "\u2581")


# Texts around all calls of a reply, and in a call.
DEEPSEEK_CALLS = make_deepseek_token("tool calls begin"), make_deepseek_token("tool calls end")
DEEPSEEK_BEGIN, DEEPSEEK_SEPARATOR, DEEPSEEK_END = map(
    make_deepseek_token, ("tool call begin", "tool sep", "tool call end")
)


def make_response_fields(
    call: CallFormat, thought: Field = THINK_TAGS, content: Field = OTHER_TEXT
) -> Fields:
    """Return the ``fields`` of a response template, which ``tokenizer.parse_response`` reads.

    They describe where a reply of one model family has its thought, tool calls and other text.
    """
    return {THOUGHT_KEY: thought, "tool_calls": call.make_field(), "content": content}


REPLY_FORMATS: dict[str, Fields] = {
    # <tool_call>\n{"name": "look", "arguments": {"place": "desk"}}\n</tool_call>
    "hermes": make_response_fields(
        CallFormat(("<tool_call>",), "</tool_call>", arguments_key="arguments")
    ),
    "qwen3_xml": make_response_fields(
        CallFormat(
            ("<tool_call> <function={name}>",),
            "</function> </tool_call>",
            argument_template="<parameter={key}> {value} </parameter>",
        )
    ),
    "glm": make_response_fields(
        CallFormat(
            ("<tool_call>{name}",),
            "</tool_call>",
            argument_template="<arg_key>{key}</arg_key> <arg_value>{value}</arg_value>",
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
        make_text_field("<|channel|>analysis<|message|>", "<|end|>"),
        make_text_field("<|channel|>final<|message|>", "<|end|>"),
    ),
    # rewrite_python_calls writes these objects in place of Python-style calls.
    "lfm2": make_response_fields(CallFormat((BEGIN_CALLS,), END_CALLS, arguments_key="arguments")),
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
            argument_template='<atem:parameter name="{key}">{value}</atem:parameter>',
        ),
        thought=make_text_field("to=self<|message|>", "<|eom|>"),
        content=make_text_field("to=user<|message|>", "<|eom|>"),
    ),
    # [TOOL_CALLS] [{"name": "look", "arguments": {"place": "desk"}, "id": "call00000"}]
    "mistral": make_response_fields(
        CallFormat(("[TOOL_CALLS]{no_id}",), arguments_key="arguments", is_list=True),
        MISTRAL_THOUGHT,
    ),
    # [TOOL_CALLS]look[ARGS]{"place": "desk"}
    "mistral_args": make_response_fields(
        CallFormat(("[TOOL_CALLS]{name}[ARGS]",)), MISTRAL_THOUGHT
    ),
    # [TOOL_CALLS]look[CALL_ID]call00000[ARGS]{"place": "desk"}
    "mistral_call_id": make_response_fields(
        CallFormat(("[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]",)), MISTRAL_THOUGHT
    ),
    # <tool call begin>function<tool sep>look\n```json\n{"place": "desk"}\n```<tool call end>
    "deepseek_v3": make_response_fields(
        CallFormat(
            (f"{DEEPSEEK_BEGIN}function{DEEPSEEK_SEPARATOR}{{name}} ```json",),
            f"``` {DEEPSEEK_END}",
            DEEPSEEK_CALLS,
        )
    ),
    # <tool call begin>look<tool sep>{"place": "desk"}<tool call end>
    "deepseek_v31": make_response_fields(
        CallFormat((f"{DEEPSEEK_BEGIN}{{name}}{DEEPSEEK_SEPARATOR}",), DEEPSEEK_END, DEEPSEEK_CALLS)
    ),
    # rewrite_dsml_calls writes these objects in place of calls in DSML tags.
    "deepseek_v32": make_response_fields(
        CallFormat((BEGIN_DSML_CALL,), END_DSML_CALL, arguments_key="arguments")
    ),
    # <|tool_call_begin|>functions.look:0<|tool_call_argument_begin|>{"place": "desk"}...
    "kimi_k2": make_response_fields(
        CallFormat(
            ("<|tool_call_begin|> {named_id} <|tool_call_argument_begin|>",),
            "<|tool_call_end|>",
            ("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
        )
    ),
    # <|START_ACTION|>[{"tool_call_id": "0", "tool_name": "look", "parameters": ...}]<|END_ACTION|>
    "cohere": make_response_fields(
        CallFormat(
            ("<|START_ACTION|>",),
            "<|END_ACTION|>",
            arguments_key="parameters",
            name_key="tool_name",
            is_list=True,
        ),
        make_text_field("<|START_THINKING|>", "<|END_THINKING|>"),
        make_text_field("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    ),
}
# Functions that rewrite the calls of a reply before it is parsed.
CALL_REWRITERS: dict[str, Callable[[str], str]] = {
    "lfm2": rewrite_python_calls,
    "deepseek_v32": rewrite_dsml_calls,
}
# Formats of the ids of new calls. Mistral's templates need ids of nine characters. Kimi's templates
# show the name of a function only as a part of the id.
CALL_ID = "call{number:05d}"
CALL_IDS = {"kimi_k2": "functions.{name}:{number}"}
# Formats in which a reply has tags also without thoughts and calls.
TAGGED_CONTENT = ("harmony", "atem", "cohere")
