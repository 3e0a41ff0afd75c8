"""Packing of trajectories into rows of a ``DataProto``: one row per ledger (conversation tokens).

    ledger    [prompt ........][agent][bridge env bridge][agent]
    row       prompts [P] left-padded | responses [R] right-padded
    mask                        1111   000000000000000000  1111
    step_ids                    0000   ------------------  1111

With ``append`` history a trajectory is one row, with ``window`` history one row per turn. P and R
are the longest prompt and response of the batch. If observations are images, ``multi_modal_data``
contains ``{"image": [...]}`` for every row: the images of its turns in order.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.trajectory import Trajectory, Turn
from agent_system.tokens.bridge import remove_escape_characters
from agent_system.tokens.ledger import TokenArrays, TokenLedger
from rlvcr.records import ThinkingTurnRecord
from rlvcr.score_table import RowTurn
from verl.protocol import DataProto, object_array
from verl.records import ANSWER, INFO_NUMBERS, REWARD_PARTS, SUMMARY, SummaryRecord
from verl.utils.chat_template import Message

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class TrajectoryRow:
    """Row ``number`` of a trajectory: the tokens of one conversation and the turns in it.

    ``summary`` is the policy's summary of earlier turns that ends the row, or None.
    """

    trajectory: Trajectory
    tokens: TokenArrays
    turns: list[Turn]
    number: int = 0  # position in the trajectory, from 0
    summary: SummaryRecord | None = None

    @property
    def turn_and_summary_spans(self) -> list[tuple[int, int]]:
        """Token ranges of the turns and the summary, in order."""
        turn_spans = [(turn.start, turn.end) for turn in self.turns]
        return turn_spans if self.summary is None else [*turn_spans, self.summary.span]

    @property
    def response_start(self) -> int:
        """Index of the first response token: the start of the first turn; 0 without turns."""
        return self.turn_and_summary_spans[0][0] if self.turn_and_summary_spans else 0

    @property
    def response_end(self) -> int:
        """Index after the last token of the last turn, or of the summary that ends the row.

        Later tokens of the ledger are dropped, because no turn follows them.
        """
        return self.turn_and_summary_spans[-1][1] if self.turn_and_summary_spans else 0


def select_usable_trajectories(
    trajectories: Sequence[Trajectory], on_abort: str
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the trajectories to train on, and counts of dropped ones by reason.

    With ``on_abort="drop_group"`` every group (uid) with a failed trajectory is dropped, with
    ``keep_rest`` only the failed trajectories. A trajectory without a sampled turn is dropped too.
    """
    failed_uids = {t.spec.uid for t in trajectories if t.aborted is not None}
    kept_trajectories: list[Trajectory] = []
    dropped_counts = Counter({"aborted": 0, "group_of_aborted": 0, "without_turn": 0})
    for trajectory in trajectories:
        if trajectory.aborted is not None:
            dropped_counts["aborted"] += 1
        elif on_abort == "drop_group" and trajectory.spec.uid in failed_uids:
            dropped_counts["group_of_aborted"] += 1
        # Drop only this trajectory: it has no turn, but it has not failed, so its group stays.
        elif not trajectory.turns:
            dropped_counts["without_turn"] += 1
        else:
            kept_trajectories.append(trajectory)
    return kept_trajectories, {
        f"rollout/left_out_{reason}": float(count) for reason, count in dropped_counts.items()
    }


