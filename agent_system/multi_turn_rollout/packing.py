"""Packing of trajectories into rows of a ``DataProto``: one row per ledger (conversation tokens).

    ledger    [prompt ........][agent][bridge env bridge][agent]
    row       prompts [P] left-padded | responses [R] right-padded
    mask                        1111   000000000000000000  1111
    step_ids                    0000   ------------------  1111

With ``append`` history a trajectory is one row, with ``window`` history one row per turn. P and R
are the longest prompt and response of the batch. If observations are images,
``multi_modal_data`` contains ``{"image": [...]}`` for every row: the images of its turns in order.
"""

import copy
import logging
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.trajectory import Trajectory, Turn
from agent_system.tokens.bridge import remove_escape_characters
from agent_system.tokens.ledger import TokenLedger
from rlvcr.records import ThinkingTurnRecord
from rlvcr.scoring import RowTurn
from verl.protocol import DataProto, object_array
from verl.records import ANSWER, INFO_NUMBERS, REWARD_PARTS
from verl.utils.chat_template import Message

logger = logging.getLogger(__name__)
# Columns that a batch has only if one of its rows has another value than this.
OPTIONAL_COLUMNS: dict[str, Any] = {
    "multi_modal_data": {"image": []},
    REWARD_PARTS: {},
    INFO_NUMBERS: {},
    ANSWER: None,
}


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """One row of the batch: the tokens of one conversation (ledger) and the turns in it."""

    trajectory: Trajectory
    ledger: TokenLedger
    turns: list[Turn]

    @property
    def response_start(self) -> int:
        """Index of the first response token: the start of the first turn; 0 without turns."""
        return self.turns[0].start if self.turns else 0

    @property
    def response_end(self) -> int:
        """Index after the last token of the last turn.

        Later tokens of the ledger are dropped, because no turn follows them.
        """
        return self.turns[-1].end if self.turns else 0


