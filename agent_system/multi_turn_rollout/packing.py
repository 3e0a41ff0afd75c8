"""Trajectories into rows: one row per ledger, the format of ``verl.protocol`` as the trainer reads
it.

    ledger    [prompt ........][agent][bridge env bridge][agent]
    row       prompts [P] left-padded | responses [R] right-padded
    mask                        1111   000000000000000000  1111
    step_ids                    0000   ------------------  1111

With ``append`` history a trajectory is one row, with ``window`` history one row per step. P and R
are the longest prompt and response of the batch. Where observations are images,
``multi_modal_data`` holds ``{"image": [...]}`` for every row: those of its steps in order.
"""

import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from agent_system.multi_turn_rollout.trajectory import Trajectory, Turn
from agent_system.tokens.ledger import TokenLedger
from rlvcr.records import ThinkingStep
from rlvcr.scoring import RowStep
from verl.protocol import DataProto

logger = logging.getLogger(__name__)
ON_ABORT = ("drop_group", "keep_rest")


@dataclass(frozen=True, slots=True)
class Row:
    """One ledger of a trajectory with the turns whose tokens it holds."""

    trajectory: Trajectory
    ledger: TokenLedger
    turns: list[Turn]


def select_trajectories(
    trajectories: Sequence[Trajectory], on_abort: str
) -> tuple[list[Trajectory], dict[str, float]]:
    """The trajectories to train on, and how many were left out and why.

    ``drop_group`` leaves out every group (uid) with a broken trajectory, ``keep_rest`` the broken
    trajectories alone. A trajectory in which nothing was sampled has no row and is left out too.
    Raises ``ValueError`` for another policy.
    """
    if on_abort not in ON_ABORT:
        raise ValueError(f"env.on_abort={on_abort!r}: allowed are {', '.join(ON_ABORT)}")
    broken_groups = {t.job.uid for t in trajectories if t.aborted is not None}
    kept, left_out = [], Counter({"aborted": 0, "group_of_aborted": 0, "without_turn": 0})
    for trajectory in trajectories:
        if trajectory.aborted is not None:
            left_out["aborted"] += 1
        elif on_abort == "drop_group" and trajectory.job.uid in broken_groups:
            left_out["group_of_aborted"] += 1
        elif not trajectory.turns:
            left_out["without_turn"] += 1
        else:
            kept.append(trajectory)
    return kept, {f"rollout/left_out_{reason}": float(count) for reason, count in left_out.items()}


def rows_of(trajectories: Sequence[Trajectory]) -> list[Row]:
    """The rows of ``trajectories`` in order; a trajectory without any turn gives one row that
    samples nothing.
    """
    rows = []
    for trajectory in trajectories:
        by_ledger: dict[int, list[Turn]] = {}
        for turn in trajectory.turns:
            by_ledger.setdefault(turn.ledger, []).append(turn)
        rows += [
            Row(trajectory, trajectory.ledgers[ledger], turns)
            for ledger, turns in by_ledger.items()
        ]
        if not by_ledger:
            rows.append(Row(trajectory, TokenLedger(), []))
    return rows


def pack(rows: Sequence[Row], pad_token_id: int, allow_retokenized: bool = False) -> DataProto:
    """``rows`` as a ``DataProto`` of B rows.

    Raises:
        ValueError: There is no row, or a row holds tokens that were made from text instead of being
            sampled and ``allow_retokenized`` is false.
    """
    if not rows:
        raise ValueError("no rows to pack: every trajectory was left out")
    if not allow_retokenized and any(row.ledger.retokenized for row in rows):
        raise ValueError(
            "an agent returned text without the tokens it was sampled as; training on re-tokenised text needs "
            "env.allow_retokenized=true"
        )
    # What follows the last sampled token was never answered.
    ends = [row.turns[-1].end if row.turns else 0 for row in rows]
    splits = [row.turns[0].start if row.turns else 0 for row in rows]
    prompt_width = max(1, *splits)
    response_width = max(1, *(end - split for end, split in zip(ends, splits, strict=True)))
    tensors = _tensors(rows, splits, ends, (prompt_width, response_width), pad_token_id)
    return DataProto.from_dict(tensors=tensors, non_tensors=_columns(rows))


def _tensors(
    rows: Sequence[Row],
    splits: list[int],
    ends: list[int],
    widths: tuple[int, int],
    pad_token_id: int,
) -> dict[str, torch.Tensor]:
    prompt_width, response_width = widths
    size = (len(rows), prompt_width + response_width)
    input_ids = np.full(size, pad_token_id, dtype=np.int64)
    attention = np.zeros(size, dtype=np.int64)
    mask = np.zeros((len(rows), response_width), dtype=np.int64)
    step_ids = np.full((len(rows), response_width), -1, dtype=np.int64)
    log_probs = np.zeros((len(rows), response_width), dtype=np.float32)
    for b, (row, split, end) in enumerate(zip(rows, splits, ends, strict=True)):
        first = prompt_width - split
        input_ids[b, first : first + end] = row.ledger.ids[:end]
        attention[b, first : first + end] = row.ledger.full_attention_mask()[:end]
        mask[b, : end - split] = row.ledger.completion_only_mask()[split:end]
        step_ids[b, : end - split] = row.ledger.turn_ids()[split:end]
        log_probs[b, : end - split] = row.ledger.logprobs()[split:end]
    ids = torch.from_numpy(input_ids)
    return {
        "prompts": ids[:, :prompt_width].clone(),
        "responses": ids[:, prompt_width:].clone(),
        "input_ids": ids,
        "attention_mask": torch.from_numpy(attention),
        "position_ids": torch.from_numpy(np.clip(attention.cumsum(-1) - 1, 0, None)),
        "response_mask": torch.from_numpy(mask),
        "step_ids": torch.from_numpy(step_ids),
        "rollout_log_probs": torch.from_numpy(log_probs),
    }


def _columns(rows: Sequence[Row]) -> dict[str, Any]:
    jobs = [row.trajectory.job for row in rows]
    seen = [[turn.image for turn in row.turns if turn.image is not None] for row in rows]
    return {
        **({"multi_modal_data": [{"image": images} for images in seen]} if any(seen) else {}),
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
        "truncated": [row.trajectory.truncated or "" for row in rows],
        "steps": [[step_record(turn) for turn in row.turns] for row in rows],
    }


def step_record(turn: Turn) -> ThinkingStep:
    """One step for rewards, rollout files and reports; scoring adds contexts and credit."""
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
    )


def row_steps(rows: Sequence[Row]) -> list[list[RowStep]]:
    """The steps of every row as ``rlvcr.scoring`` reads them; needs turns that were parsed."""
    return [
        [
            RowStep(
                turn.step,
                turn.start,
                row.ledger.ids[turn.start : turn.end],
                turn.parsed,
                turn.alternatives,
                turn.forced,
            )
            for turn in row.turns
        ]
        for row in rows
    ]
