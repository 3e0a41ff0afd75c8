"""Rendering of a chat template, the text around its messages, and the tokens that end a turn.

The text around the messages is found by rendering messages whose contents are placeholders.
"""

import contextlib
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from jinja2.exceptions import TemplateError

from verl.utils.chat_tokens import ChatTokens

# {"role": "system" | "user" | "assistant" | "tool", "content": text}. An assistant message may also
# have the keys of its thought and its ``tool_calls``, a tool message the name of its function.
Message = dict[str, Any]

Tools = Sequence[dict[str, Any]]  # functions as OpenAI's JSON schemas

# The letter at the end distinguishes message 1 from message 10.
ANCHOR = re.compile(r"xANCHOR(\d+)x")
# The call that shows how a template writes calls, with one argument.
CALL_KEY, CALL_VALUE = "xKEYx", "xVALUEx"
CALL_ARGUMENTS = {CALL_KEY: CALL_VALUE}
# Exceptions that a template may raise, on purpose or for roles or fields that it does not expect.
RENDER_ERRORS = (TemplateError, TypeError, KeyError, ValueError, AttributeError)
# Arguments of ``apply_chat_template`` that this module sets.
RESERVED = (
    "add_generation_prompt",
    "chat_template",
    "continue_final_message",
    "conversation",
    "return_dict",
    "tokenize",
)


class TemplateUnsupported(ValueError):
    """The chat template cannot be used at all, or not with the requested history policy."""


def make_anchor(index: int) -> str:
    """Return the placeholder for the content of message ``index``."""
    return f"xANCHOR{index}x"


