"""Messages of sampled replies: thought, text and tool calls, as the chat template expects them.

    sampled   <think>\\nhm\\n</think>\\n\\n<tool_call>{"name": "look", ...}</tool_call><|im_end|>
    message   {"role": "assistant", "reasoning_content": "hm", "content": "",
               "tool_calls": [{"function": {"name": "look", ...}}]}

A reply can be parsed in several ways. The reader uses the message that the template renders to
exactly the sampled text.
"""

import contextlib
import itertools
import json
import re
from collections.abc import Iterator, Sequence
from functools import cached_property, lru_cache
from typing import Any

from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.reply_formats import (
    CALL_ID,
    CALL_IDS,
    CALL_REWRITERS,
    REPLY_FORMATS,
    TAGGED_CONTENT,
)
from verl.utils.chat_template import (
    RENDER_ERRORS,
    THOUGHT_KEY,
    THOUGHT_KEYS,
    Message,
    Tools,
    is_encodable_json,
    make_tool_call,
    make_tool_schema,
)

THINK, END_THINK = "<think>", "</think>"
# Keys in which chat templates expect a thought. Cohere's name is ``tool_plan``.
TEMPLATE_THOUGHT_KEYS = (*THOUGHT_KEYS, "tool_plan")
# Text that marks the start of a reply. The parser of transformers gets it in place of the prompt.
START = "xSTARTx"
# Parts of a sample conversation with a tool call. A template must render all of them.
SAMPLE_TOOL = "xTOOLx"
SAMPLE_ARGUMENTS = {"xPLACEx": "xVALUEx", "xFORMATx": "two words"}
SAMPLE_TOOLS = [make_tool_schema(SAMPLE_TOOL, list(SAMPLE_ARGUMENTS))]
SAMPLE_RESULT = "xRESULTx"
SAMPLE_THOUGHT = "xTHOUGHTx"
SAMPLE_QUESTION: Message = {"role": "user", "content": "Hello."}
# Formats of a template without tools.
FORMAT_NAMES_WITHOUT_TOOLS = ("response_template", *TAGGED_CONTENT)


