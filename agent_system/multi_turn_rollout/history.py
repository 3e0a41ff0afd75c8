"""History: conversion of observations and turns to the messages that the policy answers.

``append`` and ``chat``: one conversation for the whole trajectory. With ``append`` earlier turns
are not encoded again. With ``chat`` the model's template renders all messages in every turn.
``window``: every turn has a separate conversation, with a prompt that shows the last turns.

If no further turn fits into a row, a summary of the earlier turns can begin a new row
(``env.compact``):

    row 0   [system task] TURN 0 [observation 1] TURN 1 [instruction] SUMMARY
    row 1   [system, task + introduction + summary + observation 2] TURN 2 ...

Environment texts enter prompts as plain text: tags and control tokens in them have no effect.
"""

import math
from dataclasses import replace

from agent_system.environments.env import (
    TOOL_RESULTS,
    Observation,
    Prompts,
    TemplateToolPrompts,
    select_prompts,
)
from agent_system.memory import WindowMemory
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import Turn
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import append_user_text
from agent_system.tokens.dialogues import Dialogue, EpisodeDialogues, list_tool_calls
from agent_system.tokens.ledger import TokenLedger
from verl.config.schema.env import EnvCompaction
from verl.utils.chat_template import Message, Tools


class History:
    """Conversation of one trajectory, turn by turn: ``append`` or ``chat``.

    With ``chat``, tools are rendered by the template if it writes calls in a known format and the
    prompts do not ask for thinking levels. Results of calls are then messages of the role ``tool``.
    """

    def __init__(self, settings: RolloutSettings, bridge: ChatBridge, prompts: Prompts) -> None:
        self._settings = settings
        self._bridge = bridge
        self._prompts = prompts
        limits = settings.token_limits
        if settings.compact is not None:
            limits = replace(limits, reserved=count_max_summary_tokens(bridge, settings.compact))
        self._dialogues = EpisodeDialogues(bridge, limits, settings.history)
        self._messages: list[Message] = []
        self._first_messages: list[Message] = []
        self._tools: Tools = ()
        # None unless the template renders the tools.
        self._tool_prompts: TemplateToolPrompts | None = None
        self._dialogue: Dialogue | None = None

    @property
    def ledgers(self) -> list[TokenLedger]:
        return self._dialogues.ledgers

    def open_turn(self, observation: Observation, step: int) -> Dialogue | None:
        """Return the dialogue in which turn ``step`` is sampled; None beyond the token limits."""
        tool_results = observation.info.get(TOOL_RESULTS) or []
        observation = self._escape_added_tokens(observation)
        if not self._messages:
            first_prompt = self._prompts.first(observation, self._settings.requests_levels)
            self._messages = self._begin_messages(observation, first_prompt)
            self._move_tools_to_template(observation)
            self._first_messages = list(self._messages)
            messages = self._first_messages
        elif self._dialogue is None:  # the row begins with a summary
            messages = _extend_last_message(self._messages, self._prompts.turn(observation))
        else:
            messages = self._messages + self._make_observation_messages(observation, tool_results)
        dialogue = self._dialogues.open_dialogue(messages, step, self._tools)
        if dialogue is not None:
            self._messages, self._dialogue = list(messages), dialogue
        return dialogue

    def read_reply(self, turn: Turn) -> str:
        """Return the text of ``turn`` in which the environment finds the action.

        If the template renders the tools, calls are converted to the format of the environment.
        """
        if self._tool_prompts is None or self._dialogue is None:
            return turn.response
        message = self._dialogue.answers[-1].message
        functions = [call["function"] for call in list_tool_calls(message)]
        if not functions:
            return message["content"]
        return "\n".join(
            self._tool_prompts.format_call(function["name"], function["arguments"])
            for function in functions
        )

    def close_turn(self, turn: Turn) -> None:
        """Add ``turn``, which the environment has answered, to the history."""
        self._messages.append({"role": "assistant", "content": turn.response})

    def open_summary(self, compaction: EnvCompaction, step: int) -> Dialogue | None:
        """Return the dialogue that asks for a summary of the turns before turn ``step``.

        Return None if the summary would exceed the token limits. Only the maximum length of a row
        limits it: the prompt may exceed ``data.max_prompt_length``, and the response
        ``data.max_response_length``.
        """
        limits = self._settings.token_limits
        summary_limits = replace(
            limits,
            max_prompt=math.inf,
            max_response=math.inf,
            max_total=limits.max_prompt + limits.max_response,
            max_turn=compaction.max_summary_tokens,
        )
        instruction: Message = {"role": "user", "content": compaction.instruction}
        return self._dialogues.open_dialogue(
            [*self._messages, instruction], step, self._tools, summary_limits
        )

    def replace_turns(self, compaction: EnvCompaction, summary: str) -> None:
        """Replace all turns so far by the text ``summary``."""
        # The policy may have copied text of the environment, so added tokens in it are escaped.
        text = f"{compaction.introduction}\n{self._bridge.escape_added_tokens(summary)}"
        self._messages = _extend_last_message(self._first_messages, text)
        self._dialogue = None

    def _escape_added_tokens(self, observation: Observation) -> Observation:
        """Escape control tokens and tags in the texts, so that they are encoded as plain text."""
        escape_tokens = self._bridge.escape_added_tokens
        info = observation.info
        if info.get("admissible_actions"):
            info = {**info, "admissible_actions": [*map(escape_tokens, info["admissible_actions"])]}
        opening_messages = [
            {**m, "content": escape_tokens(m["content"])} for m in observation.opening
        ]
        return replace(
            observation, text=escape_tokens(observation.text), info=info, opening=opening_messages
        )

    def _begin_messages(self, first_observation: Observation, user_text: str) -> list[Message]:
        opening_messages: list[Message] = list(first_observation.opening)
        system_text = select_prompts(self._prompts, first_observation).system(
            self._settings.requests_levels
        )
        if not opening_messages and system_text is not None:
            opening_messages = [{"role": "system", "content": system_text}]
        return append_user_text(opening_messages, user_text)

    def _move_tools_to_template(self, first_observation: Observation) -> None:
        """Let the chat template render the tools, and remove them from the system message."""
        prompts = select_prompts(self._prompts, first_observation)
        if self._settings.requests_levels or not isinstance(prompts, TemplateToolPrompts):
            return
        if self._dialogues.tool_format is None:
            return
        self._tool_prompts = prompts
        self._tools = prompts.list_tools()
        system_with_tools = prompts.system(levels=False) or ""
        system_without_tools = prompts.build_system_without_tools()
        # The first text of a task comes from the environment. Texts of special tokens in it may be
        # escaped, so both forms are searched.
        for text in (system_with_tools, self._bridge.escape_added_tokens(system_with_tools)):
            for message in self._messages:
                message["content"] = message["content"].replace(text, system_without_tools)

    def _make_observation_messages(
        self, observation: Observation, tool_results: list[Message]
    ) -> list[Message]:
        """Return the messages that answer the last turn: results of its tool calls, or a text."""
        assert self._dialogue is not None  # only the first turn has no answer before it
        tool_calls = self._dialogue.answers[-1].message.get("tool_calls", [])
        if self._tool_prompts is None or not tool_calls or len(tool_calls) != len(tool_results):
            return [{"role": "user", "content": self._prompts.turn(observation)}]
        escape_tokens = self._bridge.escape_added_tokens
        return [
            {
                "role": "tool",
                "tool_call_id": call["id"],
                "name": call["function"]["name"],
                "content": escape_tokens(result["content"]),
            }
            for call, result in zip(tool_calls, tool_results, strict=True)
        ]


