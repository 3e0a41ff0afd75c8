"""History policies: which tokens the policy sees before its next turn.

``append``: one ledger for the whole play. After each turn the bridge and the observation are added;
nothing is rendered or encoded again. ``window``: every turn gets a ledger of its own, with a prompt
that shows the last turns.

Both answer ``open_turn`` with the ledger of the next turn, or None where that turn would not fit.
"""

from typing import Protocol

from agent_system.environments.base import Observation, Prompts
from agent_system.memory import WindowMemory
from agent_system.multi_turn_rollout.play_settings import PlaySettings
from agent_system.multi_turn_rollout.trajectory import Turn
from agent_system.tokens.bridge import ChatBridge
from agent_system.tokens.ledger import SegmentKind, TokenLedger


class History(Protocol):
    """The tokens of one trajectory, turn by turn."""

    ledgers: list[TokenLedger]

    def open_turn(self, observation: Observation, step: int) -> TokenLedger | None:
        """The ledger whose tokens are the prompt of turn ``step``; None where the budget is spent."""

    def close_turn(self, turn: Turn) -> None:
        """Take note of a turn that was played."""


def make_history(settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> History:
    """The history policy that ``settings.history`` names."""
    policies = {"append": AppendHistory, "window": WindowHistory}
    return policies[settings.history](settings, bridge, prompts)


def _first_ledger(
    settings: PlaySettings, bridge: ChatBridge, prompts: Prompts, user: str
) -> TokenLedger | None:
    system = prompts.system(settings.levels)
    messages = [] if system is None else [{"role": "system", "content": system}]
    ids = bridge.first_prompt([*messages, {"role": "user", "content": user}])
    if len(ids) > settings.max_prompt_length:
        return None
    ledger = TokenLedger()
    ledger.append(ids, SegmentKind.PROMPT)
    return ledger


class AppendHistory:
    """The whole conversation is one growing token sequence."""

    def __init__(self, settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> None:
        self.ledgers: list[TokenLedger] = []
        self._settings, self._bridge, self._prompts = settings, bridge, prompts

    def open_turn(self, observation: Observation, step: int) -> TokenLedger | None:
        """See ``History``."""
        if not self.ledgers:
            first = self._prompts.first(observation, self._settings.levels)
            ledger = _first_ledger(self._settings, self._bridge, self._prompts, first)
            self.ledgers += [] if ledger is None else [ledger]
            return ledger
        ledger = self.ledgers[0]
        bridge = self._bridge.between(ledger.segments[-1].ids, self._prompts.turn(observation))
        used = len(ledger) - ledger.segments[0].end + len(bridge)
        if used + self._settings.max_turn_tokens > self._settings.max_response_length:
            return None
        self._bridge.extend(ledger, bridge, turn=step)
        return ledger

    def close_turn(self, turn: Turn) -> None:
        """See ``History``; the ledger already holds the turn."""


class WindowHistory:
    """Every turn starts from a prompt rendered anew with the last turns of memory."""

    def __init__(self, settings: PlaySettings, bridge: ChatBridge, prompts: Prompts) -> None:
        self.ledgers: list[TokenLedger] = []
        self._settings, self._bridge, self._prompts = settings, bridge, prompts
        self._memory = WindowMemory(settings.history_length)
        self._first: Observation | None = None

    def open_turn(self, observation: Observation, step: int) -> TokenLedger | None:
        """See ``History``."""
        if self._first is None:
            self._first = observation
        user = self._prompts.window(
            self._first, self._memory.turns(), observation, self._settings.levels
        )
        ledger = _first_ledger(self._settings, self._bridge, self._prompts, user)
        self.ledgers += [] if ledger is None else [ledger]
        return ledger

    def close_turn(self, turn: Turn) -> None:
        """See ``History``."""
        self._memory.add(turn.observation, turn.action)
