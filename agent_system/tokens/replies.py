"""Messages of sampled replies: thought, text and tool calls, as the chat template expects them.

    sampled   <think>\\nhm\\n</think>\\n\\n<tool_call>{"name": "look", ...}</tool_call><|im_end|>
    message   {"role": "assistant", "reasoning_content": "hm", "content": "",
               "tool_calls": [{"function": {"name": "look", ...}}]}

A reply can be parsed in several ways. The reader uses the message that the template renders to
exactly the sampled text.
"""

import contextlib
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.python_calls import rewrite_python_calls
from agent_system.tokens.reply_formats import REPLY_FORMATS, TAGGED_CONTENT
from verl.utils.chat_template import (
    RENDER_ERRORS,
    Message,
    Tools,
    describe_tool,
    is_encodable_json,
    make_tool_call,
)

THINK, END_THINK = "<think>", "</think>"
# Keys in which chat templates expect a thought.
THOUGHT_KEYS = ("reasoning_content", "reasoning", "thinking")
# Text that marks the start of a reply. The parser of transformers gets it in place of the prompt.
START = "xSTARTx"
SAMPLE_TOOL = "xTOOLx"
SAMPLE_ARGUMENTS = {"xPLACEx": "xVALUEx", "xFORMATx": "two words"}
SAMPLE_TOOLS = [describe_tool(SAMPLE_TOOL, list(SAMPLE_ARGUMENTS))]
SAMPLE_RESULT = "xRESULTx"


