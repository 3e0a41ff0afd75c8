"""History: conversion of observations and turns to the conversation that the policy gets.

``append``: one conversation for the whole trajectory. Earlier turns are not encoded again.
``window``: every turn has a separate conversation, with a prompt that shows the last turns.

Environment texts enter prompts as plain text (``ChatBridge.escape_added_tokens``): tags and control
tokens in them have no effect. ``agent_system.tokens.conversation`` encodes the texts and checks the
token limits.
"""

from dataclasses import replace

from agent_system.environments.env import Observation
from agent_system.environments.prompts import Prompts, select_prompts
from agent_system.memory import WindowMemory
from agent_system.multi_turn_rollout.rollout_settings import RolloutSettings
from agent_system.multi_turn_rollout.trajectory import Turn
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation, append_user_text
from agent_system.tokens.ledger import TokenLedger
from verl.utils.chat_template import Message


class History:
    """Conversations of one trajectory, turn by turn.

    ``shown_messages`` contains the messages of the last conversation except the replies: those
    before its first turn, then one before each later turn.
    """

    def __init__(self, settings: RolloutSettings, bridge: ChatBridge, prompts: Prompts) -> None:
        self.ledgers: list[TokenLedger] = []
        self.shown_messages: list[Message] = []
        self._settings = settings
        self._bridge = bridge
        self._prompts = prompts

    def open_turn(self, observation: Observation, step: int) -> TokenConversation | None:
        """Return the conversation that turn ``step`` continues.

        Return None if the turn would exceed the token limits.
        """
        raise NotImplementedError

    def close_turn(self, turn: Turn) -> None:
        """Add a turn that the environment has answered to the history.

        The default does nothing: the conversation already contains the turn.
        """

    def _escape_added_tokens(self, observation: Observation) -> Observation:
        """Return ``observation`` with the added tokens in all its texts escaped."""
        escape_tokens = self._bridge.escape_added_tokens
        info = observation.info
        if info.get("admissible_actions"):
            info = {**info, "admissible_actions": [*map(escape_tokens, info["admissible_actions"])]}
        opening = [{**m, "content": escape_tokens(m["content"])} for m in observation.opening]
        return replace(
            observation, text=escape_tokens(observation.text), info=info, opening=opening
        )

    def _begin_conversation(
        self, first: Observation, user_text: str, step: int
    ) -> TokenConversation | None:
        opening = list(first.opening)
        system = select_prompts(self._prompts, first).system(self._settings.requests_levels)
        if not opening and system is not None:
            opening = [{"role": "system", "content": system}]
        conversation = TokenConversation(self._bridge, self._settings.token_limits, opening)
        # Check the limits before adding the ledger: every ledger becomes a row of the batch.
        if not conversation.add_observation(user_text, step):
            return None
        self.ledgers.append(conversation.ledger)
        self.shown_messages[:] = append_user_text(opening, user_text)
        return conversation


class AppendHistory(History):
    """History as one growing conversation for the whole trajectory."""

    _conversation: TokenConversation | None = None

    def open_turn(self, observation: Observation, step: int) -> TokenConversation | None:
        observation = self._escape_added_tokens(observation)
        if self._conversation is None:
            first_prompt = self._prompts.first(observation, self._settings.requests_levels)
            self._conversation = self._begin_conversation(observation, first_prompt, step)
            return self._conversation
        user_text = self._prompts.turn(observation)
        if not self._conversation.add_observation(user_text, step):
            return None
        self.shown_messages.append({"role": "user", "content": user_text})
        return self._conversation


class WindowHistory(History):
    """History that renders a prompt with the last turns of the memory for every turn."""

    def __init__(self, settings: RolloutSettings, bridge: ChatBridge, prompts: Prompts) -> None:
        super().__init__(settings, bridge, prompts)
        self._memory = WindowMemory(settings.history_length)
        self._first_observation: Observation | None = None

    def open_turn(self, observation: Observation, step: int) -> TokenConversation | None:
        observation = self._escape_added_tokens(observation)
        if self._first_observation is None:
            self._first_observation = observation
        levels = self._settings.requests_levels
        turns = self._memory.stored_turns()
        user_text = self._prompts.window(self._first_observation, turns, observation, levels)
        return self._begin_conversation(self._first_observation, user_text, step)

    def close_turn(self, turn: Turn) -> None:
        escape_tokens = self._bridge.escape_added_tokens
        self._memory.add(escape_tokens(turn.observation), escape_tokens(turn.action))


def make_history(settings: RolloutSettings, bridge: ChatBridge, prompts: Prompts) -> History:
    """Return the ``append`` or ``window`` history, as ``settings.history`` requests."""
    history_class = {"append": AppendHistory, "window": WindowHistory}[settings.history]
    return history_class(settings, bridge, prompts)
