"""Conversations of one episode, and the assignment of their prompts to rows (token sequences).

Every turn answers a list of messages. ``env.history`` decides which row the turn belongs to:

    append   [system user REPLY user]   continues the row of [system user], token by token
    chat     the template over the messages continues a row if it begins with that row's tokens
    window   every prompt is a new row

In all other cases a new row is rendered from the messages. A reply is identified by its text, and
the row contains the tokens that were sampled for it. So each sampled token is in exactly one row,
after the prompt from which it was sampled.

    chat, thoughts removed      row 0   [system user] THOUGHT REPLY
                                row 1   [system user reply user] THOUGHT REPLY
"""

import itertools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from agent_system.tokens.bridge import ChatBridge, InterTurnTokens
from agent_system.tokens.conversation import SampledReply, TokenConversation, TokenLimits
from agent_system.tokens.ledger import Segment, TokenLedger
from agent_system.tokens.replies import ReplyReader, find_thought, get_reply_reader
from verl.names import History
from verl.utils.chat_template import (
    RENDER_ERRORS,
    THOUGHT_KEY,
    Message,
    Tools,
    UnsupportedTemplateError,
)
from verl.utils.sampling import StopReason

# A request with more than this many characters per allowed token is refused before tokenisation. It
# cannot fit, and encoding it would block all other trajectories of the collector.
MAX_CHARACTERS_PER_TOKEN = 64


@dataclass(frozen=True, slots=True)
class SampledReplyMessage:
    """A sampled reply to ``messages``.

    ``message`` is the reply as the chat template expects it. A client receives ``content`` and
    ``thought``. An assistant message of a later request is recognised as this reply by its content,
    which is one of ``quotable_texts``, or by ``content`` and ``thought``. An assistant message with
    tool calls must have the calls of ``message``, the same ``thought``, and ``content`` or a
    beginning of ``content``.
    """

    messages: list[Message]
    quotable_texts: tuple[str, ...]  # contents by which a later request can quote the reply
    message: Message
    content: str
    thought: str = ""

    def matches_message(self, message: Message) -> bool:
        if message["role"] != "assistant":
            return False
        content, thought = message["content"], message.get(THOUGHT_KEY, "")
        if content in self.quotable_texts and not thought and "tool_calls" not in message:
            return True
        # Compare JSON: in Python, True equals 1.
        calls_text, sampled_calls_text = (
            json.dumps(list_tool_calls(compared_message), sort_keys=True)
            for compared_message in (message, self.message)
        )
        has_content = content == self.content or (
            "tool_calls" in message and self.content.startswith(content)
        )
        return has_content and thought == self.thought and calls_text == sampled_calls_text


@dataclass(frozen=True, slots=True)
class _PendingMessages:
    """Messages of a dialogue that the policy has not answered yet.

    ``messages`` are those of the caller. The prompt is rendered from ``prompt_messages``; ``shown``
    are the new ones among these. ``prompt`` is the rendered text, with marks for control tokens.
    ``prompt`` and ``tools`` are empty unless the history is ``chat``.
    """

    messages: list[Message]
    prompt_messages: list[Message]
    shown: list[Message]  # new messages among ``prompt_messages``
    prompt: str = ""
    tools: Tools = ()


