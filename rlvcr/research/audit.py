"""Credit audit: agreement of the scores of thinking levels with their effects on returns.

At a decision point every level is forced and the episode continued to its end, M times. The mean
return minus the mean over all levels is the effect of a level. Effects are compared with scores
over all points.

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

from verl.algos.groups import factorize
from verl.utils.statistics import percentile_interval, rank_correlation

RESAMPLES = 1000  # bootstrap samples of tasks for an interval
Interval = tuple[float, float, float]  # value, and the bounds of its 95% interval
Measure = Callable[[np.ndarray], float]  # argument: indices of points


@dataclass(frozen=True, slots=True)
class AuditPoint:
    """Decision point of an audit.

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
    def effects(self) -> np.ndarray:
        """Mean return of every level [4], minus that of all four."""
        return _centred([fmean(earned) for earned in self.returns])


@dataclass(frozen=True, slots=True)
class ScoreAudit:
    """Rank correlations of a score with effects.

    They are over all levels of all points, over those of points in successful (``in_won``) and
    other (``in_lost``) trajectories, and over chosen levels only. None where the score has no such
    values.
    """

    name: str
    all_levels: Interval | None
    in_won: Interval | None
    in_lost: Interval | None
    chosen_level: Interval | None


@dataclass(frozen=True, slots=True)
class Audit:
    """Audit of ``points`` points with ``plays`` rollouts per level.

    ``levels``: mean effects of levels 1 to 4. ``reliability``: expected correlation of two audits
    of these points.
    """

    points: int
    plays: int
    levels: tuple[Interval, ...]
    reliability: float
    scores: tuple[ScoreAudit, ...]


def audit(points: Sequence[AuditPoint], seed: int = 0, resamples: int = RESAMPLES) -> Audit:
    """Compare every score of ``points`` with the effects, and also ``random``, a score of noise.

    Intervals are from ``resamples`` bootstrap samples of tasks, each task with all of its points.
    Raises ``ValueError`` without points.
    """
    if not points:
        raise ValueError(
            "the audit needs at least one decision point without failed rollouts, and there is none"
        )
    effects = np.array([point.effects for point in points])
    alone = enumerate(point.task for point in points)
    tasks = factorize([number if task is None else task for number, task in alone]).numpy()
    tables = {
        name: np.array([_centred(point.scores[name]) for point in points])
        for name in points[0].scores
    }
    tables["random"] = np.random.default_rng(seed).normal(size=effects.shape)
    # Index of the chosen level of each point.
    chosen = np.arange(len(points)), np.array([point.level - 1 for point in points])
    own = effects[chosen]

    def interval(measure: Measure, counted: np.ndarray | None = None) -> Interval:
        places = np.arange(len(points)) if counted is None else counted.nonzero()[0]
        return _interval(measure, places, tasks, seed, resamples)

    def correlation(
        first: np.ndarray, second: np.ndarray, counted: np.ndarray | None = None
    ) -> Interval:
        return interval(lambda drawn: _ranked(first[drawn], second[drawn]), counted)

    won = np.array([point.won for point in points])
    found = [
        ScoreAudit(
            name,
            all_levels=correlation(table, effects),
            in_won=correlation(table, effects, won),
            in_lost=correlation(table, effects, ~won),
            chosen_level=correlation(table[chosen], own),
        )
        for name, table in tables.items()
    ]
    for name in points[0].step_scores:
        values = np.array([point.step_scores[name] for point in points])
        found.append(ScoreAudit(name, None, None, None, correlation(values, own)))
    return Audit(
        points=len(points),
        plays=len(points[0].returns[0]),
        levels=tuple(interval(partial(_mean_of, column)) for column in effects.T),
        reliability=reliability(points),
        scores=tuple(found),
    )


def reliability(points: Sequence[AuditPoint]) -> float:
    """Return the expected correlation of effects with those of a second audit of the same points.

    It is computed from two halves of the rollouts (Spearman-Brown); NaN with one rollout per level.

        correlation of the halves 0.5: reliability 2 * 0.5 / (1 + 0.5) = 0.67
    """
    first = np.array([_half(point, 0) for point in points])
    second = np.array([_half(point, 1) for point in points])
    # Numpy returns NaN with a warning where all values are equal.
    with np.errstate(invalid="ignore", divide="ignore"):
        half = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        return float(2 * half / (1 + half))


def _half(point: AuditPoint, which: int) -> np.ndarray:
    """Return effects [4] from every other rollout, beginning at rollout ``which``."""
    halves = [earned[which::2] for earned in point.returns]
    return _centred([fmean(half) if half else math.nan for half in halves])


def _centred(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    return array - array.mean()


def _interval(
    measure: Measure, places: np.ndarray, tasks: np.ndarray, seed: int, resamples: int
) -> Interval:
    """Return ``measure`` of the points at ``point_indices``, with a percentile bootstrap interval.

    Tasks are resampled, because neither levels of a point nor points of a task are independent.
    """
    if not len(places):
        return math.nan, math.nan, math.nan
    there = dict.fromkeys(tasks[places].tolist())
    members = [places[tasks[places] == task] for task in there]
    drawn = np.random.default_rng(seed).integers(len(members), size=(resamples, len(members)))
    found = np.array([measure(np.concatenate([members[n] for n in row])) for row in drawn])
    # The correlation of a resample with equal values is NaN.
    known = found[~np.isnan(found)]
    return measure(places), *percentile_interval(known)


def _mean_of(values: np.ndarray, places: np.ndarray) -> float:
    return float(values[places].mean())


def _ranked(first: np.ndarray, second: np.ndarray) -> float:
    return rank_correlation(first.ravel().tolist(), second.ravel().tolist())
