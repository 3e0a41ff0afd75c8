"""Packing of trajectories into rows of ``verl.protocol``: one row per ledger.

    ledger    [prompt ........][agent][bridge env bridge][agent]
    row       prompts [P] left-padded | responses [R] right-padded
    mask                        1111   000000000000000000  1111
    step_ids                    0000   ------------------  1111

With ``append`` history a trajectory is one row, with ``window`` history one row per turn. P and R
are the longest prompt and response of the batch. Where observations are images,
``multi_modal_data`` holds ``{"image": [...]}`` for every row: those of its turns in order.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.trajectory import Trajectory, Turn
from agent_system.tokens.bridge import without_cuts
from agent_system.tokens.ledger import TokenLedger
from agent_system.tokens.template import Message
from rlvcr.records import ThinkingStep
from rlvcr.scoring import RowStep
from verl.protocol import DataProto, object_array
from verl.records import ANSWER, INFO_NUMBERS, REWARD_PARTS

logger = logging.getLogger(__name__)
ON_ABORT = ("drop_group", "keep_rest")


@dataclass(frozen=True, slots=True)
class Row:
    """One ledger of a trajectory with the turns whose tokens it holds."""

    trajectory: Trajectory
    ledger: TokenLedger
    turns: list[Turn]

    @property
    def split(self) -> int:
        """Index of the first response token: the start of the first turn; 0 without turns."""
        return self.turns[0].start if self.turns else 0

    @property
    def end(self) -> int:
        """End of the row: the end of the last turn. Later tokens are dropped, because no turn
        follows.
        """
        return self.turns[-1].end if self.turns else 0


def select_trajectories(
    trajectories: Sequence[Trajectory], on_abort: str
) -> tuple[list[Trajectory], dict[str, float]]:
    """Return the trajectories to train on, and counts of dropped ones by reason.

    ``drop_group`` drops every group (uid) with a failed trajectory, ``keep_rest`` only the failed
    trajectories. A trajectory without a sampled turn is dropped too. Raises
    ``ValueError`` for another policy.
    """
    if on_abort not in ON_ABORT:
        raise ValueError(f"env.on_abort={on_abort!r}: allowed are {', '.join(ON_ABORT)}")
    broken_groups = {t.job.uid for t in trajectories if t.aborted is not None}
    kept: list[Trajectory] = []
    left_out = Counter({"aborted": 0, "group_of_aborted": 0, "without_turn": 0})
    for trajectory in trajectories:
        if trajectory.aborted is not None:
            left_out["aborted"] += 1
        elif on_abort == "drop_group" and trajectory.job.uid in broken_groups:
            left_out["group_of_aborted"] += 1
        # After the check of its group: an empty trajectory has not failed, and its group stays.
        elif not trajectory.turns:
            left_out["without_turn"] += 1
        else:
            kept.append(trajectory)
    return kept, {f"rollout/left_out_{reason}": float(count) for reason, count in left_out.items()}


def groups_with_spread(trajectories: Sequence[Trajectory], limit: int) -> list[list[Trajectory]]:
    """Return the first ``limit`` groups whose members do not all have the same return."""
    groups: dict[str, list[Trajectory]] = defaultdict(list)
    for trajectory in trajectories:
        groups[trajectory.job.uid].append(trajectory)
    spread = [
        members
        for members in groups.values()
        if len({trajectory.reward for trajectory in members}) > 1
    ]
    # A negative limit would cut from the end.
    return spread[: max(limit, 0)]


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """Return the rows of ``trajectories`` in order.

    A trajectory without any turn gives one row without sampled tokens.
    """
    rows: list[Row] = []
    for trajectory in trajectories:
        # A ledger without a turn is skipped: a window prompt whose turn was never sampled.
        by_ledger: dict[int, list[Turn]] = {}
        for turn in trajectory.turns:
            by_ledger.setdefault(turn.ledger, []).append(turn)
        for ledger, turns in by_ledger.items():
            rows.append(Row(trajectory, trajectory.ledgers[ledger], turns))
        # Validation counts trajectories without turns, so they need a row.
        if not by_ledger:
            rows.append(Row(trajectory, TokenLedger(), []))
    return rows


def played_in(rows: Sequence[Row]) -> list[Trajectory]:
    """Return the trajectories of ``rows``, each once, in order."""
    return list({id(row.trajectory): row.trajectory for row in rows}.values())


def pack(rows: Sequence[Row], pad_token_id: int, allow_retokenized: bool = False) -> DataProto:
    """Return ``rows`` as a ``DataProto`` of B rows.

    Raises:
        ValueError: There is no row, or a row holds tokens that were tokenized from text instead of
            sampled and ``allow_retokenized`` is false.
    """
    if not rows:
        raise ValueError("no rows to pack: every trajectory was dropped")
    if not allow_retokenized and any(row.ledger.retokenized for row in rows):
        raise ValueError(
            "an agent returned text without the sampled tokens, and env.allow_retokenized is "
            "false; set env.allow_retokenized=true to train on tokens encoded from text"
        )
    return DataProto.from_dict(tensors=_tensors(rows, pad_token_id), non_tensors=_columns(rows))


def _tensors(rows: Sequence[Row], pad_token_id: int) -> dict[str, torch.Tensor]:
    """Return the tensors of B rows, P prompt and R response tokens wide."""
    # At least one column, also for empty rows: widths of a batch are not 0.
    prompt_width = max(1, *(row.split for row in rows))
    response_width = max(1, *(row.end - row.split for row in rows))
    whole = (len(rows), prompt_width + response_width)
    response = (len(rows), response_width)
    input_ids = np.full(whole, pad_token_id, dtype=np.int64)
    attention = np.zeros(whole, dtype=np.int64)
    positions = np.zeros(whole, dtype=np.int64)
    ramp = np.arange(whole[1])
    mask = np.zeros(response, dtype=np.int64)
    # -1, because 0 is the first turn.
    step_ids = np.full(response, -1, dtype=np.int64)
    log_probs = np.zeros(response, dtype=np.float32)
    for b, row in enumerate(rows):
        played = row.ledger.arrays()
        split = row.split
        end = row.end
        # Prompts are padded on the left, so that all responses start in the same column.
        first = prompt_width - split
        input_ids[b, first : first + end] = played.ids[:end]
        attention[b, first : first + end] = 1
        # Right padding repeats the position of the last token.
        positions[b, first : first + end] = ramp[:end]
        positions[b, first + end :] = max(end - 1, 0)
        mask[b, : end - split] = played.mask()[split:end]
        step_ids[b, : end - split] = played.turn_ids()[split:end]
        log_probs[b, : end - split] = played.token_logprobs()[split:end]
    ids = torch.from_numpy(input_ids)
    return {
        "prompts": ids[:, :prompt_width].clone(),
        "responses": ids[:, prompt_width:].clone(),
        "input_ids": ids,
        "attention_mask": torch.from_numpy(attention),
        "position_ids": torch.from_numpy(positions),
        "response_mask": torch.from_numpy(mask),
        "step_ids": torch.from_numpy(step_ids),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    jobs = [row.trajectory.job for row in rows]
    columns: dict[str, Any] = {}
    seen = [[turn.image for turn in row.turns if turn.image is not None] for row in rows]
    if any(seen):
        columns["multi_modal_data"] = [{"image": images} for images in seen]
    parts = [row.trajectory.reward_parts for row in rows]
    if any(parts):
        columns[REWARD_PARTS] = object_array(parts)
    numbers = [row.trajectory.info_numbers for row in rows]
    if any(numbers):
        columns[INFO_NUMBERS] = object_array(numbers)
    answers = [row.trajectory.answer for row in rows]
    if any(answer is not None for answer in answers):
        columns[ANSWER] = object_array(answers)
    return columns | {
        "uid": [job.uid for job in jobs],
        "traj_uid": [job.traj_uid for job in jobs],
        "data_source": [job.data_source for job in jobs],
        "task_id": [job.task["task_id"] for job in jobs],
        "anchor_obs": [[turn.anchor for turn in row.turns] for row in rows],
        "is_action_valid": [[turn.is_action_valid for turn in row.turns] for row in rows],
        "step_rewards": [[turn.reward for turn in row.turns] for row in rows],
        "step_index": [[turn.step for turn in row.turns] for row in rows],
        "episode_rewards": np.array([row.trajectory.reward for row in rows], dtype=np.float64),
        "episode_lengths": np.array([len(row.trajectory.turns) for row in rows], dtype=np.int64),
        "won": np.array([row.trajectory.won for row in rows], dtype=bool),
        "aborted": np.array([row.trajectory.aborted is not None for row in rows], dtype=bool),
        # Text, so that the column has one type; "" where the environment was done.
        "truncated": [row.trajectory.truncated or "" for row in rows],
        "steps": [[step_record(turn) for turn in row.turns] for row in rows],
    }


def conversations(rows: Sequence[Row]) -> list[list[Message]]:
    """Return [B] messages of the last conversation of each trajectory, at its last row.

    The list is empty at other rows. Marks of ``ChatBridge.escape_added_tokens`` are removed.
    """
    last = {id(row.trajectory): number for number, row in enumerate(rows)}
    return [
        _conversation(row) if last[id(row.trajectory)] == number else []
        for number, row in enumerate(rows)
    ]


def _conversation(row: Row) -> list[Message]:
    heard = [{**said, "content": without_cuts(said["content"])} for said in row.trajectory.heard]
    first = len(heard) - (len(row.turns) - 1)
    messages = heard[:first]
    for number, turn in enumerate(row.turns):
        if number:
            messages.append(heard[first + number - 1])
        messages.append({"role": "assistant", "content": turn.response})
    return messages


def step_record(turn: Turn) -> ThinkingStep:
    """Return the record of one turn for rewards, rollout files and reports.

    Scoring adds contexts and credit.
    """
    parsed = turn.parsed
    return ThinkingStep(
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
        level_forced=turn.forced > 0,
        parse_failure=None if parsed is None or parsed.failure is None else parsed.failure.value,
        thought_tokens=0 if parsed is None else parsed.thought_tokens,
        # The state is in the observation already.
        situation="" if turn.situation == turn.anchor else turn.situation,
        needed_level=turn.needed_level,
    )


def row_steps(rows: Sequence[Row]) -> list[list[RowStep]]:
    """Return the turns of every row in the form of ``rlvcr.scoring``.

    Raises:
        ValueError: A turn was not parsed into level, thought and action.
    """
    return [[_row_step(row.ledger, turn) for turn in row.turns] for row in rows]


def _row_step(ledger: TokenLedger, turn: Turn) -> RowStep:
    if turn.parsed is None:
        raise ValueError(
            f"turn {turn.step} has no parsed thinking level; generate it with env.levels=true"
        )
    return RowStep(
        step=turn.step,
        start=turn.start,
        token_ids=ledger.ids[turn.start : turn.end],
        parsed=turn.parsed,
        alternatives=turn.alternatives,
        forced=turn.forced,
        executed=turn.executed,
    )
