"""Data of a trial: conversation, episodes of the session, and results of ``run_trial``."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_system.agents import Action, Conversation, Message
from agent_system.tokens import SegmentKind, TokenLedger
from agent_system.tokens.bridge import ChatBridge, PlainBridge
from agent_system.tokens.conversation import (
    NO_LIMITS,
    TokenConversation,
    TokenLimits,
    append_user_text,
)
from verl.utils.sampling import StopReason

MASK_MODES = ("all", "final")


class Transcript:
    """Messages and tokens of a conversation. Without ``bridge`` there are no tokens."""

    def __init__(
        self,
        bridge: ChatBridge | PlainBridge | None,
        opening: Sequence[Message],
        limits: TokenLimits = NO_LIMITS,
    ) -> None:
        self.messages: list[Message] = [dict(message) for message in opening]
        self._bridge = bridge
        self._token_conversation = None
        if bridge is not None:
            self._token_conversation = TokenConversation(bridge, limits, self.messages)

    @property
    def token_ledger(self) -> TokenLedger | None:
        """All tokens, with the source of each; None without a tokenizer."""
        return None if self._token_conversation is None else self._token_conversation.ledger

    def add_observation(self, text: str, turn: int, episode: int) -> bool:
        """Add text of the environment before ``turn``.

        Return False, and add nothing, if the turn would exceed the token limits.
        """
        # Add the tokens first: if the turn does not fit, the messages stay unchanged.
        if self._token_conversation is not None and not self._token_conversation.add_observation(
            text, turn, episode
        ):
            return False
        self.messages = append_user_text(self.messages, text)
        return True

    def add_turn(self, action: Action | str, turn: int, episode: int) -> tuple[str, StopReason]:
        """Add a turn of the agent. Return its text and stop reason.

        The sampled tokens of an ``Action`` are added unchanged. A text is encoded and marked
        ``retokenized``.
        """
        if isinstance(action, str):
            text = action
            reason = StopReason.STOP
            if self._token_conversation is not None:
                self._token_conversation.add_text_turn(action, turn, episode)
        else:
            text = self._decode_action(action)
            reason = action.stop_reason
            if self._token_conversation is not None:
                self._token_conversation.add_turn(action, turn, episode)
        # Make a new list: an agent may keep the old one in its ``Conversation``.
        self.messages = [*self.messages, {"role": "assistant", "content": text}]
        return text, reason

    def build_conversation(self) -> Conversation:
        token_conversation = self._token_conversation
        return Conversation(
            self.messages, None if token_conversation is None else token_conversation.prompt_ids
        )

    def _decode_action(self, action: Action) -> str:
        # Decode the text from the tokens if the tokenizer can, else use the text of the agent.
        if self._bridge is None or not hasattr(self._bridge.tokenizer, "decode"):
            return action.text
        return self._bridge.decode(action.token_ids)


@dataclass(slots=True)
class Episode:
    """One episode of a trial. If ``is_free`` is True, its reward is not part of the trial's return.

    ``truncated`` is the reason why the episode ended early. ``steps``: it reached
    ``max_steps_per_episode``. ``length``: a turn reached its token limit. ``abort``: the engine
    aborted a turn. ``budget``: another turn would exceed the token limits.
    """

    number: int  # position in the trial, from 0
    is_free: bool = False  # True: the reward is not part of the trial's return
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop_reasons: list[StopReason] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    state: Any = None  # last state that the environment returned
    done: bool = False
    truncated: str | None = None
    reward: float = 0.0

    def to_record(self) -> dict[str, Any]:
        return {
            "reward": self.reward,
            "steps": len(self.actions),
            "llm_actions": list(self.actions),
            "llm_responses": list(self.actions),
            "turn_rewards": list(self.rewards),
            "stop_reasons": list(self.stop_reasons),
            "done": self.done,
            "truncated": self.truncated,
            "info": dict(self.info),
            "state": self.state,
            "free": self.is_free,
        }


@dataclass(slots=True)
class Trial:
    """Consecutive episodes of one session, all with the same task.

    ``aborted`` is the error message of a failed trial, which has no return and is not trained on.
    """

    session_id: str
    task_info: dict[str, Any]
    opening: list[Message] = field(default_factory=list)
    transcript: Transcript = field(default_factory=lambda: Transcript(None, ()))
    episodes: list[Episode] = field(default_factory=list)
    agent_state: Any = None
    turn: int = 0  # number of the next turn in the conversation
    is_over: bool = False
    aborted: str | None = None
    total_return: float = 0.0

    @property
    def current_episode(self) -> Episode:
        return self.episodes[-1]

    def to_record(self) -> dict[str, Any]:
        """Return the record of the last episode, with the return of the trial as ``reward``."""
        episodes = [episode.to_record() for episode in self.episodes]
        # A trial that failed at its start has no episode. Its record has all keys, too.
        last_record = episodes[-1] if episodes else Episode(0).to_record()
        return {
            **last_record,
            "reward": self.total_return,
            "session_id": self.session_id,
            "task_info": self.task_info,
            "messages": self.transcript.messages,
            "episodes": episodes,
            "aborted": self.aborted,
        }


def build_trial_results(trials: Sequence[Trial], mask_mode: str) -> dict[str, list]:
    """Return the results of all trials: lists by name, with one entry per trial."""
    ledgers = [trial.transcript.token_ledger or TokenLedger() for trial in trials]
    results = {
        "full_token_ids": [list(ledger.token_ids) for ledger in ledgers],
        "full_attention_mask": [[1] * len(ledger) for ledger in ledgers],
        "completion_only_mask": [build_loss_mask(ledger, mask_mode) for ledger in ledgers],
        "final_completion_messages": [_get_final_messages(trial) for trial in trials],
        "session_ids": [trial.session_id for trial in trials],
        "rewards": [trial.total_return for trial in trials],
        "turn_rewards": [[list(episode.rewards) for episode in trial.episodes] for trial in trials],
        "stop_reasons": [
            [list(episode.stop_reasons) for episode in trial.episodes] for trial in trials
        ],
        "episode_boundaries": [_find_episode_boundaries(trial) for trial in trials],
        "truncated": [
            trial.current_episode.truncated if trial.episodes else None for trial in trials
        ],
        "aborted": [trial.aborted for trial in trials],
        "logprobs": [ledger.token_logprobs() for ledger in ledgers],
        "prompt_lengths": [ledger.prompt_length for ledger in ledgers],
        "retokenized": [ledger.has_retokenized_tokens for ledger in ledgers],
    }
    aliases = {
        "ids": "full_token_ids",
        "messages": "final_completion_messages",
        "mask": "completion_only_mask",
    }
    return results | {alias: results[name] for alias, name in aliases.items()}


def build_episode_results(trial: Trial, mask_mode: str) -> dict[str, Any]:
    """Return the record and the tokens of a trial with a single episode, as one dict."""
    field_names = (
        "full_token_ids",
        "full_attention_mask",
        "completion_only_mask",
        "final_completion_messages",
        "logprobs",
    )
    results = build_trial_results([trial], mask_mode)
    return trial.to_record() | {name: results[name][0] for name in field_names}


def build_loss_mask(ledger: TokenLedger, mask_mode: str) -> list[int]:
    """Return the loss mask: 1 on tokens of the agent, 0 elsewhere.

    With ``mask_mode="final"`` only tokens of the agent's last turn have 1.
    """
    mask = ledger.completion_only_mask()
    if mask_mode == "all" or not ledger.agent_segments:
        return mask
    last_turn = ledger.agent_segments[-1]
    return [int(last_turn.start <= index < last_turn.end_position) for index in range(len(mask))]


def _get_final_messages(trial: Trial) -> list[dict[str, str]]:
    replies = [message for message in trial.transcript.messages if message["role"] == "assistant"]
    return replies[-1:]


def _find_episode_boundaries(trial: Trial) -> list[tuple[int, int]]:
    """Return the token range [start, end) of every episode in the trial's tokens."""
    ledger = trial.transcript.token_ledger
    if ledger is None:
        return []
    start_by_episode: dict[int, int] = {}
    for segment in ledger.all_segments:
        start_by_episode.setdefault(
            segment.episode, 0 if segment.kind is SegmentKind.PROMPT else segment.start
        )
    episode_starts = sorted(start_by_episode.values())
    return list(itertools.pairwise([*episode_starts, len(ledger)]))
