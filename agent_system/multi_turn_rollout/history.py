"""History policies: which texts become the conversation that the policy continues.

``append``: one conversation for the whole trajectory; nothing is rendered or encoded again.
``window``: every turn gets a conversation of its own, with a prompt that shows the last turns.

What an environment says enters prompts as text (``ChatBridge.as_text``): it can spell tags and
control tokens, and be neither.

What the tokens are, and whether the next turn fits, is decided in
``agent_system.tokens.conversation``.
"""

from dataclasses import replace
from typing import Protocol

from agent_system.environments.env import Observation
from agent_system.environments.prompts import Prompts, prompts_for
from agent_system.memory import WindowMemory
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Turn
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.conversation import TokenConversation, with_user
from agent_system.tokens.ledger import TokenLedger
from agent_system.tokens.template import Message


class History(Protocol):
    """The conversations of one trajectory, turn by turn. ``heard`` is what the last of them was
    told: the messages before the first turn, then one before each later turn.
    """

    ledgers: list[TokenLedger]
    heard: list[Message]

    def open_turn(self, observation: Observation, step: int) -> TokenConversation | None:
        """The conversation that turn ``step`` continues; None where that turn would not fit."""
        ...

    def close_turn(self, turn: Turn) -> None:
        """Take note of a turn that was played."""
        ...


def make_history(settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> History:
    """The history policy that ``settings.history`` names."""
    policies = {"append": AppendHistory, "window": WindowHistory}
    return policies[settings.history](settings, bridge, prompts)


class _Conversations:
    """What both policies share: how a conversation begins."""

    def __init__(self, settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> None:
        self.ledgers: list[TokenLedger] = []
        self.heard: list[Message] = []
        self._settings = settings
        self._bridge = bridge
        self._prompts = prompts

    def _as_text(self, observation: Observation) -> Observation:
        """``observation`` with all that prompts show of it as text."""
        as_text = self._bridge.as_text
        info = observation.info
        if info.get("admissible_actions"):
            info = {**info, "admissible_actions": [*map(as_text, info["admissible_actions"])]}
        opening = [{**said, "content": as_text(said["content"])} for said in observation.opening]
        return replace(observation, text=as_text(observation.text), info=info, opening=opening)

    def _begin(self, first: Observation, user: str, step: int) -> TokenConversation | None:
        opening = list(first.opening)
        system = prompts_for(self._prompts, first).system(self._settings.levels)
        if not opening and system is not None:
            opening = [{"role": "system", "content": system}]
        conversation = TokenConversation(self._bridge, self._settings.limits, opening)
        # Before the ledger is listed: a conversation that does not fit is no row.
        if not conversation.hear(user, step):
            return None
        self.ledgers.append(conversation.ledger)
        self.heard[:] = with_user(opening, user)
        return conversation


class AppendHistory(_Conversations):
    """The whole trajectory is one growing conversation."""

    def __init__(self, settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> None:
        super().__init__(settings, bridge, prompts)
        self._conversation: TokenConversation | None = None

    def open_turn(self, observation: Observation, step: int) -> TokenConversation | None:
        """See ``History``."""
        observation = self._as_text(observation)
        if self._conversation is None:
            first = self._prompts.first(observation, self._settings.levels)
            self._conversation = self._begin(observation, first, step)
            return self._conversation
        said = self._prompts.turn(observation)
        if not self._conversation.hear(said, step):
            return None
        self.heard.append({"role": "user", "content": said})
        return self._conversation

    def close_turn(self, turn: Turn) -> None:
        """See ``History``; the conversation already holds the turn."""


class WindowHistory(_Conversations):
    """Every turn starts from a prompt rendered anew with the last turns of memory."""

    def __init__(self, settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> None:
        super().__init__(settings, bridge, prompts)
        self._memory = WindowMemory(settings.history_length)
        self._first: Observation | None = None

    def open_turn(self, observation: Observation, step: int) -> TokenConversation | None:
        """See ``History``."""
        observation = self._as_text(observation)
        if self._first is None:
            self._first = observation
        levels = self._settings.levels
        user = self._prompts.window(self._first, self._memory.turns(), observation, levels)
        return self._begin(self._first, user, step)

    def close_turn(self, turn: Turn) -> None:
        """See ``History``."""
        as_text = self._bridge.as_text
        self._memory.add(as_text(turn.observation), as_text(turn.action))
