"""Trajectories as data: returned by the collector workers and packed into rows.

A ledger is the token list of one conversation and becomes one row. With ``append`` history a
trajectory has one ledger, with ``window`` history one per turn. Every turn has the index of its
ledger and its token range.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from operator import attrgetter
from typing import TYPE_CHECKING, Any

from agent_system.environments.env import Task
from agent_system.reward_manager.scores import MAX_FLOAT32, is_number
from agent_system.tokens.ledger import TokenArrays, TokenLedger
from rlvcr.alternatives import TurnAlternativeThoughts
from rlvcr.levels import ParsedTurn
from verl.protocol import DataProto
from verl.records import SummaryRecord
from verl.utils.chat_template import Message
from verl.utils.sampling import StopReason

if TYPE_CHECKING:
    from agent_system.multi_turn_rollout.stored_trajectories import TrajectoryReference

# Keys of an environment's ``info`` that ``info_numbers`` omits: they have their own columns.
RESERVED_INFO_KEYS = {"won", "is_action_valid", "needed_level"}
MAX_INFO_NUMBERS = 32  # at most this many numbers of one ``info`` become metrics


@dataclass(frozen=True, slots=True)
class RolloutSpec:
    """Request for one trajectory, which may repeat recorded turns and then force a thinking level.

    The first turns repeat ``replayed_turns``, the token ids of each turn. The turn after them is
    forced to ``forced_level``: it begins with ``<level>k</level><think>``.
    ``expected_observations`` are the recorded observations of the repeated turns and of the forced
    turn. ``replayed_summaries`` are the token ids of the summaries before it. The trajectory ends
    after ``max_turns`` turns, if that is less than the limit of the rollout.
    """

    index: int  # position among the specs of one call
    task: Task
    uid: str  # group
    traj_uid: str
    env_seed: int
    replayed_turns: tuple[tuple[int, ...], ...] = ()  # token ids of each repeated turn
    expected_observations: tuple[str, ...] = ()
    replayed_summaries: tuple[tuple[int, ...], ...] = ()
    forced_level: int | None = None
    max_turns: int | None = None

    @property
    def data_source(self) -> str:
        return self.task["data_source"]


@dataclass(slots=True)
class Turn:
    """One turn: the observation, the reply of the policy, and the result of its action.

    Its tokens are ``token_ids[start:end]`` of ledger (token list of a conversation) number
    ``ledger``. The first ``num_forced_tokens`` of these tokens force a level and were not sampled.

    - ``parsed``: level, thought and action (``rlvcr.levels``); None if levels are not requested.
    - ``alternatives``: thoughts at other levels; None if they are not requested.
    - ``image``: image of the observation; None for text.
    - ``situation``, ``needed_level``: kind of state and required level. They come from the
      observation and are used for metrics.
    """

    step: int  # number of the turn, from 0
    observation: str
    anchor: str  # canonical text of the state
    ledger: int  # index of the token list with this turn
    start: int  # index of its first token in the ledger
    end: int  # index after its last token
    response: str  # text of the reply
    stop_reason: StopReason
    num_forced_tokens: int = 0  # first tokens that force a thinking level
    action: str = ""
    is_action_valid: bool = False
    reward: float = 0.0
    done: bool = False
    parsed: ParsedTurn | None = None
    alternatives: TurnAlternativeThoughts | None = None
    image: Any = None
    situation: str = ""  # kind of state, for metrics
    needed_level: int | None = None  # required thinking level, for metrics

    @property
    def num_tokens(self) -> int:
        """Number of tokens that the policy sampled."""
        return self.end - self.start - self.num_forced_tokens

    @property
    def chosen_level(self) -> int | None:
        """Thinking level that the policy chose; None if it could not be read or was forced."""
        return self.parsed.level if self.parsed is not None and not self.num_forced_tokens else None

    def __reduce__(self) -> tuple[Any, ...]:
        # Unpickle by the constructor: the method that dataclasses generate takes three times as
        # long.
        return Turn, _GET_TURN_VALUES(self)


_GET_TURN_VALUES = attrgetter(*(turn_field.name for turn_field in fields(Turn)))


@dataclass(slots=True)
class Trajectory:
    """One generated trajectory. ``reward`` is the return; times are in seconds.

    ``reward_parts``: components of the return by name, if the environment has several.
    ``info_numbers``: last value of each number in the environment's ``info``. ``answer``: the
    answer that the environment extracted, normalised for comparison.

    ``truncated``: reason for an end before the environment was done: ``steps``, ``length`` (a turn
    was cut) or ``budget`` (no tokens left for another turn). ``aborted``: reason of a failure.

    ``ledgers`` are the token lists of its conversations. A copy without texts has the arrays
    ``token_arrays`` instead, and ``stored_reference`` loads the whole trajectory.
    """

    spec: RolloutSpec
    ledgers: list[TokenLedger] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    # Summaries by the index of the ledger (tokens of a row) that ends with them, in order of time.
    summaries: dict[int, SummaryRecord] = field(default_factory=dict)
    # Messages of the last conversation except the replies: those before its first turn, then one
    # before each later turn.
    shown_messages: list[Message] = field(default_factory=list)
    reward: float = 0.0
    won: bool = False
    reward_parts: dict[str, float] = field(default_factory=dict)  # components of the return
    info_numbers: dict[str, float] = field(default_factory=dict)  # last numbers in ``info``
    answer: str | None = None
    truncated: str | None = None  # reason for an early end
    aborted: str | None = None  # reason of a failure
    abort_detail: str = ""  # message of the failure
    start_state: tuple[str, str] | None = None  # text and state of the first observation
    active_s: float = 0.0  # duration of the episode
    # Time on the clock of the collector worker, not comparable between workers.
    end_time_s: float = 0.0
    env_wait_s: float = 0.0
    engine_wait_s: float = 0.0
    token_arrays: list[TokenArrays] | None = field(default=None, compare=False, repr=False)
    stored_reference: "TrajectoryReference | None" = field(default=None, compare=False, repr=False)

    def abort(self, reason: str, detail: str) -> None:
        """Mark the trajectory as failed; its finished turns stay."""
        self.aborted = reason
        self.abort_detail = detail

    @property
    def num_sampled_tokens(self) -> int:
        """Number of tokens that the policy sampled in all turns and summaries."""
        return sum(
            turn_or_summary.num_tokens
            for turn_or_summary in (*self.turns, *self.summaries.values())
        )

    def list_token_arrays(self) -> list[TokenArrays]:
        """Return the arrays of each ledger: one value per token."""
        if self.token_arrays is not None:
            return self.token_arrays
        return [ledger.to_token_arrays() for ledger in self.ledgers]

    def copy_without_texts(self) -> "Trajectory":
        """Return a smaller copy without texts and prompts, which suffices for rows and metrics."""
        task = {key: self.spec.task[key] for key in ("task_id", "data_source")}
        empty_texts = {"observation": "", "response": "", "action": ""}
        return replace(
            self,
            spec=replace(self.spec, task=task, replayed_turns=(), expected_observations=()),
            ledgers=[],
            token_arrays=self.list_token_arrays(),
            turns=[replace(turn, **empty_texts) for turn in self.turns],
            shown_messages=[],
        )


def make_rollout_specs(gen_batch: DataProto, trajectories_per_row: int = 1) -> list[RolloutSpec]:
    """Return ``trajectories_per_row`` consecutive rollout specs for each row of ``gen_batch``."""
    columns = gen_batch.non_tensor_batch
    rows = zip(columns["task"], columns["uid"], columns["member"], columns["env_seed"], strict=True)
    specs: list[RolloutSpec] = []
    for task, uid, member, seed in rows:
        for repetition in range(trajectories_per_row):
            # The number is unique in its group, because sampling seeds depend on ``traj_uid``.
            member_number = int(member) * trajectories_per_row + repetition
            traj_uid = f"{uid}/{member_number}"
            specs.append(RolloutSpec(len(specs), task, str(uid), traj_uid, int(seed)))
    return specs


def extract_info_numbers(info: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers and booleans of an environment's ``info``.

    Keys must be valid parts of a metric name. At most ``MAX_INFO_NUMBERS`` are returned.

    >>> extract_info_numbers({"is_action_valid": True, "score": 3, "key_found": False, "a": "x"})
    {'score': 3.0, 'key_found': 0.0}
    """
    finite_numbers = {
        str(name): float(value)
        for name, value in info.items()
        if name not in RESERVED_INFO_KEYS
        and re.fullmatch(r"[\w.-]{1,64}", str(name))
        and is_number(value)
        # Omit NaN and numbers beyond float32. ``float`` cannot convert integers beyond float64.
        and -MAX_FLOAT32 <= value <= MAX_FLOAT32
    }
    return dict(list(finite_numbers.items())[:MAX_INFO_NUMBERS])