class Dialogue:
    """One conversation, which becomes one row.

    ``ledger_index`` is the index of its token list in ``EpisodeDialogues.ledgers``.
    ``shown_messages`` are the messages before its first turn, then one message before each later
    turn that was sampled. ``is_pending`` is True until the reply to the last messages is added.
    ``last_prompt`` and ``last_reply`` are empty unless the history is ``chat``.
    """

    def __init__(
        self,
        conversation: TokenConversation,
        ledger_index: int,
        pending: _PendingMessages,
        reader: ReplyReader | None,
        call_numbers: Iterator[int],
    ) -> None:
        self.conversation = conversation
        self.ledger_index = ledger_index
        self.shown_messages: list[Message] = []
        self.answers: list[SampledReplyMessage] = []
        self.last_reply = ""
        self._reader = reader
        self._call_numbers = call_numbers
        self.set_pending_messages(pending)

    def set_pending_messages(self, pending: _PendingMessages) -> None:
        """Set the messages to answer next. Their tokens are already in the conversation."""
        self._pending = pending
        self._prompt_length = len(self.conversation.ledger)
        self.is_pending = True
        self._is_abandoned = False

    def abandon_reply(self) -> None:
        """Mark the pending reply as abandoned by its caller. An equal request may then get it."""
        self._is_abandoned = True

    def reclaim_abandoned_reply(self, messages: Sequence[Message], tools: Tools) -> bool:
        """Return True if the abandoned reply answers ``messages``; the caller then waits for it."""
        pending = self._pending
        is_same_request = list(messages) == pending.messages and list(tools) == list(pending.tools)
        is_reclaimed = self._is_abandoned and is_same_request
        self._is_abandoned = self._is_abandoned and not is_same_request
        return is_reclaimed

    @property
    def last_prompt(self) -> str:
        return self._pending.prompt

    @property
    def messages(self) -> list[Message]:
        """Messages to the policy: those before its first turn, then one before each later turn."""
        return self.shown_messages + (self._pending.shown if self.is_pending else [])

    def is_continued_by(self, messages: Sequence[Message]) -> bool:
        """Return True if ``messages`` are this dialogue, the last reply and one new message."""
        if self.is_pending or list(messages[:-2]) != self._pending.messages:
            return False
        return self.answers[-1].matches_message(messages[-2])

    def add_reply(
        self, sampled_reply: SampledReply, step: int, text: str, stop: tuple[str, ...] = ()
    ) -> Segment:
        """Add the sampled reply of turn ``step`` and return the added tokens as a segment.

        ``text`` is the whole reply, with a forced beginning. Later requests may quote all of it, or
        the part before the first of the ``stop`` strings.
        """
        pending = self._pending
        segment = self.conversation.add_turn(sampled_reply, step)
        text_before_stop = cut_at_stop(text, stop)
        content, thought = text_before_stop, ""
        message: Message = {"role": "assistant", "content": content}
        if self._reader is not None:
            reply_ids = self.conversation.ledger.token_ids[self._prompt_length :]
            self.last_reply = self._reader.decode(reply_ids)
            # A truncated reply has no tool calls, because the rest of a call may be missing.
            tools = () if sampled_reply.stop_reason is StopReason.LENGTH else pending.tools
            message = self._reader.parse_reply(
                pending.prompt_messages, pending.prompt, self.last_reply, tools, self._call_numbers
            )
            thought = find_thought(message) if self._reader.thought_keys else ""
            whole_reply = self._reader.thought_opening_tag + text
            # The client gets the unchanged text if parsing removed nothing, or if it removed a
            # thought that the client cannot send back in a later request.
            is_parsed = message["content"].strip() != whole_reply.strip()
            if "tool_calls" in message or (is_parsed and find_thought(message) == thought):
                content = cut_at_stop(message["content"], stop)
        thought = cut_at_stop(thought, stop)
        self.answers.append(
            SampledReplyMessage(
                pending.messages, (text_before_stop, text), message, content, thought
            )
        )
        self.shown_messages += pending.shown
        self.is_pending = False
        return segment