class ReplyReader:
    """Reader of sampled replies for the chat template of ``bridge``.

    ``tool_format`` is the name of the format in which the template writes calls. It is a name of
    ``REPLY_FORMATS``, or ``response_template`` for the format in the files of the tokenizer. It is
    None if the template renders no tools, or writes calls in no known format.
    """

    def __init__(self, bridge: ChatBridge) -> None:
        self._bridge = bridge
        end_texts = [bridge.decode_exactly([token]) for token in sorted(bridge.end_ids)]
        self._ends = "|".join(map(re.escape, filter(None, end_texts))) or "(?!)"
        self._arguments_are_text = False

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of sampled tokens, with all special tokens."""
        return self._bridge.decode_exactly(token_ids)

    @cached_property
    def tool_format(self) -> str | None:
        return next(
            (name for name in self._templates_by_format if self._can_parse_calls(name)), None
        )

    @cached_property
    def thought_opening_tag(self) -> str:
        """Tag at the end of the generation prompt that opens a thought, with its white space."""
        prompt = self._bridge.template.render_generation_prompt()
        return prompt[prompt.rindex(THINK) :] if prompt.rstrip().endswith(THINK) else ""

    def parse_reply(
        self, messages: Sequence[Message], prompt: str, reply: str, tools: Tools = ()
    ) -> Message:
        """Return the assistant message of ``reply``, the text of all sampled tokens.

        ``messages`` are those that the reply answers. ``prompt`` is their text as rendered by
        ``ChatBridge.render_with_token_marks``. Tool calls are read only if there are ``tools``.
        """
        prompt_text = self._bridge.restore_text(prompt)
        text = re.sub(rf"(?:{self._ends})+\Z", "", reply)
        whole: Message = {"role": "assistant", "content": self.thought_opening_tag + text}
        candidates = [
            *self._parse_in_family_format(reply, tools),
            *self._split_thought(whole["content"]),
        ]
        # A call may be written in another way than the template writes it. Then no message is
        # rendered as the sampled text, and the next prompt begins a new row.
        for message in candidates:
            if message.get("tool_calls") and self._render(messages, message, tools):
                return message
        candidates = [message for message in candidates if not message.get("tool_calls")]
        shown: list[Message] = []
        # A template may write white space between the generation prompt and the content.
        stripped: Message = {**whole, "content": whole["content"].strip()}
        for message in [*candidates, whole, stripped]:
            rendered = self._render(messages, message, tools)
            if rendered.startswith(prompt_text + text):
                return message
            thoughts = [message[key] for key in THOUGHT_KEYS if key in message]
            if all(part.strip() in rendered for part in [*thoughts, message["content"]]):
                shown.append(message)
        # No message is rendered as the sampled text, for example because white space differs.
        return [*(m for m in shown if m in candidates), whole][0]

    def _render(self, messages: Sequence[Message], message: Message, tools: Tools) -> str:
        try:
            marked = self._bridge.render_with_token_marks(
                [*messages, message], tools, add_generation_prompt=False
            )
        except RENDER_ERRORS:
            return ""
        return self._bridge.restore_text(marked)

    def _split_thought(self, text: str) -> Iterator[Message]:
        """Split a reply that begins with a thought in ``<think>`` tags into thought and content.

        Yield one message for each key that the chat template may use for thoughts.
        """
        if not text.lstrip().startswith(THINK) or END_THINK not in text:
            return
        thought, _, answer = text.partition(THINK)[2].partition(END_THINK)
        template_text = str(getattr(self._bridge.tokenizer, "chat_template", ""))
        for key in THOUGHT_KEYS:
            if key in template_text:
                yield {
                    "role": "assistant",
                    key: thought.strip("\n"),
                    "content": answer.lstrip("\n"),
                }

    # ---- reply formats of model families ----

    @cached_property
    def _templates_by_format(self) -> dict[str, dict[str, Any]]:
        """Response templates (formats of replies) by name.

        The format in the files of the tokenizer is the first, if there is one.
        """
        file_format = getattr(self._bridge.tokenizer, "response_template", None)
        specs = {"response_template": file_format} if isinstance(file_format, dict) else {}
        return specs | {name: {"fields": fields} for name, fields in REPLY_FORMATS.items()}

    def _parse_in_family_format(self, reply: str, tools: Tools) -> Iterator[Message]:
        """Parse ``reply`` in the format of the model's family.

        Yield the message if it has tool calls or a thought, or if tags enclosed its content.
        """
        for name in [self.tool_format] if self.tool_format else ["response_template", "harmony"]:
            if name not in self._templates_by_format:
                continue
            message = self._parse(name, reply, tools)
            if message is None or (message.get("tool_calls") and not tools):
                continue
            # Use the message only if it has tool calls or a thought, or if tags enclosed its
            # content.
            if len(message) > 2 or (name in TAGGED_CONTENT and message["content"]):
                yield message

    def _parse(self, format_name: str, reply: str, tools: Tools) -> Message | None:
        """Return the message of ``reply`` in the format ``format_name``; None if it is
        malformed."""
        from transformers.utils.chat_parsing import parse_response

        if (
            format_name != "response_template"
        ):  # built-in formats do not match the tokens that end a turn
            reply = re.sub(rf"(?:(?:{self._ends})\s*)+\Z", "", reply)
        if format_name == "lfm2":
            reply = rewrite_python_calls(reply)
        spec = dict(self._templates_by_format[format_name])
        spec.pop("start_anchor_pattern", None)
        spec["start_anchor"] = START
        try:
            parsed = parse_response(
                reply, spec, prefix=START + self.thought_opening_tag, tools=list(tools) or None
            )
        except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
            return None
        content = parsed.get("content") or ""
        if format_name != "response_template":
            content = content.strip()
        message: Message = {"role": "assistant", "content": content}
        message |= {key: parsed[key] for key in THOUGHT_KEYS if parsed.get(key)}
        calls = [
            self._format_call(call, n) for n, call in enumerate(parsed.get("tool_calls") or [])
        ]
        if None in calls:
            return None
        return message | ({"tool_calls": calls} if calls else {})

    def format_tool_calls(self, calls: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return tool ``calls``, whose arguments are dicts, as the template needs them.

        Some templates need JSON text. Without a ``tool_format`` the calls are returned unchanged.
        """
        if self.tool_format is None:
            return list(calls)
        return [
            make_tool_call(
                call["function"]["name"],
                self._convert_arguments(call["function"]["arguments"]),
                call["id"],
            )
            for call in calls
        ]

    def _convert_arguments(self, arguments: dict[str, Any]) -> dict[str, Any] | str:
        return json.dumps(arguments) if self._arguments_are_text else arguments

    def _format_call(self, call: Any, number: int) -> dict[str, Any] | None:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        if not is_encodable_json([name, arguments]):
            return None
        return make_tool_call(name, self._convert_arguments(arguments), f"call{number:05d}")

    def _can_parse_calls(self, format_name: str) -> bool:
        """Return True if the format ``format_name`` parses a sample tool call that the template
        writes.

        The template must also render the tools and the result of the call.
        """
        for as_text in (False, True):
            arguments = json.dumps(SAMPLE_ARGUMENTS) if as_text else SAMPLE_ARGUMENTS
            with contextlib.suppress(*RENDER_ERRORS):
                reply = self._render_sample_call(make_tool_call(SAMPLE_TOOL, arguments))
                parsed = None if reply is None else self._parse(format_name, reply, SAMPLE_TOOLS)
                calls = [] if parsed is None else parsed.get("tool_calls", [])
                functions = [call["function"] for call in calls]
                if functions == [{"name": SAMPLE_TOOL, "arguments": SAMPLE_ARGUMENTS}]:
                    self._arguments_are_text = as_text
                    return True
        return False

    def _render_sample_call(self, call: dict[str, Any]) -> str | None:
        """Return the text that the template writes for an assistant message with the tool ``call``.

        Return None if the template does not show the tools or the result of a call.
        """
        render = self._bridge.template.render
        question: Message = {"role": "user", "content": "Hello."}
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        result: Message = {"role": "tool", "tool_call_id": call["id"], "name": SAMPLE_TOOL}
        messages = [question, turn, {**result, "content": SAMPLE_RESULT}]
        shows_result = SAMPLE_RESULT in render(messages, tools=SAMPLE_TOOLS)
        prompt = render([question], tools=SAMPLE_TOOLS)
        text = render([question, turn], add_generation_prompt=False, tools=SAMPLE_TOOLS)
        # Without a thought, a template may write a turn that does not begin with its prompt.
        opening = prompt.removesuffix(self.thought_opening_tag).rstrip("\n")
        if not shows_result or SAMPLE_TOOL not in prompt or not text.startswith(opening):
            return None
        return text[len(prompt if text.startswith(prompt) else opening) :]


@lru_cache(maxsize=4)
def get_reply_reader(bridge: ChatBridge) -> ReplyReader:
    """Return the reader of ``bridge``. It is made once, because it tries all formats of calls."""
    return ReplyReader(bridge)
