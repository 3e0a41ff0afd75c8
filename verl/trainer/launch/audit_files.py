"""Files that a user gives to ``main_audit``: recorded trajectories, and external scores.

{"task_id": "7", "seed": 3, "actions": ["go north", "take key"]}
{"traj_uid": "val-1-0-4/2", "step": 0, "score": 0.7}
{"task_id": "7", "seed": 3, "step": 0, "score": 0.7}
"""

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from agent_system.environments.env import Task
from agent_system.multi_turn_rollout.recorded_trajectories import RecordedTrajectory
from rlvcr.research.audit import AuditPoint

logger = logging.getLogger(__name__)
# (traj_uid, turn number), or (task_id, environment seed, turn number)
ExternalScores = Mapping[tuple[str | int, ...], float]


def read_recorded_trajectories(path: str, tasks: Mapping[str, Task]) -> list[RecordedTrajectory]:
    """Return the trajectories of the file ``path``; ``tasks`` are by ``task_id``.

    Raises ``ValueError`` with file and line for an invalid line or an unknown task.
    """
    recorded = []
    for source, row in _read_lines(path):
        task_id = _get_field(row, "task_id", str, source)
        seed = _get_field(row, "seed", int, source)
        actions = _get_field(row, "actions", list, source)
        if not actions or not all(isinstance(action, str) for action in actions):
            raise ValueError(f"{source}: actions={actions!r}; allowed: a list of at least one text")
        if task_id not in tasks:
            raise ValueError(
                f"{source}: task_id={task_id!r} is not a task of the environment; allowed: "
                f"{len(tasks)} ids such as {next(iter(tasks), '')!r}; fix: correct the id or the "
                "settings of the environment"
            )
        recorded.append(RecordedTrajectory(source, tasks[task_id], seed, tuple(actions)))
    if not recorded:
        raise ValueError(f"{path}: it has no trajectory; allowed: one JSON object per line")
    return recorded


def read_external_scores(path: str) -> ExternalScores:
    """Return the scores of the file ``path``. Raises ``ValueError`` with file and line."""
    scores: dict[tuple[str | int, ...], float] = {}
    for source, row in _read_lines(path):
        step = _get_field(row, "step", int, source)
        if "traj_uid" in row:
            key = (_get_field(row, "traj_uid", str, source), step)
        else:
            task_id = _get_field(row, "task_id", str, source)
            key = (task_id, _get_field(row, "seed", int, source), step)
        score = _get_field(row, "score", (int, float), source)
        if not math.isfinite(score):
            raise ValueError(f"{source}: score={score}; allowed: finite numbers")
        if key in scores:
            raise ValueError(f"{source}: a second score of turn {key}; fix: remove one of them")
        scores[key] = float(score)
    return scores


def add_external_scores(points: Sequence[AuditPoint], scores: ExternalScores) -> list[AuditPoint]:
    """Return ``points`` with the score ``external`` of the file; NaN at a point that it lacks."""
    if not scores:
        return list(points)
    values = []
    for point in points:
        of_task = scores.get((point.task or "", point.seed, point.step), math.nan)
        values.append(scores.get((point.traj_uid, point.step), of_task))
    missing = sum(map(math.isnan, values))
    if missing:
        logger.warning(
            "algorithm.rlvcr.audit_scores_file has no score for %d of %d audited turns",
            missing,
            len(points),
        )
    return [
        replace(point, step_scores={**point.step_scores, "external": value})
        for point, value in zip(points, values, strict=True)
    ]


def _read_lines(path: str) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the objects of a JSONL file, each with the text that names its file and line."""
    for number, line in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), 1):
        if not line.strip():
            continue
        source = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise ValueError(f"{source}: not JSON: {error}; allowed: one object") from error
        if not isinstance(row, dict):
            raise ValueError(f"{source}: {row!r}; allowed: one JSON object per line")
        yield source, row


def _get_field(
    row: Mapping[str, Any], name: str, kind: type | tuple[type, ...], source: str
) -> Any:
    """Return field ``name`` of ``row``. Raises ``ValueError`` if it is missing or another type."""
    value = row.get(name)
    # True and False are integers in Python.
    if isinstance(value, bool) or not isinstance(value, kind):
        kinds = kind if isinstance(kind, tuple) else (kind,)
        allowed = " or ".join(one.__name__ for one in kinds)
        raise ValueError(f"{source}: {name}={value!r}; allowed: {allowed}; fix: correct the line")
    return value
