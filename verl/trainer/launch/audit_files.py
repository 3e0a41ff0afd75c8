"""Files that a user gives to ``main_audit``, and its results: metrics, tables and a file.

A file of the user has one JSON object per line. One file has trajectories to replay. Another has
the user's own scores of turns, which are compared with measured returns. The trajectory of a score
is named by ``traj_uid``, or by task and environment seed::

    {"task_id": "7", "seed": 3, "actions": ["go north", "take key"]}
    {"traj_uid": "val-1-0-4/2", "step": 0, "score": 0.7}
    {"task_id": "7", "seed": 3, "step": 0, "score": 0.7}

In the results a point is one audited turn. It was continued to the end with every thinking level,
or with several actions. A score is the credit that a rule gives to a level or action. The effect of
a level or action is the mean return of its continuations, minus the mean over all of them.
"""

import dataclasses
import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, TypeVar

from annotated_types import MinLen
from pydantic import BaseModel, ConfigDict, ValidationError

from agent_system.environments.env import Task
from agent_system.multi_turn_rollout.recorded_trajectories import RecordedTrajectory
from rlvcr.report_sections import AUDIT_FILE, LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE
from rlvcr.research.audit import AuditedTurn, AuditResult
from verl.record.console import show_tables
from verl.utils.files import atomic_write
from verl.utils.statistics import make_interval_metrics

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

    ``tasks`` maps each ``task_id`` to its task. Raises ``ValueError`` with file and line for an
    invalid line or an unknown task.
    """
    recorded_trajectories = []
    for source, line in _read_lines(path, _TrajectoryJsonLine):
        if line.task_id not in tasks:
            raise ValueError(
                f"{source}: task_id={line.task_id!r} is not a task of the environment; allowed: "
                f"{len(tasks)} ids such as {next(iter(tasks), '')!r}; fix: correct the id or the "
                "settings of the environment"
            )
        task = tasks[line.task_id]
        actions = tuple(line.actions)
        recorded_trajectories.append(RecordedTrajectory(source, task, line.seed, actions))
    if not recorded_trajectories:
        raise ValueError(f"{path}: it has no trajectory; allowed: one JSON object per line")
    return recorded_trajectories


def read_external_scores(path: str) -> ExternalScores:
    """Return the user's scores of turns in the file ``path``.

    A score estimates how much the choice in a turn changes the return. Raises ``ValueError`` with
    file and line for an invalid line.
    """
    scores: dict[tuple[str | int | None, ...], float] = {}
    for source, line in _read_lines(path, _ScoreJsonLine):
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


def add_external_scores(
    audited_turns: Sequence[AuditedTurn], scores: ExternalScores
) -> list[AuditedTurn]:
    """Return ``audited_turns`` with the user's ``scores`` under the name ``external``.

    A score estimates how much the choice in a turn changes the return. A turn without a score gets
    NaN.
    """
    if not scores:
        return list(audited_turns)
    turn_scores = []
    for point in audited_turns:
        task_score = scores.get((point.task, point.seed, point.step), math.nan)
        turn_scores.append(scores.get((point.traj_uid, point.step), task_score))
    num_missing = sum(map(math.isnan, turn_scores))
    if num_missing:
        logger.warning(
            "%s lacks the scores of %d of %d turns", SCORES_KEY, num_missing, len(audited_turns)
        )
    return [
        dataclasses.replace(point, step_scores={**point.step_scores, "external": value})
        for point, value in zip(audited_turns, turn_scores, strict=True)
    ]


def _read_lines(path: str, line_type: type[LineT]) -> Iterator[tuple[str, LineT]]:
    """Yield the parsed lines of a JSONL file, each after a text with file name and line number."""
    for number, text in enumerate(Path(path).read_text(encoding="utf-8").split("\n"), start=1):
        source = f"{path}, line {number}"
        try:
            if text.strip():
                yield source, line_type.model_validate_json(text)
        except ValidationError as error:
            (detail, *_) = error.errors()
            field = ".".join(map(str, detail["loc"])) or "the line"
            raise ValueError(
                f"{source}: {field}: {detail['msg']}; fix: write one JSON object with the fields "
                f"{', '.join(line_type.model_fields)}"
            ) from error


# ---- results ---------------------------------------------------------------------------------


def compute_audit_metrics(result: AuditResult) -> dict[str, float]:
    """Return the metrics ``audit/...`` of ``main_audit``: counts, effects and correlations.

    The counts are the audited turns, and the trajectories per thinking level or action. An effect
    is that of a level on the return. A correlation is between an estimator's credit and the
    measured effects.
    """
    metrics = {
        "audit/points": float(result.points),
        "audit/plays": float(result.rollouts_per_option),
        "audit/reliability": result.reliability,
    }
    for level, interval in enumerate(result.level_effects, start=1):
        name = f"{LEVEL_EFFECT_TABLE.prefix}/level_{level}/effect"
        metrics |= make_interval_metrics(name, *interval)
    for score in (result.second_audit, *result.scores):
        metric_prefix = f"{SCORE_AGREEMENT_TABLE.prefix}/{score.name}"
        for name in ("all_levels", "in_won", "in_lost", "chosen"):
            interval = getattr(score, name)
            if interval is not None:
                metrics |= make_interval_metrics(f"{metric_prefix}/{name}", *interval)
    # Omit NaN, such as the correlation of a constant score: metrics files cannot store it.
    return {name: value for name, value in metrics.items() if math.isfinite(value)}


def write_audit_file(
    audited_turns: Sequence[AuditedTurn],
    result: AuditResult,
    directory: Path,
    skip_reasons: Mapping[str, str] | None = None,
) -> Path:
    """Write the audited turns as JSON, with measured returns and the credit of every estimator.

    Return the path of the file, which is below ``directory``. ``skip_reasons`` maps the name of an
    estimator to the reason why it was not compared.
    """
    path = directory / AUDIT_FILE
    audit = dataclasses.asdict(result)
    # Files of earlier versions have these keys.
    audit["levels"] = audit.pop("level_effects")
    audit["plays"] = audit.pop("rollouts_per_option")
    content = {
        "audit": audit,
        "skipped": dict(skip_reasons or {}),
        "points": [dataclasses.asdict(point) for point in audited_turns],
    }
    with atomic_write(path) as file:
        file.write(json.dumps(content, indent=1) + "\n")
    return path


def print_audit_tables(metrics: dict[str, float]) -> None:
    """Print the effects of thinking levels on the return.

    Also print how the credit (advantage) that each estimator gives to a level correlates with them.
    """
    show_tables((LEVEL_EFFECT_TABLE, SCORE_AGREEMENT_TABLE), metrics)