class ChatTemplate:
    """Renderer of ``tokenizer.chat_template`` that also gives the text around the messages.

    ``uses_parts``: the template needs content as a list of typed parts instead of a string.
    ``trims_content``: it strips white space around user content. ``takes_system``: it renders
    system messages. If it does not, callers put the system text before the first user message.

    Raises:
        TemplateUnsupported: There is no template, it does not render a user message exactly once,
            or ``template_kwargs`` has a key of ``RESERVED``.
    """

    def __init__(self, tokenizer: Any, template_kwargs: dict[str, Any] | None = None) -> None:
        if not getattr(tokenizer, "chat_template", None):
            raise TemplateUnsupported(
                "the tokenizer has no chat template; fix: set tokenizer.chat_template"
            )
        self._tokenizer = tokenizer
        self._kwargs = template_kwargs or {}
        reserved = sorted(set(self._kwargs).intersection(RESERVED))
        if reserved:
            raise TemplateUnsupported(
                f"data.apply_chat_template_kwargs has {', '.join(reserved)}, which the framework "
                "sets; allowed: arguments that the template itself reads; fix: remove them (put a "
                "template into chat_template.jinja next to the tokenizer)"
            )
        self.uses_parts = self._detect_parts()
        padded = f" {make_anchor(0)} "
        self.trims_content = padded not in self.render([{"role": "user", "content": padded}])
        with_system = [("system", make_anchor(0)), ("user", make_anchor(1))]
        self.takes_system = self._renders_once(with_system, self.uses_parts)
        self.split_pieces = cache(self._split_pieces)

    def render(
        self,
        messages: Sequence[Message],
        parts: bool | None = None,
        *,
        add_generation_prompt: bool = True,
        tools: Tools = (),
    ) -> str:
        """Return the text of ``messages``, by default followed by the generation prompt.

        ``tools`` are the functions that the policy may call, as OpenAI's JSON schemas.
        """
        return self._apply_template(messages, parts, add_generation_prompt, tools, tokenize=False)

    def render_token_ids(self, messages: Sequence[Message], tools: Tools = ()) -> list[int]:
        """Return the ids of ``apply_chat_template(tokenize=True)``, with the generation prompt."""
        options = {"tokenize": True, "return_dict": False}
        return list(self._apply_template(messages, None, True, tools, **options))

    def _apply_template(
        self,
        messages: Sequence[Message],
        parts: bool | None,
        add_generation_prompt: bool,
        tools: Tools,
        **options: Any,
    ) -> Any:
        parts = self.uses_parts if parts is None else parts
        template_messages: list[dict[str, Any]] = [dict(message) for message in messages]
        if parts:
            for message in template_messages:
                message["content"] = [{"type": "text", "text": message["content"]}]
        options |= {"add_generation_prompt": add_generation_prompt}
        if tools:
            options["tools"] = list(tools)
        return self._tokenizer.apply_chat_template(template_messages, **(self._kwargs | options))

    def _split_pieces(self, roles: tuple[str, ...]) -> list[str | int]:
        """Return the text for messages of ``roles`` as a list of strings and integers.

        A string is text of the template. An integer i is the place of the content of message i.
        """
        messages = [{"role": role, "content": make_anchor(i)} for i, role in enumerate(roles)]
        try:
            texts = ANCHOR.split(self.render(messages))
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template refuses messages of roles {list(roles)}: {error}"
            ) from error
        # split() puts the matches of the pattern's group, the indices, at the odd places.
        message_indices = [int(index) for index in texts[1::2]]
        pieces: list[str | int] = list(texts)
        pieces[1::2] = message_indices
        if sorted(message_indices) != list(range(len(roles))):
            raise TemplateUnsupported(
                f"the chat template does not render every message of roles {list(roles)} once"
            )
        return [piece for piece in pieces if piece != ""]

    def render_generation_prompt(self) -> str:
        """Return the text after the last user content, which opens the assistant's turn."""
        return self.render([{"role": "user", "content": make_anchor(0)}]).rpartition(
            make_anchor(0)
        )[2]

    def render_between_turns(self) -> tuple[str, str]:
        """Return the template text before and after a user content that follows an assistant turn.

        The second ends with the generation prompt. Raises ``TemplateUnsupported`` if the template
        cannot render a user turn after an assistant turn.
        """
        turns = [("user", make_anchor(0)), ("assistant", make_anchor(1)), ("user", make_anchor(2))]
        try:
            text = self.render([{"role": role, "content": content} for role, content in turns])
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template cannot continue after an assistant turn ({error}); "
                "fix: env.history=window"
            ) from error
        _, has_assistant_turn, tail = text.rpartition(make_anchor(1))
        text_before, has_user_turn, text_after = tail.rpartition(make_anchor(2))
        if not has_assistant_turn or not has_user_turn:
            raise TemplateUnsupported(
                "the chat template does not keep an earlier assistant turn before the next user "
                "turn; fix: env.history=window"
            )
        return text_before, text_after

    def render_turn_end(self) -> str:
        """Return the text after an assistant's content, up to the next user content or the end."""
        with contextlib.suppress(TemplateUnsupported):
            return self.render_between_turns()[0]
        with contextlib.suppress(TemplateUnsupported):
            return self.render_closing()
        return ""

    def render_closing(self) -> str:
        """Return the text after the content of a last assistant turn.

        Raises:
            TemplateUnsupported: The template does not render such a turn.
        """
        turns = [("user", make_anchor(0)), ("assistant", make_anchor(1))]
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.render(messages, add_generation_prompt=False)
        except RENDER_ERRORS as error:
            raise TemplateUnsupported(
                f"the chat template refuses assistant turns: {error}"
            ) from error
        _, has_assistant_turn, closing_text = text.rpartition(make_anchor(1))
        if not has_assistant_turn:
            raise TemplateUnsupported("the chat template does not render an assistant turn")
        return closing_text

    def _detect_parts(self) -> bool:
        # Try strings first: they are simpler for a template that accepts both.
        for uses_parts in (False, True):
            if self._renders_once([("user", make_anchor(0))], uses_parts):
                return uses_parts
        raise TemplateUnsupported(
            "the chat template does not render a user message exactly once, so it cannot be used; "
            "fix: set another chat template"
        )

    def _renders_once(self, turns: list[tuple[str, str]], parts: bool) -> bool:
        messages = [{"role": role, "content": content} for role, content in turns]
        try:
            text = self.render(messages, parts)
        except RENDER_ERRORS:
            return False
        return all(text.count(content) == 1 for _, content in turns)


# ---- tokens that end a turn; all code that samples or reads model output uses the same set -------


def find_end_ids(tokenizer: Any, model_path: str | Path | None = None) -> frozenset[int]:
    """Return the ids that end a turn when they are sampled.

    They are the ends of turn of the chat template (``find_template_end_ids``), the tokenizer's end
    of sequence, and those of the generation config in ``model_path``. The default is the directory
    of the tokenizer.
    """
    path = getattr(tokenizer, "name_or_path", "") if model_path is None else model_path
    ids = set(read_config_end_ids(path)) if path else set()
    ids.update(_collect_ids(getattr(tokenizer, "eos_token_id", None)))
    with contextlib.suppress(TemplateUnsupported):
        ids.update(find_template_end_ids(tokenizer, ChatTemplate(tokenizer)))
    return frozenset(ids)


