"""Credit audit: compares scores of thinking levels with measured effects of levels on returns.

A decision point is a turn of a finished episode. There every level is forced and the episode is
continued to its end, M times per level. The effect of a level is its mean return minus the mean
over all levels. Effects are compared with scores over all points.

    point    level   returns         effect            score        centred
    p        1       0 0 1 0         0.25 - mean       -1.3         -1.3 - mean
             2       1 1 1 0         0.75 - mean       -0.2         -0.2 - mean      and so on

Measured effects are noisy. ``reliability`` is the share of their variance that is signal. Its
square root is the correlation that a perfect score would reach.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import numpy as np

from verl.algos.groups import number_keys
from verl.utils.statistics import compute_rank_correlation, percentile_interval

NUM_RESAMPLES = 1000  # bootstrap samples of tasks for an interval
Interval = tuple[float, float, float]  # value, and the bounds of its 95% interval
Measure = Callable[[np.ndarray], float]  # argument: indices of points


@dataclass(frozen=True, slots=True)
class AuditPoint:
    """Turn at which an audit forced every level.

    ``level`` was chosen in the original trajectory, and ``won`` is its success. ``returns`` [4][M]:
    returns of the rollouts that continue with each level. ``scores`` [4]: scores of the levels, by
    score name. ``step_scores``: scores of the original turn. Points of one ``task`` are correlated;
    a point without a task is independent. Field names are keys of ``audit.json``.
    """

    traj_uid: str
    step: int
    level: int
    won: bool
    returns: tuple[tuple[float, ...], ...]
    scores: Mapping[str, tuple[float, ...]]
    step_scores: Mapping[str, float] = field(default_factory=dict)
    task: str | None = None

    @property
    def level_effects(self) -> np.ndarray:
        """Mean return of every level [4], minus the mean over all four levels."""
        return _subtract_mean([fmean(level_returns) for level_returns in self.returns])


@dataclass(frozen=True, slots=True)
class ScoreAudit:
    """Rank correlations of a score with the effects of levels on the return.

    ``all_levels``: over all levels of all points. ``in_won`` and ``in_lost``: over the points in
    successful and in other trajectories. ``chosen_level``: over the chosen level of every point.
    The first three are None for a score that exists for the chosen level only.
    """

    name: str
    all_levels: Interval | None
    in_won: Interval | None
    in_lost: Interval | None
    chosen_level: Interval | None


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Audit of ``points`` points with ``plays`` rollouts per level.

    ``levels``: mean effects of levels 1 to 4. ``reliability``: expected correlation of two audits
    of these points.
    """

    points: int
    plays: int
    levels: tuple[Interval, ...]
    reliability: float
    scores: tuple[ScoreAudit, ...]


def audit_scores(
    points: Sequence[AuditPoint], seed: int = 0, resamples: int = NUM_RESAMPLES
) -> AuditResult:
    """Compare every score of ``points`` with the effects, and also ``random``, a score of noise.

    Intervals are from ``resamples`` bootstrap samples of tasks, each task with all of its points.
    Raises ``ValueError`` without points.
    """
    if not points:
        raise ValueError(
            "the audit needs at least one decision point without failed rollouts, and there is none"
        )
    effects = np.array([point.level_effects for point in points])
    numbered_tasks = enumerate(point.task for point in points)
    tasks = number_keys(
        [point_index if task is None else task for point_index, task in numbered_tasks]
    ).numpy()
    score_tables = {
        name: np.array([_subtract_mean(point.scores[name]) for point in points])
        for name in points[0].scores
    }
    score_tables["random"] = np.random.default_rng(seed).normal(size=effects.shape)
    # Index of the chosen level of each point.
    chosen_indices = np.arange(len(points)), np.array([point.level - 1 for point in points])
    chosen_effects = effects[chosen_indices]

    def compute_interval(measure: Measure, counted: np.ndarray | None = None) -> Interval:
        point_indices = np.arange(len(points)) if counted is None else counted.nonzero()[0]
        return _bootstrap_interval(measure, point_indices, tasks, seed, resamples)

    def correlate_ranks(
        first: np.ndarray, second: np.ndarray, counted: np.ndarray | None = None
    ) -> Interval:
        return compute_interval(
            lambda drawn: _correlate_ranks(first[drawn], second[drawn]), counted
        )

    is_success = np.array([point.won for point in points])
    score_audits = [
        ScoreAudit(
            name,
            all_levels=correlate_ranks(table, effects),
            in_won=correlate_ranks(table, effects, is_success),
            in_lost=correlate_ranks(table, effects, ~is_success),
            chosen_level=correlate_ranks(table[chosen_indices], chosen_effects),
        )
        for name, table in score_tables.items()
    ]
    for name in points[0].step_scores:
        values = np.array([point.step_scores[name] for point in points])
        score_audits.append(
            ScoreAudit(name, None, None, None, correlate_ranks(values, chosen_effects))
        )
    return AuditResult(
        points=len(points),
        plays=len(points[0].returns[0]),
        levels=tuple(compute_interval(partial(_mean_at, column)) for column in effects.T),
        reliability=compute_reliability(points),
        scores=tuple(score_audits),
    )


def compute_reliability(points: Sequence[AuditPoint]) -> float:
    """Return the expected correlation of the effects of two audits of the same points.

    It is computed from two halves of the rollouts (Spearman-Brown); NaN with one rollout per level.

        correlation of the halves 0.5: reliability 2 * 0.5 / (1 + 0.5) = 0.67
    """
    even_effects = np.array([_compute_half_effects(point, 0) for point in points])
    odd_effects = np.array([_compute_half_effects(point, 1) for point in points])
    # Numpy returns NaN with a warning where all values are equal.
    with np.errstate(invalid="ignore", divide="ignore"):
        half_correlation = np.corrcoef(even_effects.ravel(), odd_effects.ravel())[0, 1]
        return float(2 * half_correlation / (1 + half_correlation))


def _compute_half_effects(point: AuditPoint, which: int) -> np.ndarray:
    """Return the effects [4] from the rollouts ``which``, ``which + 2``, ... of every level."""
    halves = [level_returns[which::2] for level_returns in point.returns]
    return _subtract_mean([fmean(half) if half else math.nan for half in halves])


def _subtract_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    return array - array.mean()


def _bootstrap_interval(
    measure: Measure, point_indices: np.ndarray, tasks: np.ndarray, seed: int, resamples: int
) -> Interval:
    """Return ``measure`` of the points at ``point_indices``, with a percentile bootstrap interval.

    Tasks are resampled, because neither levels of a point nor points of a task are independent.
    """
    if not len(point_indices):
        return math.nan, math.nan, math.nan
    task_ids = dict.fromkeys(tasks[point_indices].tolist())
    points_by_task = [point_indices[tasks[point_indices] == task] for task in task_ids]
    resamples_of_tasks = np.random.default_rng(seed).integers(
        len(points_by_task), size=(resamples, len(points_by_task))
    )
    values = np.array(
        [measure(np.concatenate([points_by_task[n] for n in row])) for row in resamples_of_tasks]
    )
    # The correlation of a resample with equal values is NaN.
    finite_values = values[~np.isnan(values)]
    return measure(point_indices), *percentile_interval(finite_values)


def _mean_at(values: np.ndarray, point_indices: np.ndarray) -> float:
    return float(values[point_indices].mean())


def _correlate_ranks(first: np.ndarray, second: np.ndarray) -> float:
    return compute_rank_correlation(first.ravel().tolist(), second.ravel().tolist())