def select_groups_with_differing_returns(
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
    """Return the rows of ``trajectories`` in order: one per conversation of a trajectory.

    A trajectory without any turn gives one row without sampled tokens.
    """
    rows: list[TrajectoryRow] = []
    for trajectory in trajectories:
        # Skip a ledger (the tokens of one row) without a turn: with ``window`` history, the turn
        # after its prompt was never sampled.
        turns_by_ledger: dict[int, list[Turn]] = {}
        for turn in trajectory.turns:
            turns_by_ledger.setdefault(turn.ledger, []).append(turn)
        token_arrays = trajectory.list_token_arrays()
        # A row can have a summary and no turn. With ``chat`` history, a template may remove earlier
        # thoughts from the prompt that requests the summary. This prompt then begins a new row.
        ledger_indices = sorted({*turns_by_ledger, *trajectory.summaries})
        for number, ledger_index in enumerate(ledger_indices):
            turns = turns_by_ledger.get(ledger_index, [])
            summary = trajectory.summaries.get(ledger_index)
            rows.append(
                TrajectoryRow(trajectory, token_arrays[ledger_index], turns, number, summary)
            )
        # Validation counts trajectories without turns, so they need a row.
        if not turns_by_ledger:
            rows.append(TrajectoryRow(trajectory, TokenLedger().to_token_arrays(), []))
    return rows


def list_trajectories(rows: Sequence[TrajectoryRow]) -> list[Trajectory]:
    """Return the trajectories of ``rows``, each once, in order."""
    return list({id(row.trajectory): row.trajectory for row in rows}.values())


def collate_rows(
    rows: Sequence[TrajectoryRow], pad_token_id: int, allow_retokenized: bool = False
) -> DataProto:
    """Return ``rows`` (at least one) as a ``DataProto`` of B rows.

    Raises ``ValueError`` if a row contains tokens that were encoded from text instead of sampled,
    unless ``allow_retokenized`` is true.
    """
    if not allow_retokenized and any(row.tokens.has_retokenized_tokens for row in rows):
        raise ValueError(
            "an agent returned text without the sampled tokens, and env.allow_retokenized is "
            "false; set env.allow_retokenized=true to train on tokens encoded from text"
        )
    tensors = _build_tensors(rows, pad_token_id)
    return DataProto.from_dict(tensors=tensors, non_tensors=_build_columns(rows))


def _build_tensors(rows: Sequence[TrajectoryRow], pad_token_id: int) -> dict[str, torch.Tensor]:
    # At least one column, also for empty rows: code that uses a batch expects a width above 0.
    prompt_width = max(1, *(row.response_start for row in rows))
    response_width = max(1, *(row.response_end - row.response_start for row in rows))
    full_shape = (len(rows), prompt_width + response_width)
    response_shape = (len(rows), response_width)
    input_ids = np.full(full_shape, pad_token_id, dtype=np.int64)
    attention_mask = np.zeros(full_shape, dtype=np.int64)
    position_ids = np.zeros(full_shape, dtype=np.int64)
    position_range = np.arange(full_shape[1])
    response_mask = np.zeros(response_shape, dtype=np.int64)
    # -1 marks tokens outside of agent turns, because 0 is the first turn.
    step_ids = np.full(response_shape, -1, dtype=np.int64)
    log_probs = np.zeros(response_shape, dtype=np.float32)
    for b, row in enumerate(rows):
        tokens = row.tokens
        prompt_length = row.response_start
        row_end = row.response_end
        # Prompts are padded on the left, so that all responses start in the same column.
        prompt_start = prompt_width - prompt_length
        input_ids[b, prompt_start : prompt_start + row_end] = tokens.ids[:row_end]
        attention_mask[b, prompt_start : prompt_start + row_end] = 1
        # Right padding repeats the position of the last token.
        position_ids[b, prompt_start : prompt_start + row_end] = position_range[:row_end]
        position_ids[b, prompt_start + row_end :] = max(row_end - 1, 0)
        response_mask[b, : row_end - prompt_length] = tokens.is_sampled[prompt_length:row_end]
        step_ids[b, : row_end - prompt_length] = tokens.turn_ids[prompt_length:row_end]
        log_probs[b, : row_end - prompt_length] = tokens.log_probs[prompt_length:row_end]
    input_ids_tensor = torch.from_numpy(input_ids)
    return {
        "prompts": input_ids_tensor[:, :prompt_width].clone(),
        "responses": input_ids_tensor[:, prompt_width:].clone(),
        "input_ids": input_ids_tensor,
        "attention_mask": torch.from_numpy(attention_mask),
        "position_ids": torch.from_numpy(position_ids),
        "response_mask": torch.from_numpy(response_mask),
        "step_ids": torch.from_numpy(step_ids),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }


def _build_columns(rows: Sequence[TrajectoryRow]) -> dict[str, Any]:
    specs = [row.trajectory.spec for row in rows]
    columns: dict[str, Any] = {}
    row_images = [[turn.image for turn in row.turns if turn.image is not None] for row in rows]
    if any(row_images):
        columns["multi_modal_data"] = [{"image": images} for images in row_images]
    optional_columns: dict[str, list[Any]] = {
        REWARD_PARTS: [row.trajectory.reward_parts for row in rows],
        INFO_NUMBERS: [row.trajectory.info_numbers for row in rows],
        SUMMARY: [row.summary for row in rows],
        ANSWER: [row.trajectory.answer for row in rows],
    }
    for key, values in optional_columns.items():
        # Omit a column that has no value in any row.
        if any(value not in (None, {}) for value in values):
            columns[key] = object_array(values)
    return columns | {
        "uid": [spec.uid for spec in specs],
        "traj_uid": [spec.traj_uid for spec in specs],
        "data_source": [spec.data_source for spec in specs],
        "task_id": [spec.task["task_id"] for spec in specs],
        "anchor_obs": [[turn.anchor for turn in row.turns] for row in rows],
        "is_action_valid": [[turn.is_action_valid for turn in row.turns] for row in rows],
        "step_rewards": [[turn.reward for turn in row.turns] for row in rows],
        "step_index": [[turn.step for turn in row.turns] for row in rows],
        "episode_rewards": np.array([row.trajectory.reward for row in rows], dtype=np.float64),
        "episode_lengths": np.array([len(row.trajectory.turns) for row in rows], dtype=np.int64),
        "won": np.array([row.trajectory.won for row in rows], dtype=bool),
        "aborted": np.array([row.trajectory.aborted is not None for row in rows], dtype=bool),
        # All values are strings. "" means that the environment ended the episode (done).
        "truncated": [row.trajectory.truncated or "" for row in rows],
        "steps": [load_or_make_turn_records(row) for row in rows],
    }


def rebuild_last_conversations(rows: Sequence[TrajectoryRow]) -> list[list[Message]]:
    """Return the messages that a reward model scores, as one list for each of B rows.

    The last row of a trajectory gets the messages of its last conversation, every other row an
    empty list. Invisible characters that disable control tokens are removed.
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
    replies = [turn.response for turn in row.turns]
    replies += [] if row.summary is None else [row.summary.response]
    num_opening_messages = len(shown_messages) - (len(replies) - 1)
    messages = shown_messages[:num_opening_messages]
    for index, reply in enumerate(replies):
        if index:
            messages.append(shown_messages[num_opening_messages + index - 1])
        messages.append({"role": "assistant", "content": reply})
    return messages


def load_or_make_turn_records(row: TrajectoryRow) -> Sequence[ThinkingTurnRecord]:
    """Return one record per turn of ``row``, with its texts, level and reward.

    If the whole trajectory is in Ray's object store, they are loaded at the first access.
    """
    if row.trajectory.stored_reference is not None:
        return row.trajectory.stored_reference.get_turn_records(row.number)
    return [make_turn_record(turn) for turn in row.turns]


def make_turn_record(turn: Turn) -> ThinkingTurnRecord:
    """Return the record of one turn, without credit and scores, which are added later."""
    parsed_turn = turn.parsed
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
        level=None if parsed_turn is None else parsed_turn.level,
        level_forced=turn.num_forced_tokens > 0,
        parse_failure=None
        if parsed_turn is None or parsed_turn.failure is None
        else parsed_turn.failure.value,
        thought_tokens=0 if parsed_turn is None else parsed_turn.thought_tokens,
        # Omit a situation that equals ``anchor``, which the record has already.
        situation="" if turn.situation == turn.anchor else turn.situation,
        needed_level=turn.needed_level,
    )


def build_row_turns(rows: Sequence[TrajectoryRow]) -> list[list[RowTurn]]:
    """Return the turns of every row with their levels, thoughts, actions and token positions.

    Raises ``ValueError`` if a turn was not parsed into level, thought and action.
    """
    return [[_build_row_turn(row.tokens.ids, turn) for turn in row.turns] for row in rows]


def _build_row_turn(token_ids: np.ndarray, turn: Turn) -> RowTurn:
    if turn.parsed is None:
        raise ValueError(
            f"turn {turn.step} has no parsed thinking level; generate it with env.levels=true"
        )
    return RowTurn(
        turn_index=turn.step,
        start_in_row=turn.start,
        token_ids=token_ids[turn.start : turn.end].tolist(),
        parsed=turn.parsed,
        alternatives=turn.alternatives,
        num_forced_tokens=turn.num_forced_tokens,
    )