class ReplyReader:
    """Reader of sampled replies for the chat template of ``bridge``.

    ``tool_format`` is the format in which the template writes calls: a name of ``REPLY_FORMATS``,
    or ``response_template`` for the format in the files of the tokenizer. It is None if the
    template renders no tools, or writes calls in no known format.
    """

    def __init__(self, bridge: ChatBridge) -> None:
        self._bridge = bridge
        end_texts = [bridge.decode_exactly([token]) for token in sorted(bridge.end_ids)]
        self._end_pattern = "|".join(map(re.escape, filter(None, end_texts))) or "(?!)"
        self._arguments_are_text = False

    def decode(self, token_ids: Sequence[int]) -> str:
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

    @cached_property
    def thought_keys(self) -> list[str]:
        """Message keys from which the template renders the thought of an answer or of a call."""
        turn: Message = {"role": "assistant", "content": "Hello."}
        call = make_tool_call(SAMPLE_TOOL, SAMPLE_ARGUMENTS)
        turns = [turn, {**turn, "tool_calls": self.format_tool_calls([call])}]
        return [
            key
            for key in TEMPLATE_THOUGHT_KEYS
            if any(
                SAMPLE_THOUGHT
                in self._render([SAMPLE_QUESTION], {**turn, key: SAMPLE_THOUGHT}, tools)
                for turn, tools in zip(turns, ((), SAMPLE_TOOLS), strict=True)
            )
        ]

    def parse_reply(
        self,
        messages: Sequence[Message],
        prompt: str,
        reply: str,
        tools: Tools = (),
        call_numbers: Iterator[int] | None = None,
    ) -> Message:
        """Return the assistant message of ``reply``, the text of all sampled tokens.

        ``messages`` are those that the reply answers, and ``prompt`` is their text by
        ``ChatBridge.render_with_token_marks``. Tool calls are read only if there are ``tools``.
        Calls without a sampled id get one with the next of ``call_numbers``.
        """
        text = re.sub(rf"(?:{self._end_pattern})+\Z", "", reply)
        expected_text = self._bridge.restore_control_tokens(prompt) + text
        unsplit_message: Message = {"role": "assistant", "content": self.thought_opening_tag + text}
        parsed_messages = [
            *self._parse_in_model_family_format(reply, tools),
            *self._split_thought(unsplit_message["content"]),
        ]
        used_ids = {call["id"] for m in messages for call in m.get("tool_calls", ())}
        id_format = CALL_IDS.get(self.tool_format or "", CALL_ID)
        parsed_calls = [m.get("tool_calls", []) for m in parsed_messages]
        function_names = {call["function"]["name"] for call in itertools.chain(*parsed_calls)}
        free_numbers = (
            number
            for number in call_numbers or itertools.count()
            if used_ids.isdisjoint(
                id_format.format(name=name, number=number) for name in function_names
            )
        )
        unused_numbers = list(
            itertools.islice(free_numbers, max(map(len, parsed_calls), default=0))
        )
        candidates = [
            message
            for parsed in parsed_messages
            for message_with_ids in _iterate_call_id_variants(
                parsed, used_ids, id_format, unused_numbers
            )
            for message in self._iterate_thought_key_variants(message_with_ids)
        ]
        # A call may be written in another way than the template writes it. Then no message is
        # rendered as the sampled text, and the next prompt begins a new row.
        messages_with_calls = [message for message in candidates if message.get("tool_calls")]
        messages_without_calls = [
            message for message in candidates if not message.get("tool_calls")
        ]
        # A template may write white space between the generation prompt and the content.
        messages_without_calls += [
            unsplit_message,
            {**unsplit_message, "content": unsplit_message["content"].strip()},
        ]
        return (
            self._choose_message(messages_with_calls, messages, expected_text, tools)
            or self._choose_message(messages_without_calls, messages, expected_text, tools)
            or unsplit_message
        )

    def _choose_message(
        self,
        candidates: Sequence[Message],
        messages: Sequence[Message],
        expected_text: str,
        tools: Tools,
    ) -> Message | None:
        """Return the best candidate after ``messages``, or None.

        ``candidates`` are forms of the same reply, with its thought in a key or in the content. The
        best one is the first that fulfils one of these conditions, in this order:

        1. The template renders it as ``expected_text``.
        2. Its thought has a key, and the template shows thought and content, for example with other
           white space.
        3. Its thought has a key, and the template shows only the content. Kimi's templates do so
           in every prompt. With the thought in the content, later prompts would differ from those
           on which the model was trained.
        4. Its thought is in the content, and the template shows thought and content.
        5. It has calls, and the template renders it.
        """
        completely_shown: list[Message] = []
        shown_without_thought: list[Message] = []
        rendered_call_messages: list[Message] = []
        for message in candidates:
            rendered = self._render(messages, message, tools)
            if rendered.startswith(expected_text):
                return message
            parts = [find_thought(message), message["content"]]
            if rendered and all(part.strip() in rendered for part in parts):
                completely_shown.append(message)
            elif rendered and parts[0] and self.thought_keys and parts[1].strip() in rendered:
                shown_without_thought.append(message)
            if rendered and message.get("tool_calls"):
                rendered_call_messages.append(message)
        shown_with_thought_key = [message for message in completely_shown if find_thought(message)]
        return next(
            iter(
                shown_with_thought_key
                + shown_without_thought
                + completely_shown
                + rendered_call_messages
            ),
            None,
        )

    def _render(self, messages: Sequence[Message], message: Message, tools: Tools) -> str:
        try:
            text_with_marks = self._bridge.render_with_token_marks(
                [*messages, message], tools, add_generation_prompt=False
            )
        except RENDER_ERRORS:
            return ""
        return self._bridge.restore_control_tokens(text_with_marks)

    def _split_thought(self, text: str) -> Iterator[Message]:
        """Split a reply that begins with a thought in ``<think>`` tags into thought and content.

        Yield nothing if the chat template has no key for thoughts.
        """
        if not text.lstrip().startswith(THINK) or END_THINK not in text or not self.thought_keys:
            return
        thought, _, answer = text.partition(THINK)[2].partition(END_THINK)
        parts = {THOUGHT_KEY: thought.strip("\n"), "content": answer.lstrip("\n")}
        yield {"role": "assistant", **parts}

    def _iterate_thought_key_variants(self, message: Message) -> Iterator[Message]:
        """Yield ``message`` with its thought in each key that the chat template reads."""
        keys = self.thought_keys if THOUGHT_KEY in message else []
        for key in keys or [THOUGHT_KEY]:
            yield {key if name == THOUGHT_KEY else name: value for name, value in message.items()}

    # ---- reply formats of model families ----

    @cached_property
    def _templates_by_format(self) -> dict[str, dict[str, Any]]:
        """Response templates by name, the one in the files of the tokenizer first."""
        file_format = getattr(self._bridge.tokenizer, "response_template", None)
        templates = {"response_template": file_format} if isinstance(file_format, dict) else {}
        return templates | {name: {"fields": fields} for name, fields in REPLY_FORMATS.items()}

    def _parse_in_model_family_format(self, reply: str, tools: Tools) -> Iterator[Message]:
        for name in [self.tool_format] if self.tool_format else FORMAT_NAMES_WITHOUT_TOOLS:
            if name not in self._templates_by_format:
                continue
            message = self._parse(name, reply, tools)
            if message is None or (message.get("tool_calls") and not tools):
                continue
            # Use the message only if it has tool calls or a thought, or if tags enclosed its
            # content.
            if len(message) > 2 or (name in TAGGED_CONTENT and message["content"]):
                yield message
            # A template without a key for thoughts may show them as a part of the content. Calls
            # in the thought are no calls.
            if not self.thought_keys and THOUGHT_KEY in message and "tool_calls" in message:
                inline_thought_message = self._parse(name, reply, tools, has_thought=False)
                if (
                    inline_thought_message is not None
                    and inline_thought_message.get("tool_calls") == message["tool_calls"]
                ):
                    yield inline_thought_message

    def _parse(
        self, format_name: str, reply: str, tools: Tools, has_thought: bool = True
    ) -> Message | None:
        """Return the message of ``reply`` in the format ``format_name``; None if it is malformed.

        Without ``has_thought`` a thought is read as a part of the content.
        """
        from transformers.utils.chat_parsing import parse_response

        # Built-in formats do not match the tokens that end a turn.
        if format_name != "response_template":
            reply = re.sub(rf"(?:(?:{self._end_pattern})\s*)+\Z", "", reply)
        if format_name in CALL_REWRITERS:
            # Calls in a thought are no calls.
            has_thought_first = (self.thought_opening_tag + reply).lstrip().startswith(THINK)
            parts = reply.partition(END_THINK) if has_thought_first else ("", "", reply)
            reply = "".join([*parts[:2], CALL_REWRITERS[format_name](parts[2])])
        spec = dict(self._templates_by_format[format_name])
        spec.pop("start_anchor_pattern", None)
        spec["start_anchor"] = START
        if not has_thought:
            spec["fields"] = {
                key: field for key, field in spec["fields"].items() if key not in THOUGHT_KEYS
            }
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
        thought = find_thought(parsed)
        message |= {THOUGHT_KEY: thought} if thought else {}
        # Some formats write lists of calls.
        parsed_calls = (
            calls if isinstance(calls, list) else [calls] for calls in parsed.get("tool_calls", ())
        )
        calls = [self._format_call(call) for call in itertools.chain(*parsed_calls)]
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
        # Templates write text of other languages without escapes, and so do policies.
        return json.dumps(arguments, ensure_ascii=False) if self._arguments_are_text else arguments

    def _format_call(self, call: Any) -> dict[str, Any] | None:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", {}) if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, dict):
            return None
        sampled_id = call.get("id") or ""
        if not isinstance(sampled_id, str) or not is_encodable_json([name, arguments, sampled_id]):
            return None
        return make_tool_call(name, self._convert_arguments(arguments), sampled_id)

    def _can_parse_calls(self, format_name: str) -> bool:
        """Return True if the format parses a sample tool call that the template writes."""
        call_id = CALL_IDS.get(format_name, CALL_ID).format(name=SAMPLE_TOOL, number=1)
        for are_arguments_text in (False, True):
            arguments = json.dumps(SAMPLE_ARGUMENTS) if are_arguments_text else SAMPLE_ARGUMENTS
            with contextlib.suppress(*RENDER_ERRORS):
                reply = self._render_sample_call(make_tool_call(SAMPLE_TOOL, arguments, call_id))
                parsed = None if reply is None else self._parse(format_name, reply, SAMPLE_TOOLS)
                calls = [] if parsed is None else parsed.get("tool_calls", [])
                functions = [call["function"] for call in calls]
                if functions == [{"name": SAMPLE_TOOL, "arguments": SAMPLE_ARGUMENTS}]:
                    self._arguments_are_text = are_arguments_text
                    return True
        return False

    def _render_sample_call(self, call: dict[str, Any]) -> str | None:
        """Return the text that the template writes for an assistant message with the tool ``call``.

        Return None if the template does not show the tools or the result of a call.
        """
        render = self._bridge.template.render
        turn: Message = {"role": "assistant", "content": "", "tool_calls": [call]}
        tool_message: Message = {"role": "tool", "tool_call_id": call["id"], "name": SAMPLE_TOOL}
        messages = [SAMPLE_QUESTION, turn, {**tool_message, "content": SAMPLE_RESULT}]
        shows_result = SAMPLE_RESULT in render(messages, tools=SAMPLE_TOOLS)
        prompt = render([SAMPLE_QUESTION], tools=SAMPLE_TOOLS)
        text = render([SAMPLE_QUESTION, turn], add_generation_prompt=False, tools=SAMPLE_TOOLS)
        # The generation prompt may open a thought. A template may omit this tag in a turn without a
        # thought, so compare with the prompt up to the tag.
        opening = prompt.removesuffix(self.thought_opening_tag).rstrip("\n")
        if not shows_result or SAMPLE_TOOL not in prompt or not text.startswith(opening):
            return None
        return text[len(prompt if text.startswith(prompt) else opening) :]