def select_trajectories(
    trajectories: Sequence[Trajectory], on_abort: str
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the trajectories to train on, and counts of dropped ones by reason.

    With ``on_abort="drop_group"`` every group (uid) with a failed trajectory is dropped, with
    ``keep_rest`` only the failed trajectories. A trajectory without a sampled turn is dropped too.
    """
    failed_groups = {t.spec.uid for t in trajectories if t.aborted is not None}
    kept_trajectories: list[Trajectory] = []
    dropped_counts = Counter({"aborted": 0, "group_of_aborted": 0, "without_turn": 0})
    for trajectory in trajectories:
        if trajectory.aborted is not None:
            dropped_counts["aborted"] += 1
        elif on_abort == "drop_group" and trajectory.spec.uid in failed_groups:
            dropped_counts["group_of_aborted"] += 1
        # Drop only this trajectory: it has no turn, but it has not failed, so its group stays.
        elif not trajectory.turns:
            dropped_counts["without_turn"] += 1
        else:
            kept_trajectories.append(trajectory)
    return kept_trajectories, {
        f"rollout/left_out_{reason}": float(count) for reason, count in dropped_counts.items()
    }


def select_differing_groups(
    trajectories: Sequence[Trajectory], max_groups: int
) -> list[list[Trajectory]]:
    """Return the first ``max_groups`` groups whose trajectories do not all have the same return."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.spec.uid].append(trajectory)
    differing_groups = [group for group in groups.values() if len({t.reward for t in group}) > 1]
    # A negative limit would cut from the end.
    return differing_groups[: max(max_groups, 0)]


def build_rows(trajectories: Sequence[Trajectory]) -> list[TrajectoryRow]:
    """Return the rows of ``trajectories`` in order.

    A trajectory without any turn gives one row without sampled tokens.
    """
    rows: list[TrajectoryRow] = []
    for trajectory in trajectories:
        # A ledger without a turn is skipped: with ``window`` history, its turn was never sampled.
        turns_by_ledger: dict[int, list[Turn]] = {}
        for turn in trajectory.turns:
            turns_by_ledger.setdefault(turn.ledger, []).append(turn)
        for ledger, turns in turns_by_ledger.items():
            rows.append(TrajectoryRow(trajectory, trajectory.ledgers[ledger], turns))
        # Validation counts trajectories without turns, so they need a row.
        if not turns_by_ledger:
            rows.append(TrajectoryRow(trajectory, TokenLedger(), []))
    return rows


@dataclass(frozen=True, slots=True)
class PackedRows:
    """B rows without padding, as a collector sends them to the driver.

    ``token_ids`` [N] are the tokens of all rows, one row after another. ``turn_ids`` (-1 where not
    sampled) and ``log_probs`` [M] belong to the tokens after the prompts. ``prompt_lengths`` and
    ``lengths`` [B] count tokens. ``columns`` are those of ``DataProto.non_tensor_batch``, without
    ``steps`` and without the optional columns in which no row has a value.
    """

    token_ids: np.ndarray
    turn_ids: np.ndarray
    log_probs: np.ndarray
    prompt_lengths: np.ndarray
    lengths: np.ndarray
    has_retokenized_tokens: np.ndarray
    columns: dict[str, np.ndarray]


def pack_rows(
    rows: Sequence[TrajectoryRow], pad_token_id: int, allow_retokenized: bool = False
) -> DataProto:
    """Return ``rows`` as a ``DataProto`` of B rows. Raises the errors of ``join_rows``."""
    order = range(len(rows))
    data = join_rows([compress_rows(rows)], order, pad_token_id, allow_retokenized)
    data.non_tensor_batch["steps"] = object_array([make_turn_records(row) for row in rows])
    return data


def compress_rows(rows: Sequence[TrajectoryRow]) -> PackedRows:
    """Return ``rows`` without padding."""
    spans = [(row.response_start, row.response_end) for row in rows]
    arrays = [row.ledger.to_arrays() for row in rows]
    parts = list(zip(arrays, spans, strict=True))
    return PackedRows(
        token_ids=_concat([a.ids[:end] for a, (_, end) in parts], np.int32),
        turn_ids=_concat([a.turn_ids()[start:end] for a, (start, end) in parts], np.int32),
        log_probs=_concat([a.token_logprobs()[start:end] for a, (start, end) in parts], np.float32),
        prompt_lengths=np.array([start for start, _ in spans], dtype=np.int64),
        lengths=np.array([end for _, end in spans], dtype=np.int64),
        has_retokenized_tokens=np.array([a.has_retokenized_tokens for a in arrays], dtype=bool),
        columns=_build_columns(rows),
    )


def _concat(arrays: Sequence[np.ndarray], dtype: type) -> np.ndarray:
    return np.concatenate([np.empty(0, dtype), *(array.astype(dtype) for array in arrays)])


def join_rows(
    tables: Sequence[PackedRows],
    order: Sequence[int],
    pad_token_id: int,
    allow_retokenized: bool = False,
) -> DataProto:
    """Return rows of ``tables`` as a ``DataProto`` of B rows, without the column ``steps``.

    ``order`` [B] are the indices of the rows, counted over all tables.

    Raises ``ValueError`` if there is no row. Raises it also if a row contains tokens that were
    encoded from text instead of sampled, unless ``allow_retokenized`` is true.
    """
    if not len(order):
        raise ValueError("no rows to pack: every trajectory was dropped")
    indices = np.asarray(order)
    retokenized = np.concatenate([table.has_retokenized_tokens for table in tables])[indices]
    if not allow_retokenized and retokenized.any():
        raise ValueError(
            "an agent returned text without the sampled tokens, and env.allow_retokenized is "
            "false; set env.allow_retokenized=true to train on tokens encoded from text"
        )
    return DataProto.from_dict(
        tensors=_pad_rows(tables, indices, pad_token_id), non_tensors=_join_columns(tables, indices)
    )


def _pad_rows(
    tables: Sequence[PackedRows], order: np.ndarray, pad_token_id: int
) -> dict[str, torch.Tensor]:
    """Return the padded tensors of B rows, with P prompt and R response columns."""
    all_rows = [row for table in tables for row in _split_rows(table)]
    rows = [all_rows[index] for index in order.tolist()]
    # At least one column, also for empty rows: code that uses a batch expects a width above 0.
    prompt_width = max(1, *(prompt_length for _, _, _, prompt_length in rows))
    response_width = max(1, *(len(turn_ids) for _, turn_ids, _, _ in rows))
    full_shape = (len(rows), prompt_width + response_width)
    response_shape = (len(rows), response_width)
    input_ids = np.full(full_shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(full_shape, dtype=np.int64)
    position_ids = np.zeros(full_shape, dtype=np.int64)
    position_range = np.arange(full_shape[1])
    # -1 marks tokens outside of agent turns, because 0 is the first turn.
    step_ids = np.full(response_shape, -1, dtype=np.int64)
    log_probs = np.zeros(response_shape, dtype=np.float32)
    for b, (token_ids, turn_ids, token_log_probs, prompt_length) in enumerate(rows):
        length = len(token_ids)
        # Prompts are padded on the left, so that all responses start in the same column.
        prompt_start = prompt_width - prompt_length
        row_end = prompt_start + length
        input_ids[b, prompt_start:row_end] = token_ids
        attention_mask[b, prompt_start:row_end] = 1
        # Right padding repeats the position of the last token.
        position_ids[b, prompt_start:row_end] = position_range[:length]
        position_ids[b, row_end:] = max(length - 1, 0)
        step_ids[b, : length - prompt_length] = turn_ids
        log_probs[b, : length - prompt_length] = token_log_probs
    arrays = {
        "prompts": input_ids[:, :prompt_width].copy(),
        "responses": input_ids[:, prompt_width:].copy(),
        "input_ids": input_ids,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "response_mask": (step_ids >= 0).astype(np.int64),
        "step_ids": step_ids,
        "rollout_log_probs": log_probs,
    }
    return {key: torch.from_numpy(array) for key, array in arrays.items()}


def _split_rows(table: PackedRows) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray, int]]:
    """Yield tokens, turn ids and log-probs of the response, and prompt length of each row."""
    start = response_start = 0
    for length, prompt_length in zip(
        table.lengths.tolist(), table.prompt_lengths.tolist(), strict=True
    ):
        end, response_end = start + length, response_start + length - prompt_length
        response = slice(response_start, response_end)
        yield (
            table.token_ids[start:end],
            table.turn_ids[response],
            table.log_probs[response],
            prompt_length,
        )
        start, response_start = end, response_end


