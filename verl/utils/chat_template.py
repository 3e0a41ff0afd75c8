"""Rendering of conversations by a chat template, and the tokens that end a turn.

The template's own texts between message contents are also needed. They are found by rendering
messages whose contents are placeholders.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from verl.utils.chat_tokens import ChatTextEncoder

# {"role": "system" | "user" | "assistant" | "tool", "content": text}. An assistant message may also
# have the keys of its thought and its ``tool_calls``, a tool message the name of its function.
Message = dict[str, Any]

Tools = Sequence[dict[str, Any]]  # functions as OpenAI's JSON schemas

# Keys of a message in which clients and data sets store a thought and chat templates read it. The
# first one is used in messages whose template is not known.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
THOUGHT_KEY = THOUGHT_KEYS[0]

# Placeholder for the content of a message. Its last letter distinguishes message 1 from message 10.
PLACEHOLDER = re.compile(r"xANCHOR(\d+)x")
# Name and value of the argument of a made-up tool call, which shows how a template renders calls.
CALL_KEY, CALL_VALUE = "xKEYx", "xVALUEx"
CALL_ARGUMENTS = {CALL_KEY: CALL_VALUE}
# Exceptions that a template may raise for roles or fields that it does not support.
RENDER_ERRORS = (TemplateError, TypeError, LookupError, ValueError, AttributeError)
RENDER_ERRORS += (ArithmeticError, RecursionError)  # for example range(10**9)
# Arguments of ``apply_chat_template`` that this module sets and users must not set.
RESERVED_ARGUMENTS = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_dict",
    "tokenize",
)


class UnsupportedTemplateError(ValueError):
    """Error: the chat template cannot be used, or not with the configured ``env.history``."""


def make_content_placeholder(index: int) -> str:
    """Return the placeholder for the content of message ``index``."""
    return f"xANCHOR{index}x"


def make_placeholder_messages(*roles: str) -> list[Message]:
    """Return one message per role. The content of message i is ``make_content_placeholder(i)``."""
    return [{"role": role, "content": make_content_placeholder(i)} for i, role in enumerate(roles)]


class ChatTemplate:
    """Renderer of conversations with ``tokenizer.chat_template``.

    ``template_kwargs`` are further arguments of the template. ``uses_parts`` is True if message
    content must be a list of typed parts instead of a string. ``renders_system_message`` is True if
    system messages are rendered. Otherwise callers put the system text before the first user
    message.

    Raises ``UnsupportedTemplateError`` if there is no template, if it does not render a user
    message exactly once, or if ``template_kwargs`` has a key of ``RESERVED_ARGUMENTS``.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise UnsupportedTemplateError(
                "the tokenizer has no chat template; fix: set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._template_kwargs = template_kwargs or {}
        reserved_keys = sorted(set(self._template_kwargs).intersection(RESERVED_ARGUMENTS))
        if reserved_keys:
            raise UnsupportedTemplateError(
                f"data.apply_chat_template_kwargs has {', '.join(reserved_keys)}, which the "
                "framework sets; allowed: arguments that the template itself reads; fix: remove "
                "them (put a template into chat_template.jinja next to the tokenizer)"
            )
        self.uses_parts = self._detect_content_parts()
        self.renders_system_message = self._renders_contents_once(
            ("system", "user"), self.uses_parts
        )
        self.split_pieces = cache(self._render_pieces)

    def render(
        self,
        messages: Sequence[Message],
        uses_parts: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Tools = (),
    ) -> str:
        """Return the text of ``messages``, by default followed by the generation prompt.

        With ``uses_parts`` the contents are passed as lists of typed parts. None means the
        attribute ``uses_parts``. ``tools`` are the functions that the policy may call, as OpenAI's
        JSON schemas.
        """
        return self._apply_template(
            messages, uses_parts, add_generation_prompt, tools, tokenize=False
        )

    def render_token_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the token ids of ``messages`` followed by the generation prompt."""
        options = {"tokenize": True, "return_dict": False}
        return list(self._apply_template(messages, None, True, tools, **options))

    def _apply_template(
        self,
        messages: Sequence[Message],
        uses_parts: bool | None,
        add_generation_prompt: bool,
        tools: Tools,
        **options: Any,
    ) -> Any:
        uses_parts = self.uses_parts if uses_parts is None else uses_parts
        template_messages: list[dict[str, Any]] = [dict(message) for message in messages]
        if uses_parts:
            for message in template_messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        options |= {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = list(tools)
        options = self._template_kwargs | options
        return self._tokenizer.apply_chat_template(template_messages, **options)

    def _render_pieces(self, roles: tuple[str, ...]) -> list[str | int]:
        """Return the rendered text of messages with ``roles`` as a list of strings and integers.

        A string is text of the template. An integer i stands for the content of message i.
        Example: roles user, assistant give ``["<user>", 0, "<end><assistant>", 1, "<end>"]``.
        """
        try:
            split_texts = PLACEHOLDER.split(self.render(make_placeholder_messages(*roles)))
        except RENDER_ERRORS as error:
            raise UnsupportedTemplateError(
                f"the chat template refuses messages of roles {list(roles)}: {error}"
            ) from error
        # The pattern has a group, so split() returns the message indices at odd positions.
        message_indices = [int(index) for index in split_texts[1::2]]
        pieces: list[str | int] = list(split_texts)
        pieces[1::2] = message_indices
        if sorted(message_indices) != list(range(len(roles))):
            raise UnsupportedTemplateError(
                f"the chat template does not render every message of roles {list(roles)} once"
            )
        return [piece for piece in pieces if piece != ""]

    def render_generation_prompt(self) -> str:
        """Return the template text between the last user content and the assistant's reply."""
        text = self.render(make_placeholder_messages("user"))
        return text.rpartition(make_content_placeholder(0))[2]

    def render_between_turns(self) -> tuple[str, str]:
        """Return the template text before and after the user content between two replies.

        The second text ends with the generation prompt. Raises ``UnsupportedTemplateError`` if the
        template cannot render a user turn after an assistant turn.
        """
        try:
            text = self.render(make_placeholder_messages("user", "assistant", "user"))
        except RENDER_ERRORS as error:
            raise UnsupportedTemplateError(
                f"the chat template cannot continue after an assistant turn ({error}); "
                "fix: env.history=window"
            ) from error
        _, assistant_placeholder, text_after_assistant = text.rpartition(
            make_content_placeholder(1)
        )
        text_before, user_placeholder, text_after = text_after_assistant.rpartition(
            make_content_placeholder(2)
        )
        if not assistant_placeholder or not user_placeholder:
            raise UnsupportedTemplateError(
                "the chat template does not keep an earlier assistant turn before the next user "
                "turn; fix: env.history=window"
            )
        return text_before, text_after

    def render_turn_end(self) -> str:
        """Return the template text between a reply and the next user content.

        If the template renders no further turn, return the text after the last reply, or else "".
        """
        with contextlib.suppress(UnsupportedTemplateError):
            return self.render_between_turns()[0]
        with contextlib.suppress(UnsupportedTemplateError):
            return self.render_conversation_end()
        return ""

    def render_conversation_end(self) -> str:
        """Return the template text after the reply that ends a conversation.

        Raises ``UnsupportedTemplateError`` if the template does not render assistant turns.
        """
        messages = make_placeholder_messages("user", "assistant")
        try:
            text = self.render(messages, add_generation_prompt=False)
        except RENDER_ERRORS as error:
            raise UnsupportedTemplateError(
                f"the chat template refuses assistant turns: {error}"
            ) from error
        _, assistant_placeholder, closing_text = text.rpartition(make_content_placeholder(1))
        if not assistant_placeholder:
            raise UnsupportedTemplateError("the chat template does not render an assistant turn")
        return closing_text

    def _detect_content_parts(self) -> bool:
        for uses_parts in (False, True):
            if self._renders_contents_once(("user",), uses_parts):
                return uses_parts
        raise UnsupportedTemplateError(
            "the chat template does not render a user message exactly once, so it cannot be used; "
            "fix: set another chat template"
        )

    def _renders_contents_once(self, roles: Sequence[str], uses_parts: bool) -> bool:
        messages = make_placeholder_messages(*roles)
        try:
            text = self.render(messages, uses_parts)
        except RENDER_ERRORS:
            return False
        return all(text.count(message["content"]) == 1 for message in messages)


# ---- tokens that end a turn ----------------------------------------------------------------------
# All code that samples or reads model output uses these functions.


def find_stop_token_ids(tokenizer: Any, model_path: str | Path | None = None) -> frozenset[int]:
    """Return the ids of all tokens that end a turn when they are sampled.

    These are the ends of turn of the chat template, the tokenizer's end of sequence, and the
    ``eos_token_id`` of the generation config in ``model_path`` (default: the tokenizer's
    directory).
    """
    path = getattr(tokenizer, "name_or_path", "") if model_path is None else model_path
    end_ids = set(read_config_stop_ids(path)) if path else set()
    end_ids.update(_collect_ids(getattr(tokenizer, "eos_token_id", None)))
    with contextlib.suppress(UnsupportedTemplateError):
        end_ids.update(find_template_end_ids(tokenizer, ChatTemplate(tokenizer)))
    return frozenset(end_ids)


def find_template_end_ids(tokenizer: Any, template: ChatTemplate) -> frozenset[int]:
    """Return the ids with which ``template`` ends a text answer and a turn of tool calls.

    Examples: ``<|im_end|>`` for both (Qwen), ``<|return|>`` and ``<|call|>`` (gpt-oss),
    ``<|user|>`` and ``<|observation|>`` (GLM). Empty if plain text ends a turn.
    """
    end_id = find_reply_end_token(tokenizer, template)[1]
    end_ids = set() if end_id is None else {end_id}
    for arguments in (CALL_ARGUMENTS, json.dumps(CALL_ARGUMENTS)):
        with contextlib.suppress(*RENDER_ERRORS):
            end_ids.update(_find_tool_call_end_ids(tokenizer, template, arguments, end_id))
            break
    return frozenset(end_ids)


def find_reply_end_token(tokenizer: Any, template: ChatTemplate) -> tuple[str, int | None]:
    """Return the text and the id of the control token with which the policy ends a text answer.

    The template writes this token after the last turn of a conversation, or else after an earlier
    turn. The two may differ: gpt-oss writes ``<|return|>`` after the last turn, and ``<|end|>``
    after earlier ones.
    """
    turn_end = ""
    with contextlib.suppress(UnsupportedTemplateError):
        turn_end = template.render_conversation_end()
    end_id = find_end_of_turn_id(tokenizer, turn_end)
    if end_id is None:
        turn_end = template.render_turn_end()
        end_id = find_end_of_turn_id(tokenizer, turn_end)
    return ChatTextEncoder(tokenizer, turn_end).find_control_text_at_start(turn_end), end_id


def find_end_of_turn_id(tokenizer: Any, turn_end: str) -> int | None:
    """Return the id of the control token at the start of ``turn_end``, or None."""
    text_encoder = ChatTextEncoder(tokenizer, turn_end)
    control_text = text_encoder.find_control_text_at_start(turn_end)
    control_ids = [
        token for token in text_encoder.encode(control_text) if token in text_encoder.control_ids
    ]
    return control_ids[0] if control_ids else None


def make_tool_call(name: str, arguments: Any, call_id: str = "call00001") -> dict[str, Any]:
    """Return a tool call in OpenAI's format. Mistral's templates need ids of nine characters."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def is_encodable_json(value: object) -> bool:
    """Return True if a prompt can contain the JSON ``value``.

    It must not contain NaN or a lone surrogate, which tokenizers refuse, or be nested too deeply.
    """
    try:
        json.dumps(value, ensure_ascii=False, allow_nan=False).encode()
    except (ValueError, RecursionError):
        return False
    return True


def _find_tool_call_end_ids(
    tokenizer: Any, template: ChatTemplate, arguments: Any, end_id: int | None
) -> list[int]:
    """Return a list with the control token that ends a turn of tool calls.

    It is empty if ``end_id``, which ends a text answer, also ends such a turn. A token between two
    calls of one turn does not end the turn.
    """
    question, tool_result, *tool_names = map(make_content_placeholder, range(4))
    calls = [make_tool_call(tool_name, arguments) for tool_name in tool_names]
    tools = [make_tool_schema(tool_name, [CALL_KEY]) for tool_name in tool_names]

    def render_after_value(calls: list[dict[str, Any]]) -> str:
        messages = [
            {"role": "user", "content": question},
            {"role": "assistant", "content": "", "tool_calls": calls},
            {
                "role": "tool",
                "name": tool_names[0],
                "tool_call_id": calls[0]["id"],
                "content": tool_result,
            },
        ]
        text = template.render(messages, tools=tools).rpartition(question)[2]
        return text.partition(CALL_VALUE)[2].partition(tool_result)[0]

    text_after_call = render_after_value(calls[:1])
    text_encoder = ChatTextEncoder(tokenizer, text_after_call)
    control_ids_after_call = [
        token for token in text_encoder.encode(text_after_call) if token in text_encoder.control_ids
    ]
    if end_id in control_ids_after_call:
        return []
    try:
        text_between_calls, second_call_name, _ = render_after_value(calls).partition(tool_names[1])
    except RENDER_ERRORS:
        text_between_calls, second_call_name = "", ""  # the template allows one call per turn
    ids_between_calls = set(text_encoder.encode(text_between_calls)) if second_call_name else set()
    return [token for token in control_ids_after_call if token not in ids_between_calls][:1]


def make_tool_schema(name: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return a tool ``name`` in OpenAI's JSON schema, with required string arguments ``keys``."""
    properties = {key: {"type": "string", "description": key} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def read_config_stop_ids(model_path: str | Path) -> frozenset[int]:
    """Return the ``eos_token_id`` values of ``generation_config.json``, or else ``config.json``."""
    for name in ("generation_config.json", "config.json"):
        config_file = Path(model_path) / name
        if config_file.is_file():
            config = json.loads(config_file.read_text(encoding="utf-8"))
            return frozenset(_collect_ids(config.get("eos_token_id")))
    return frozenset()


def _collect_ids(value: object) -> list[int]:
    id_values = value if isinstance(value, list) else [value]
    return [token_id for token_id in id_values if isinstance(token_id, int)]
