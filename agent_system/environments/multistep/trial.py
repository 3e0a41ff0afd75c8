"""A trial as data: the episodes of one session, and what ``run_trial`` returns of them."""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_system.agents import Message
from agent_system.environments.multistep.transcript import Transcript
from agent_system.tokens import SegmentKind, TokenLedger
from verl.utils.sampling import StopReason

MASK_MODES = ("all", "final")


@dataclass(slots=True)
class Episode:
    """One play of the task. ``reward`` is set when it is over.

    ``truncated`` says why it was ended early: ``steps``, ``length`` (a turn was cut), ``abort``
    (the engine gave a turn up) or ``budget`` (no room for another turn). ``free``: its reward does
    not count.
    """

    number: int
    free: bool = False
    actions: list[str] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop_reasons: list[StopReason] = field(default_factory=list)
    info: dict[str, Any] = field(default_factory=dict)
    state: Any = None
    done: bool = False
    truncated: str | None = None
    reward: float = 0.0

    def record(self) -> dict[str, Any]:
        """The episode as ``completed_episodes`` shows it."""
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
            "free": self.free,
        }


@dataclass(slots=True)
class Trial:
    """The episodes of one session, played one after the other on the same task.

    ``opening``: messages in front of the first prompt. ``aborted`` says what broke; such a trial
    has no return and is not to be learnt from.
    """

    session_id: str
    task_info: dict[str, Any]
    opening: list[Message] = field(default_factory=list)
    transcript: Transcript = field(default_factory=lambda: Transcript(None, ()))
    episodes: list[Episode] = field(default_factory=list)
    agent_state: Any = None
    turn: int = 0
    over: bool = False
    aborted: str | None = None
    total: float = 0.0

    @property
    def episode(self) -> Episode:
        """The episode that is being played, or was played last."""
        return self.episodes[-1]

    def record(self) -> dict[str, Any]:
        """The trial as ``completed_episodes`` shows it: its last episode, with the return of the
        trial as reward.
        """
        episodes = [episode.record() for episode in self.episodes]
        # A trial that broke at its start has no episode; readers find every key all the same.
        last = episodes[-1] if episodes else Episode(0).record()
        return {
            **last,
            "reward": self.total,
            "session_id": self.session_id,
            "task_info": self.task_info,
            "messages": self.transcript.messages,
            "episodes": episodes,
            "aborted": self.aborted,
        }


def trial_results(trials: Sequence[Trial], mask_mode: str) -> dict[str, list]:
    """What ``run_trial`` returns: one entry per trial in every list, empty token lists where no
    tokens are kept.
    """
    ledgers = [trial.transcript.ledger or TokenLedger() for trial in trials]
    results = {
        "full_token_ids": [list(ledger.ids) for ledger in ledgers],
        "full_attention_mask": [ledger.full_attention_mask() for ledger in ledgers],
        "completion_only_mask": [completion_mask(ledger, mask_mode) for ledger in ledgers],
        "final_completion_messages": [_final_messages(trial) for trial in trials],
        "session_ids": [trial.session_id for trial in trials],
        "rewards": [trial.total for trial in trials],
        "turn_rewards": [[list(episode.rewards) for episode in trial.episodes] for trial in trials],
        "stop_reasons": [
            [list(episode.stop_reasons) for episode in trial.episodes] for trial in trials
        ],
        "episode_boundaries": [_boundaries(trial) for trial in trials],
        "truncated": [trial.episode.truncated if trial.episodes else None for trial in trials],
        "aborted": [trial.aborted for trial in trials],
        "logprobs": [ledger.logprobs() for ledger in ledgers],
        "prompt_lengths": [ledger.prompt_length for ledger in ledgers],
        "retokenized": [ledger.retokenized for ledger in ledgers],
    }
    aliases = {
        "ids": "full_token_ids",
        "messages": "final_completion_messages",
        "mask": "completion_only_mask",
    }
    return results | {alias: results[name] for alias, name in aliases.items()}


def episode_results(trial: Trial, mask_mode: str) -> dict[str, Any]:
    """What ``_run_complete_episode`` returns: the trial's only episode, its tokens included."""
    per_trial = (
        "full_token_ids",
        "full_attention_mask",
        "completion_only_mask",
        "final_completion_messages",
        "logprobs",
    )
    results = trial_results([trial], mask_mode)
    return trial.record() | {name: results[name][0] for name in per_trial}


def completion_mask(ledger: TokenLedger, mask_mode: str) -> list[int]:
    """1 on the tokens to be trained: all the agent's (``all``), or those of its last turn
    (``final``).
    """
    mask = ledger.completion_only_mask()
    if mask_mode == "all" or not ledger.agent_segments:
        return mask
    last = ledger.agent_segments[-1]
    return [int(last.start <= place < last.end) for place in range(len(mask))]


def _final_messages(trial: Trial) -> list[dict[str, str]]:
    said = [message for message in trial.transcript.messages if message["role"] == "assistant"]
    return said[-1:]


def _boundaries(trial: Trial) -> list[tuple[int, int]]:
    """The token range [start, end) of every episode that the ledger holds; an episode begins where
    its text begins.
    """
    ledger = trial.transcript.ledger
    if ledger is None:
        return []
    begins: dict[int, int] = {}
    for segment in ledger.segments:
        begins.setdefault(
            segment.episode, 0 if segment.kind is SegmentKind.PROMPT else segment.start
        )
    starts = sorted(begins.values())
    return list(itertools.pairwise([*starts, len(ledger)]))