def _join_columns(tables: Sequence[PackedRows], order: np.ndarray) -> dict[str, np.ndarray]:
    """Return the columns [B] of the rows ``order`` of ``tables``."""
    columns: dict[str, np.ndarray] = {}
    for key in dict.fromkeys(key for table in tables for key in table.columns):
        parts = [
            table.columns[key]
            if key in table.columns
            else object_array(copy.deepcopy(OPTIONAL_COLUMNS[key]) for _ in table.lengths)
            for table in tables
        ]
        column = np.concatenate(parts)[order]
        if key not in OPTIONAL_COLUMNS or any(value != OPTIONAL_COLUMNS[key] for value in column):
            columns[key] = column
    return columns


def _build_columns(rows: Sequence[TrajectoryRow]) -> dict[str, np.ndarray]:
    trajectories = [row.trajectory for row in rows]
    specs = [trajectory.spec for trajectory in trajectories]
    columns = {
        "multi_modal_data": object_array(
            {"image": [turn.image for turn in row.turns if turn.image is not None]} for row in rows
        ),
        REWARD_PARTS: object_array(trajectory.reward_parts for trajectory in trajectories),
        INFO_NUMBERS: object_array(trajectory.info_numbers for trajectory in trajectories),
        ANSWER: object_array(trajectory.answer for trajectory in trajectories),
    }
    columns = {
        key: column
        for key, column in columns.items()
        if any(value != OPTIONAL_COLUMNS[key] for value in column)
    }
    lists = {
        "uid": [spec.uid for spec in specs],
        "traj_uid": [spec.traj_uid for spec in specs],
        "data_source": [spec.data_source for spec in specs],
        "task_id": [spec.task["task_id"] for spec in specs],
        "anchor_obs": [[turn.anchor for turn in row.turns] for row in rows],
        "is_action_valid": [[turn.is_action_valid for turn in row.turns] for row in rows],
        "step_rewards": [[turn.reward for turn in row.turns] for row in rows],
        "step_index": [[turn.step for turn in row.turns] for row in rows],
        # The column contains strings only; "" if the environment was done.
        "truncated": [trajectory.truncated or "" for trajectory in trajectories],
    }
    return {
        **columns,
        **{key: object_array(values) for key, values in lists.items()},
        "episode_rewards": np.array([t.reward for t in trajectories], dtype=np.float64),
        "episode_lengths": np.array([len(t.turns) for t in trajectories], dtype=np.int64),
        "won": np.array([t.won for t in trajectories], dtype=bool),
        "aborted": np.array([t.aborted is not None for t in trajectories], dtype=bool),
    }


