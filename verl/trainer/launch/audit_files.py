"""Files that a user gives to ``main_audit``: recorded trajectories, and external scores.

{"task_id": "7", "seed": 3, "actions": ["go north", "take key"]}
{"traj_uid": "val-1-0-4/2", "step": 0, "score": 0.7}
{"task_id": "7", "seed": 3, "step": 0, "score": 0.7}
"""

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_system.environments.env import Task
from agent_system.multi_turn_rollout.recorded_trajectories import RecordedTrajectory
from rlvcr.research.audit import AuditPoint

logger = logging.getLogger(__name__)
# (traj_uid, turn number), or (task_id, environment seed, turn number)
ExternalScores = Mapping[tuple[str | int | None, ...], float]
SCORES_KEY = "algorithm.rlvcr.audit_scores_file"


class _Line(BaseModel):
    """One line of a file. Fields of other names are ignored."""

    model_config = ConfigDict(strict=True, allow_inf_nan=False)


class _TrajectoryLine(_Line):
    task_id: str
    seed: int
    actions: Annotated[list[str], MinLen(1)]


class _ScoreLine(_Line):
    step: int
    score: float
    traj_uid: str | None = None
    task_id: str | None = None
    seed: int | None = None


LineT = TypeVar("LineT", bound=_Line)


def read_recorded_trajectories(path: str, tasks: Mapping[str, Task]) -> list[RecordedTrajectory]:
    """Return the trajectories of the file ``path``; ``tasks`` are by ``task_id``.

    Raises ``ValueError`` with file and line for an invalid line or an unknown task.
    """
    recorded = []
    for source, line in _read_lines(path, _TrajectoryLine):
        if line.task_id not in tasks:
            raise ValueError(
                f"{source}: task_id={line.task_id!r} is not a task of the environment; allowed: "
                f"{len(tasks)} ids such as {next(iter(tasks), '')!r}; fix: correct the id or the "
                "settings of the environment"
            )
        task = tasks[line.task_id]
        recorded.append(RecordedTrajectory(source, task, line.seed, tuple(line.actions)))
    if not recorded:
        raise ValueError(f"{path}: it has no trajectory; allowed: one JSON object per line")
    return recorded


def read_external_scores(path: str) -> ExternalScores:
    """Return the scores of the file ``path``. Raises ``ValueError`` with file and line."""
    scores: dict[tuple[str | int | None, ...], float] = {}
    for source, line in _read_lines(path, _ScoreLine):
        key = (line.task_id, line.seed, line.step)
        if line.traj_uid is not None:
            key = (line.traj_uid, line.step)
        if None in key or key in scores:
            raise ValueError(
                f"{source}: the turn {key} is incomplete or has a second score; allowed: one score "
                "for each traj_uid and step, or for each task_id, seed and step"
            )
        scores[key] = line.score
    return scores


def add_external_scores(points: Sequence[AuditPoint], scores: ExternalScores) -> list[AuditPoint]:
    """Return ``points`` with the score ``external`` of the file; NaN at a point that it lacks."""
    if not scores:
        return list(points)
    values = []
    for point in points:
        of_task = scores.get((point.task, point.seed, point.step), math.nan)
        values.append(scores.get((point.traj_uid, point.step), of_task))
    missing = sum(map(math.isnan, values))
    if missing:
        logger.warning("%s lacks the scores of %d of %d turns", SCORES_KEY, missing, len(points))
    return [
        replace(point, step_scores={**point.step_scores, "external": value})
        for point, value in zip(points, values, strict=True)
    ]


def _read_lines(path: str, kind: type[LineT]) -> Iterator[tuple[str, LineT]]:
    """Yield the lines of a JSONL file, each with the text that names file and line."""
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        source = f"{path}, line {number}"
        try:
            if text.strip():
                yield source, kind.model_validate_json(text)
        except ValidationError as error:
            (why, *_) = error.errors()
            field = ".".join(map(str, why["loc"])) or "the line"
            raise ValueError(
                f"{source}: {field}: {why['msg']}; fix: write one JSON object with the fields "
                f"{', '.join(kind.model_fields)}"
            ) from error