def find_template_end_ids(tokenizer: Any, template: ChatTemplate) -> frozenset[int]:
    """Return the ids with which ``template`` ends a text answer and a turn of tool calls.

    Examples: ``<|im_end|>`` for both (Qwen), ``<|return|>`` and ``<|call|>`` (gpt-oss),
    ``<|user|>`` and ``<|observation|>`` (GLM). Empty if plain text ends a turn.
    """
    end_id = find_sampled_end(tokenizer, template)[1]
    ids = set() if end_id is None else {end_id}
    for arguments in (CALL_ARGUMENTS, json.dumps(CALL_ARGUMENTS)):
        with contextlib.suppress(*RENDER_ERRORS):
            ids.update(_find_call_end_id(tokenizer, template, arguments, end_id))
            break
    return frozenset(ids)


def find_sampled_end(tokenizer: Any, template: ChatTemplate) -> tuple[str, int | None]:
    """Return the text and the id of the control token with which the policy ends a text answer.

    It is the one after the last turn of a conversation. Some templates write another one there
    than in the history (gpt-oss: ``<|return|>``, later ``<|end|>``). The one in the history is
    returned if the template writes none after the last turn.
    """
    turn_end = ""
    with contextlib.suppress(TemplateUnsupported):
        turn_end = template.render_closing()
    end_id = find_end_of_turn_id(tokenizer, turn_end)
    if end_id is None:
        turn_end = template.render_turn_end()
        end_id = find_end_of_turn_id(tokenizer, turn_end)
    return ChatTokens(tokenizer, turn_end).find_leading_control_text(turn_end), end_id


def find_end_of_turn_id(tokenizer: Any, turn_end: str) -> int | None:
    """Return the control token at the start of ``turn_end``; None if plain text ends a turn."""
    tokens = ChatTokens(tokenizer, turn_end)
    closing = tokens.find_leading_control_text(turn_end)
    control_ids = [token for token in tokens.encode(closing) if token in tokens.control_ids]
    return control_ids[0] if control_ids else None


def make_tool_call(name: str, arguments: Any, call_id: str = "call00001") -> dict[str, Any]:
    """Return one call in OpenAI's format. The id has nine letters, as Mistral's templates need."""
    return {
        "id": call_id,
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }


def _find_call_end_id(
    tokenizer: Any, template: ChatTemplate, arguments: Any, end_id: int | None
) -> list[int]:
    """Return the control token between the calls of a turn and their results, as a list.

    It is empty if ``end_id``, which ends a text answer, also ends the calls. Tokens that the
    template writes between two calls of one turn belong to the calls and do not end the turn.
    """
    question: Message = {"role": "user", "content": make_anchor(0)}
    calls = [make_tool_call(make_anchor(number), arguments) for number in (2, 3)]
    result = {"role": "tool", "name": make_anchor(2), "tool_call_id": calls[0]["id"]}

    def render_after_value(calls: list[dict[str, Any]]) -> str:
        turn = {"role": "assistant", "content": "", "tool_calls": calls}
        messages = [question, turn, {**result, "content": make_anchor(1)}]
        tools = [describe_tool(make_anchor(number), [CALL_KEY]) for number in (2, 3)]
        text = template.render(messages, tools=tools).rpartition(make_anchor(0))[2]
        return text.partition(CALL_VALUE)[2].partition(make_anchor(1))[0]

    after_call = render_after_value(calls[:1])
    tokens = ChatTokens(tokenizer, after_call)
    written_ids = [token for token in tokens.encode(after_call) if token in tokens.control_ids]
    if end_id in written_ids:
        return []
    try:
        between_text, has_second_call, _ = render_after_value(calls).partition(make_anchor(3))
    except RENDER_ERRORS:
        between_text, has_second_call = "", ""  # the template allows one call per turn
    between_ids = set(tokens.encode(between_text)) if has_second_call else set()
    return [token for token in written_ids if token not in between_ids][:1]


def describe_tool(name: str, keys: Sequence[str]) -> dict[str, Any]:
    """Return the JSON schema of a function with the text arguments ``keys``."""
    properties = {key: {"type": "string", "description": key} for key in keys}
    parameters = {"type": "object", "properties": properties, "required": list(keys)}
    function = {"name": name, "description": name, "parameters": parameters}
    return {"type": "function", "function": function}


def read_config_end_ids(model_path: str | Path) -> frozenset[int]:
    """Return ``eos_token_id`` of the generation config, else the config, in ``model_path``."""
    for name in ("generation_config.json", "config.json"):
        file = Path(model_path) / name
        if file.is_file():
            config = json.loads(file.read_text(encoding="utf-8"))
            return frozenset(_collect_ids(config.get("eos_token_id")))
    return frozenset()


def _collect_ids(value: object) -> list[int]:
    values = value if isinstance(value, list) else [value]
    return [token_id for token_id in values if isinstance(token_id, int)]