class EpisodeDialogues:
    """All conversations of one episode, with prompts according to ``history``.

    The ids of tool calls have the numbers ``call_numbers``. Raises ``UnsupportedTemplateError``
    where the chat template refuses the messages.
    """

    def __init__(
        self,
        bridge: ChatBridge,
        limits: TokenLimits,
        history: History,
        call_numbers: Iterator[int] | None = None,
    ) -> None:
        self.ledgers: list[TokenLedger] = []
        self.history = history
        self._bridge = bridge
        self._limits = limits
        self._dialogues: list[Dialogue] = []
        self._reader = get_reply_reader(bridge) if history == "chat" else None
        self._call_numbers = call_numbers or itertools.count()

    def __getitem__(self, number: int) -> Dialogue:
        return self._dialogues[number]

    @property
    def tool_format(self) -> str | None:
        """Name of the format in which the chat template writes tool calls.

        None if the format is unknown, if the template does not render the tools, or if the history
        is not ``chat``.
        """
        return None if self._reader is None else self._reader.tool_format

    @property
    def renders_thoughts(self) -> bool:
        """True if the chat template renders thoughts from a separate key (history ``chat``)."""
        return self._reader is not None and bool(self._reader.thought_keys)

    def open_dialogue(
        self,
        messages: list[Message],
        step: int,
        tools: Tools = (),
        limits: TokenLimits | None = None,
    ) -> Dialogue | None:
        """Return the conversation in which turn ``step`` answers ``messages``.

        Continue an earlier conversation if ``messages`` extend it, otherwise begin a new one. A
        conversation whose caller did not wait for its reply is used again for equal messages.
        Return None if a turn after ``messages`` would exceed ``limits``, by default those of the
        episode. The template renders ``tools`` (only with ``chat`` history).
        """
        limits = self._limits if limits is None else limits
        for dialogue in self._dialogues:
            if dialogue.reclaim_abandoned_reply(
                messages, tools if self._reader is not None else ()
            ):
                return dialogue
        if self._reader is not None:
            return self._open_rendered_dialogue(messages, step, tools, limits)
        candidates = self._dialogues if self.history == "append" else []
        dialogue = next(
            (candidate for candidate in candidates if candidate.is_continued_by(messages)),
            None,
        )
        if dialogue is None:
            conversation = TokenConversation(self._bridge, limits, messages[:-1])
            # Check before adding the ledger, because every ledger becomes a row of the batch.
            if not conversation.add_observation(messages[-1]["content"], step):
                return None
            return self._add_dialogue(conversation, _PendingMessages(messages, messages, messages))
        dialogue.conversation.limits = limits
        if not dialogue.conversation.add_observation(messages[-1]["content"], step):
            return None
        dialogue.set_pending_messages(_PendingMessages(messages, messages, messages[-1:]))
        return dialogue

    def open_request_dialogue(
        self, messages: list[Message], step: int, tools: Tools = ()
    ) -> Dialogue | None:
        """Return the conversation in which turn ``step`` answers the ``messages`` of a client.

        Return None if the messages exceed the token limits. Control tokens and tags in user
        messages and results of tool calls are escaped, because they may contain text of an
        environment.
        """
        max_tokens = min(
            self._limits.max_total, self._limits.max_prompt + self._limits.max_response
        )
        num_characters = sum(len(m["content"]) + len(m.get(THOUGHT_KEY, "")) for m in messages)
        num_characters += len(json.dumps([tools, *map(list_tool_calls, messages)]))
        if num_characters > MAX_CHARACTERS_PER_TOKEN * max_tokens:
            return None
        escaped_messages = [self._escape_observation(message) for message in messages]
        return self.open_dialogue(escaped_messages, step, tools)

    def _open_rendered_dialogue(
        self, messages: list[Message], step: int, tools: Tools, limits: TokenLimits
    ) -> Dialogue | None:
        """Render all ``messages`` with the template, and continue a row or begin a new one."""
        prompt_messages = self._bridge.merge_system_message(
            [self._restore_sampled_reply(messages, index) for index in range(len(messages))]
        )
        try:
            marked_prompt = self._bridge.render_with_token_marks(prompt_messages, tools)
        except RENDER_ERRORS as error:
            roles = [message["role"] for message in prompt_messages]
            raise UnsupportedTemplateError(
                f"the chat template refuses messages of roles {roles}: {error}"
            ) from error
        for dialogue in reversed(self._dialogues):
            inter_turn_tokens = self._compute_added_tokens(dialogue, messages, marked_prompt)
            dialogue.conversation.limits = limits
            # A row without space for the turn is not continued: the turn begins a new row.
            if inter_turn_tokens is not None and dialogue.conversation.add_inter_turn_tokens(
                inter_turn_tokens, step
            ):
                new_messages = _merge_new_messages(prompt_messages)
                dialogue.set_pending_messages(
                    _PendingMessages(messages, prompt_messages, new_messages, marked_prompt, tools)
                )
                return dialogue
        conversation = TokenConversation(self._bridge, limits)
        if not conversation.add_prompt(self._bridge.encode(marked_prompt), step):
            return None
        pending = _PendingMessages(messages, prompt_messages, prompt_messages, marked_prompt, tools)
        return self._add_dialogue(conversation, pending)

    def _compute_added_tokens(
        self, dialogue: Dialogue, messages: list[Message], marked_prompt: str
    ) -> InterTurnTokens | None:
        """Return the tokens that a new prompt adds to the row (token sequence) of ``dialogue``.

        ``marked_prompt`` is the rendered prompt, with marks in place of control tokens. Return None
        if the prompt does not begin with the tokens of the row.
        """
        if dialogue.is_pending:
            return None
        ledger = dialogue.conversation.ledger
        added_ids = self._bridge.compute_added_prompt_ids(
            ledger.token_ids, dialogue.last_prompt, dialogue.last_reply, marked_prompt
        )
        if not added_ids:
            return None
        # The tokens of ``append`` history separate the observation from template text. Use them
        # only if they equal ``added_ids``.
        try:
            inter_turn_tokens = self._bridge.make_inter_turn_tokens(
                ledger.all_segments[-1].ids, messages[-1]["content"]
            )
        except UnsupportedTemplateError:
            return InterTurnTokens(added_ids, (), ())
        return (
            inter_turn_tokens
            if inter_turn_tokens.all_ids == added_ids
            else InterTurnTokens(added_ids, (), ())
        )

    def _restore_sampled_reply(self, messages: list[Message], index: int) -> Message:
        """Return message ``index`` in the form that the chat template needs.

        If it quotes a reply that was sampled for the same messages, return the message that was
        parsed from the sampled tokens. Otherwise adapt its thought and the arguments of its tool
        calls to the template.
        """
        message = messages[index]
        if message["role"] != "assistant":
            return message
        for dialogue in self._dialogues:
            for answer in dialogue.answers:
                if (
                    len(answer.messages) == index
                    and answer.matches_message(message)
                    and answer.messages == messages[:index]
                ):
                    return answer.message
        if self._reader is None:
            return message
        adapted_message = {key: value for key, value in message.items() if key != THOUGHT_KEY}
        if THOUGHT_KEY in message and self._reader.thought_keys:
            adapted_message[self._reader.thought_keys[0]] = message[THOUGHT_KEY]
        if "tool_calls" in message:
            adapted_message["tool_calls"] = self._reader.format_tool_calls(list_tool_calls(message))
        return adapted_message

    def _add_dialogue(self, conversation: TokenConversation, pending: _PendingMessages) -> Dialogue:
        dialogue = Dialogue(
            conversation, len(self._dialogues), pending, self._reader, self._call_numbers
        )
        self.ledgers.append(conversation.ledger)
        self._dialogues.append(dialogue)
        return dialogue

    def _escape_observation(self, message: Message) -> Message:
        if message["role"] not in ("user", "tool"):
            return message
        return {**message, "content": self._bridge.escape_added_tokens(message["content"])}


def list_tool_calls(message: Message) -> list[dict[str, Any]]:
    """Return the tool calls of ``message``, with their arguments as a dict.

    Messages for some chat templates have the arguments as JSON text, which is parsed.
    """
    return [
        {
            **call,
            "function": {
                **call["function"],
                "arguments": _parse_arguments(call["function"]["arguments"]),
            },
        }
        for call in message.get("tool_calls", ())
    ]


def cut_at_stop(text: str, stop_strings: tuple[str, ...]) -> str:
    """Return ``text`` before the first stop string, as the OpenAI API does."""
    for stop in stop_strings:
        text = text.partition(stop)[0]
    return text


def _parse_arguments(arguments: str | dict[str, Any]) -> dict[str, Any]:
    return json.loads(arguments) if isinstance(arguments, str) else arguments


def _merge_new_messages(prompt_messages: list[Message]) -> list[Message]:
    """Return the messages after the last reply as one message, in a list."""
    last_reply_index = max(i for i, m in enumerate(prompt_messages) if m["role"] == "assistant")
    new_messages = prompt_messages[last_reply_index + 1 :]
    return [{**new_messages[0], "content": "\n".join(m["content"] for m in new_messages)}]
