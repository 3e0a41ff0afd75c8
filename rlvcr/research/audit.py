"""The credit audit: does a score of thinking levels say what the levels are worth?

At a decision point every level is forced and played on with, M times. What the plays earn is the
true effect of the level there; what a score says beforehand is compared with it, over all points.

    point    level   plays earn      effect            score        centred
    p        1       0 0 1 0         0.25 - mean       -1.3         -1.3 - mean
             2       1 1 1 0         0.75 - mean       -0.2         -0.2 - mean      and so on

Effects are themselves measured with noise. ``reliability`` says how much of them is signal, and its
root is what a perfect score would reach.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import numpy as np

from verl.algos.groups import factorize
from verl.utils.statistics import percentile_interval, rank_correlation

RESAMPLES = 1000  # of tasks, for an interval
Interval = tuple[float, float, float]  # value, and the bounds of its 95% interval
Measure = Callable[[np.ndarray], float]  # of the points with these numbers


@dataclass(frozen=True, slots=True)
class AuditPoint:
    """One decision point: where it lies, the ``level`` that was chosen and whether its play was
    ``won``, ``returns`` [4][M] of plays that went on from it at every level, what ``scores`` [4]
    said of the levels, what ``step_scores`` said of the step that was played, and the ``task``,
    whose points are like each other; without one a point stands alone.
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
        """[4] mean return of every level, less that of all four."""
        return _centred([fmean(earned) for earned in self.returns])


@dataclass(frozen=True, slots=True)
class ScoreAudit:
    """How a score agrees with effects, in ranks: over all levels of all points, over those of
    points in won and in lost plays, and over the chosen levels alone. None where the score says
    nothing of the kind.
    """

    name: str
    all_levels: Interval | None
    in_won: Interval | None
    in_lost: Interval | None
    chosen_level: Interval | None


@dataclass(frozen=True, slots=True)
class Audit:
    """The audit of ``points`` points with ``plays`` plays per level.

    ``levels`` are the mean effects of levels 1 to 4, ``reliability`` is the correlation that two
    audits of these points would have.
    """

    points: int
    plays: int
    levels: tuple[Interval, ...]
    reliability: float
    scores: tuple[ScoreAudit, ...]


def audit(points: Sequence[AuditPoint], seed: int = 0, resamples: int = RESAMPLES) -> Audit:
    """Compare every score of ``points`` with what the levels earned; adds ``random``, a score that
    knows nothing.

    Intervals are of ``resamples`` bootstrap samples of tasks, each with all of its points. Raises
    ``ValueError`` without points.
    """
    if not points:
        raise ValueError("no decision point was played: nothing can be audited")
    effects = np.array([point.effects for point in points])
    alone = enumerate(point.task for point in points)
    tasks = factorize([number if task is None else task for number, task in alone]).numpy()
    tables = {
        name: np.array([_centred(point.scores[name]) for point in points])
        for name in points[0].scores
    }
    tables["random"] = np.random.default_rng(seed).normal(size=effects.shape)
    # Row by row, the column of the level that was chosen.
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
    """Correlation of effects with those of a second audit of the same points, from two halves of
    the plays (Spearman and Brown); NaN with one play per level.
    """
    first = np.array([_half(point, 0) for point in points])
    second = np.array([_half(point, 1) for point in points])
    # Where nothing differs there is no correlation, and numpy says so with NaN and a warning.
    with np.errstate(invalid="ignore", divide="ignore"):
        half = np.corrcoef(first.ravel(), second.ravel())[0, 1]
        return float(2 * half / (1 + half))


def _half(point: AuditPoint, which: int) -> np.ndarray:
    """Effects [4] by every other play."""
    halves = [earned[which::2] for earned in point.returns]
    return _centred([fmean(half) if half else math.nan for half in halves])


def _centred(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    return array - array.mean()


def _interval(
    measure: Measure, places: np.ndarray, tasks: np.ndarray, seed: int, resamples: int
) -> Interval:
    """``measure`` of the points at ``places``, with the percentile bootstrap interval over their
    tasks: neither the levels of a point nor the points of a task are independent of each other.
    """
    if not len(places):
        return math.nan, math.nan, math.nan
    there = dict.fromkeys(tasks[places].tolist())
    members = [places[tasks[places] == task] for task in there]
    drawn = np.random.default_rng(seed).integers(len(members), size=(resamples, len(members)))
    found = np.array([measure(np.concatenate([members[n] for n in row])) for row in drawn])
    # A resample in which nothing differs has no correlation.
    known = found[~np.isnan(found)]
    return measure(places), *percentile_interval(known)


def _mean_of(values: np.ndarray, places: np.ndarray) -> float:
    return float(values[places].mean())


def _ranked(first: np.ndarray, second: np.ndarray) -> float:
    return rank_correlation(first.ravel().tolist(), second.ravel().tolist())