class WindowHistory(History):
    """History that renders a new prompt with the last turns in every turn, without summaries."""

    def __init__(self, settings: RolloutSettings, bridge: ChatBridge, prompts: Prompts) -> None:
        super().__init__(settings, bridge, prompts)
        self._memory = WindowMemory(settings.history_length)
        self._first_observation: Observation | None = None

    def open_turn(self, observation: Observation, step: int) -> Dialogue | None:
        observation = self._escape_added_tokens(observation)
        if self._first_observation is None:
            self._first_observation = observation
        requests_levels = self._settings.requests_levels
        turns = self._memory.stored_turns()
        user_text = self._prompts.window(
            self._first_observation, turns, observation, requests_levels
        )
        return self._dialogues.open_dialogue(
            self._begin_messages(self._first_observation, user_text), step
        )

    def close_turn(self, turn: Turn) -> None:
        escape_tokens = self._bridge.escape_added_tokens
        self._memory.add(escape_tokens(turn.observation), escape_tokens(turn.action))


def count_max_summary_tokens(bridge: ChatBridge, compaction: EnvCompaction) -> int:
    """Return the largest number of tokens that a summary and the request for it add to a row."""
    question: Message = {"role": "user", "content": "?"}
    instruction: Message = {"role": "user", "content": compaction.instruction}
    messages = [question, {"role": "assistant", "content": "!"}, instruction]
    num_first_message_tokens = len(bridge.encode(bridge.render_with_token_marks(messages[:1])))
    num_all_tokens = len(bridge.encode(bridge.render_with_token_marks(messages)))
    return num_all_tokens - num_first_message_tokens + compaction.max_summary_tokens


def _extend_last_message(messages: list[Message], text: str) -> list[Message]:
    """Return ``messages`` with ``text`` as a further paragraph of the last one."""
    *earlier_messages, last_message = messages
    return [*earlier_messages, {**last_message, "content": f"{last_message['content']}\n\n{text}"}]


def make_history(settings: RolloutSettings, bridge: ChatBridge, prompts: Prompts) -> History:
    """Return the ``History`` of one trajectory, which builds the prompts of its turns."""
    history_class = WindowHistory if settings.history == "window" else History
    return history_class(settings, bridge, prompts)
