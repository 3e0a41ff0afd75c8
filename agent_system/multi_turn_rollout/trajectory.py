"""A played trajectory as data: what the collector workers hand back and what is packed into rows.

A trajectory holds one ledger for each of its rows: a single one with ``append`` history, one per
step with ``window`` history. Every turn says which ledger holds its tokens and where.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.env import Task
from agent_system.reward_manager.scores import LARGEST, is_number
from agent_system.tokens.ledger import TokenLedger
from agent_system.tokens.template import Message
from rlvcr.alternatives import StepAlternatives
from rlvcr.levels import ParsedStep
from verl.protocol import DataProto
from verl.utils.sampling import StopReason

# Of an environment's ``info``: these have columns and metrics of their own.
READ_ELSEWHERE = {"won", "is_action_valid", "needed_level"}
MOST_NUMBERS = 32


@dataclass(frozen=True, slots=True)
class Job:
    """One trajectory that is to be rolled out: row ``index`` of the batch, ``member`` of group
    ``uid``.

    Its first turns repeat ``replay``, token by token; ``level`` is the thinking level that the turn
    after these is made to have: its digit after the tokens ``opening``, or, where these are None,
    the tokens from ``<level>`` to ``<think>``. ``seen`` is what the policy saw in these turns and
    in that one.
    """

    index: int
    task: Task
    uid: str
    traj_uid: str
    member: int
    env_seed: int
    replay: tuple[tuple[int, ...], ...] = ()
    seen: tuple[str, ...] = ()
    level: int | None = None
    opening: tuple[int, ...] | None = None

    @property
    def data_source(self) -> str:
        """Where the task comes from."""
        return self.task["data_source"]


@dataclass(slots=True)
class Turn:
    """One environment step: the observation, the turn that answered it, and what came of it.

    Its tokens are ``ids[start:end]`` of ledger ``ledger``; the first ``forced`` of them, a level,
    were not sampled. ``parsed`` is the step read as thinking level, thought and action
    (``rlvcr.levels``), ``alternatives`` what was thought at the other levels; both None where not
    asked for. ``executed`` is how much more the play was worth than one with another level here,
    None where none was executed. ``image`` is the observation's, None where it is text.
    ``situation`` and ``needed_level`` are the observation's, for measuring.
    """

    step: int
    observation: str
    anchor: str
    ledger: int
    start: int
    end: int
    response: str
    stop_reason: StopReason
    forced: int = 0
    action: str = ""
    is_action_valid: bool = False
    reward: float = 0.0
    done: bool = False
    parsed: ParsedStep | None = None
    alternatives: StepAlternatives | None = None
    executed: float | None = None
    image: Any = None
    situation: str = ""
    needed_level: int | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens the policy sampled."""
        return self.end - self.start - self.forced

    @property
    def chosen_level(self) -> int | None:
        """The level the policy chose; None where it could not be read or was forced."""
        return self.parsed.level if self.parsed is not None and not self.forced else None


@dataclass(slots=True)
class Trajectory:
    """One rollout of ``job``. ``reward`` is the return, ``reward_parts`` the rewards by name that
    it is made of, where the environment gives several; ``info_numbers`` the last
    value of each number in its ``info``; ``answer`` is what the environment took from
    the text, in the form in which answers are compared; times are seconds.

    ``truncated`` says why the episode was ended before the environment was done: ``steps``,
    ``length`` (a turn was cut) or ``budget`` (no room for another turn). ``aborted`` says what
    broke.
    """

    job: Job
    ledgers: list[TokenLedger] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # What the policy was told in the last conversation: messages before its first turn, then one
    # before each later turn.
    heard: list[Message] = field(default_factory=list)
    reward: float = 0.0
    won: bool = False
    reward_parts: dict[str, float] = field(default_factory=dict)
    info_numbers: dict[str, float] = field(default_factory=dict)
    answer: str | None = None
    truncated: str | None = None
    aborted: str | None = None
    abort_detail: str = ""
    start_state: tuple[str, str] | None = None
    active_s: float = 0.0
    # On the clock of its collector worker: not to be compared with another one's.
    ended_at: float = 0.0
    env_wait_s: float = 0.0
    engine_wait_s: float = 0.0

    def abort(self, reason: str, detail: str) -> None:
        """Mark the trajectory as broken; what was played until then stays."""
        self.aborted = reason
        self.abort_detail = detail

    @property
    def sampled_tokens(self) -> int:
        """Tokens the policy sampled for its turns."""
        return sum(turn.num_tokens for turn in self.turns)


def jobs_of(gen_batch: DataProto, plays: int = 1) -> list[Job]:
    """``plays`` jobs per row of ``gen_batch``; members of a group stay next to each other."""
    columns = gen_batch.non_tensor_batch
    rows = zip(columns["task"], columns["uid"], columns["member"], columns["env_seed"], strict=True)
    jobs: list[Job] = []
    for task, uid, member, seed in rows:
        for play in range(plays):
            # Unique in its group: seeds of what is sampled hang on ``traj_uid``.
            number = int(member) * plays + play
            jobs.append(
                Job(
                    index=len(jobs),
                    task=task,
                    uid=str(uid),
                    traj_uid=f"{uid}/{number}",
                    member=number,
                    env_seed=int(seed),
                )
            )
    return jobs


def numbers_in(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers and truth values of an environment's ``info`` whose keys can be a
    part of a metric's name, ``MOST_NUMBERS`` of them at most.

    >>> numbers_in({"won": True, "score": 3, "key_found": False, "note": "x"})
    {'score': 3.0, 'key_found': 0.0}
    """
    found = {
        str(name): float(value)
        for name, value in info.items()
        if name not in READ_ELSEWHERE
        and re.fullmatch(r"[\w.-]{1,64}", str(name))
        and is_number(value)
        # Not finite: NaN compares false, and an integer may be beyond float64.
        and -LARGEST <= value <= LARGEST
    }
    return dict(list(found.items())[:MOST_NUMBERS])