def find_thought(message: Message) -> str:
    """Return the thought of ``message``, whatever its key is; "" if there is none."""
    thoughts = (message.get(key) for key in TEMPLATE_THOUGHT_KEYS)
    return next((thought for thought in thoughts if thought and isinstance(thought, str)), "")


def _iterate_call_id_variants(
    message: Message, used_ids: set[str], id_format: str, unused_numbers: Sequence[int]
) -> Iterator[Message]:
    """Yield ``message`` with the sampled ids of its calls, and with ids of ``unused_numbers``.

    Sampled ids are used if all are different and none is in ``used_ids``. The template may still
    refuse them, for example because of their length.
    """
    calls = message.get("tool_calls", [])
    ids = {call["id"] for call in calls}
    if not calls or (all(ids) and len(ids) == len(calls) and ids.isdisjoint(used_ids)):
        yield message
    if calls:
        # There may be more numbers than calls: they suffice for the message with most calls.
        numbered_calls = [
            {**call, "id": id_format.format(name=call["function"]["name"], number=number)}
            for call, number in zip(calls, unused_numbers, strict=False)
        ]
        yield {**message, "tool_calls": numbered_calls}


@lru_cache(maxsize=4)
def get_reply_reader(bridge: ChatBridge) -> ReplyReader:
    return ReplyReader(bridge)