def collect_conversations(rows: Sequence[TrajectoryRow]) -> list[list[Message]]:
    """Return a list of messages for each of B rows.

    The last row of a trajectory gets the messages of the trajectory's last conversation. Every
    other row gets an empty list. The characters that ``ChatBridge.escape_added_tokens`` inserted
    are removed.
    """
    last_row_of_trajectory = {id(row.trajectory): row_index for row_index, row in enumerate(rows)}
    return [
        _rebuild_conversation(row) if last_row_of_trajectory[id(row.trajectory)] == number else []
        for number, row in enumerate(rows)
    ]


def _rebuild_conversation(row: TrajectoryRow) -> list[Message]:
    shown_messages = [
        {**message, "content": remove_escape_characters(message["content"])}
        for message in row.trajectory.shown_messages
    ]
    num_opening_messages = len(shown_messages) - (len(row.turns) - 1)
    messages = shown_messages[:num_opening_messages]
    for turn_index, turn in enumerate(row.turns):
        if turn_index:
            messages.append(shown_messages[num_opening_messages + turn_index - 1])
        messages.append({"role": "assistant", "content": turn.response})
    return messages


def make_turn_records(row: TrajectoryRow) -> list[ThinkingTurnRecord]:
    """Return the records of the turns of ``row``, the value of the column ``steps``."""
    return [make_turn_record(turn) for turn in row.turns]


def make_turn_record(turn: Turn) -> ThinkingTurnRecord:
    """Return the record of one turn for rewards, rollout files and reports.

    Its thinking advantage and the scores after alternative thoughts are added later, when training
    workers have computed the scores.
    """
    parsed = turn.parsed
    return ThinkingTurnRecord(
        step=turn.step,
        observation=turn.observation,
        response=turn.response,
        action=turn.action,
        is_action_valid=turn.is_action_valid,
        reward=turn.reward,
        done=turn.done,
        num_tokens=turn.num_tokens,
        stop_reason=turn.stop_reason.value,
        span=(turn.start, turn.end),
        level=None if parsed is None else parsed.level,
        level_forced=turn.num_forced > 0,
        parse_failure=None if parsed is None or parsed.failure is None else parsed.failure.value,
        thought_tokens=0 if parsed is None else parsed.thought_tokens,
        # A situation that equals the state is omitted: the record has the observation already.
        situation="" if turn.situation == turn.anchor else turn.situation,
        needed_level=turn.needed_level,
    )


def build_row_turns(rows: Sequence[TrajectoryRow]) -> list[list[RowTurn]]:
    """Return the turns of every row as ``RowTurn``, from which RLVCR builds its score requests.

    Raises ``ValueError`` if a turn was not parsed into level, thought and action.
    """
    return [[_build_row_turn(row.ledger, turn) for turn in row.turns] for row in rows]


def _build_row_turn(ledger: TokenLedger, turn: Turn) -> RowTurn:
    if turn.parsed is None:
        raise ValueError(
            f"turn {turn.step} has no parsed thinking level; generate it with env.levels=true"
        )
    return RowTurn(
        step=turn.step,
        start=turn.start,
        token_ids=ledger.token_ids[turn.start : turn.end],
        parsed=turn.parsed,
        alternatives=turn.alternatives,
        num_forced=turn.num_forced,
    )
