"""Files that a user gives to ``main_audit``, with one JSON object per line.

One has trajectories to replay, another the user's own scores of turns. The trajectory of a score is
named by ``traj_uid``, or by task and environment seed::

    {"task_id": "7", "seed": 3, "actions": ["go north", "take key"]}
    {"traj_uid": "val-1-0-4/2", "step": 0, "score": 0.7}
    {"task_id": "7", "seed": 3, "step": 0, "score": 0.7}
"""

import logging
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_system.environments.env import Task
from agent_system.multi_turn_rollout.audit_rollouts import RecordedTrajectory
from rlvcr.research.audit import AuditedTurn
from verl.config.settings.errors import UserError

logger = logging.getLogger(__name__)
# Turn -> its score. A turn is (traj_uid, turn number), or (task_id, environment seed, turn number).
ExternalScores = Mapping[tuple[str | int | None, ...], float]
SCORES_KEY = "algorithm.rlvcr.audit_scores_file"


class _JsonLine(BaseModel):
    """One JSON line of a file. Fields that are not declared are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _TrajectoryJsonLine(_JsonLine):
    task_id: str
    seed: int
    actions: Annotated[list[str], MinLen(1)]


class _ScoreJsonLine(_JsonLine):
    step: int
    score: float
    traj_uid: str | None = None
    task_id: str | None = None
    seed: int | None = None


LineT = TypeVar("LineT", bound=_JsonLine)


def read_recorded_trajectories(path: str, tasks: Mapping[str, Task]) -> list[RecordedTrajectory]:
    """Return the trajectories to replay from the file ``path``.

    ``tasks`` maps each ``task_id`` to its task. Raises ``UserError`` with file and line for an
    invalid line or an unknown task.
    """
    recorded_trajectories = []
    for line_location, line in _read_lines(path, _TrajectoryJsonLine):
        if line.task_id not in tasks:
            raise UserError(
                f"{line_location}: task_id={line.task_id!r} is not a task of the environment; "
                f"allowed: {len(tasks)} ids such as {next(iter(tasks), '')!r}; "
                "fix: correct the id or the settings of the environment",
                "unknown_name",
            )
        task = tasks[line.task_id]
        recorded_trajectories.append(
            RecordedTrajectory(line_location, task, line.seed, tuple(line.actions))
        )
    if not recorded_trajectories:
        message = f"{path}: it has no trajectory; allowed: one JSON object per line"
        raise UserError(message, "no_rows")
    return recorded_trajectories


def read_external_scores(path: str) -> ExternalScores:
    """Return the user's scores of turns in the file ``path``.

    A score estimates how much the choice in a turn changes the return. Raises ``UserError`` with
    file and line for an invalid line, and for a file without scores.
    """
    scores: dict[tuple[str | int | None, ...], float] = {}
    for line_location, line in _read_lines(path, _ScoreJsonLine):
        key = (line.task_id, line.seed, line.step)
        if line.traj_uid is not None:
            key = (line.traj_uid, line.step)
        if None in key or key in scores:
            raise UserError(
                f"{line_location}: the turn {key} is incomplete or has a second score; allowed: "
                "one score for each traj_uid and step, or for each task_id, seed and step",
                "wrong_cell",
            )
        scores[key] = line.score
    if not scores:
        message = f"{SCORES_KEY}={path!r}: it has no score; allowed: one JSON object per line"
        raise UserError(f"{message}; fix: add scores, or remove the key", "no_rows")
    return scores


def refuse_ambiguous_scores(
    scores: ExternalScores, recorded_trajectories: Sequence[RecordedTrajectory], group_size: int
) -> None:
    """Raise ``UserError`` if a score names a turn by a task and seed of several trajectories."""
    recorded_counts = Counter(
        (trajectory.task["task_id"], trajectory.seed) for trajectory in recorded_trajectories
    )
    for score_key in scores:
        if len(score_key) == 2:
            continue  # the key is (traj_uid, turn)
        task_id, seed, step = score_key
        num_trajectories = (
            recorded_counts[str(task_id), int(seed or 0)] if recorded_trajectories else group_size
        )
        if num_trajectories > 1:
            raise UserError(
                f"{SCORES_KEY}: task_id={task_id!r}, seed={seed}, step={step}: {num_trajectories} "
                "trajectories have this task and seed; allowed: one; fix: name the traj_uid and "
                "the step",
                "wrong_cell",
            )


def add_external_scores(
    audited_turns: Sequence[AuditedTurn], scores: ExternalScores
) -> list[AuditedTurn]:
    """Return ``audited_turns`` with the user's ``scores`` under the name ``external``.

    A turn without a score gets NaN.
    """
    if not scores:
        return list(audited_turns)
    turn_scores = []
    for turn in audited_turns:
        task_score = scores.get((turn.task, turn.seed, turn.step), math.nan)
        turn_scores.append(scores.get((turn.traj_uid, turn.step), task_score))
    num_missing = sum(map(math.isnan, turn_scores))
    if num_missing:
        logger.warning(
            "%s lacks the scores of %d of %d turns", SCORES_KEY, num_missing, len(audited_turns)
        )
    return [
        replace(turn, step_scores={**turn.step_scores, "external": turn_score})
        for turn, turn_score in zip(audited_turns, turn_scores, strict=True)
    ]


def _read_lines(path: str, line_type: type[LineT]) -> Iterator[tuple[str, LineT]]:
    """Yield the parsed lines of a JSONL file, each after a text with file name and line number."""
    for line_number, text in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        line_location = f"{path}, line {line_number}"
        try:
            if text.strip():
                yield line_location, line_type.model_validate_json(text)
        except ValidationError as error:
            (detail, *_) = error.errors()
            field = ".".join(map(str, detail["loc"])) or "the line"
            raise UserError(
                f"{line_location}: {field}: {detail['msg']}; fix: write one JSON object with the "
                f"fields {', '.join(line_type.model_fields)}",
                "wrong_cell",
            ) from error
