"""Credit audit: compares credit rules with measured effects of decisions on the return.

A credit rule gives each decision a score, for example the thinking advantage of a thinking level. A
decision point is a turn of a finished episode. There every option is executed M times, and the
episode is continued to its end. The options are the four thinking levels, or K actions. The effect
of an option is its mean return minus the mean over all options of the point.

    point    level   returns         effect            score        centred
    p        1       0 0 1 0         0.25 - mean       -1.3         -1.3 - mean
             2       1 1 1 0         0.75 - mean       -0.2         -0.2 - mean      and so on

Credit rules are compared with the effects over all points. Some rules have a score for every level.
The other rules have a score only for the option that the original trajectory chose.

Measured effects are noisy. ``reliability`` is the expected correlation of the effects with those of
a second audit of the same points. Its square root is the correlation of the measured with the true
effects, which is the highest that a score can reach.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from statistics import fmean

import numpy as np

from verl.algos.groups import factorize_keys
from verl.utils.statistics import (
    compute_weighted_correlations,
    compute_weighted_rank_correlations,
    expand_confidence_level,
    percentile_interval,
)

NUM_RESAMPLES = 1000  # bootstrap samples of tasks for an interval
SECOND_AUDIT = "second_audit"  # table line with the expected correlation of two audits
Interval = tuple[float, float, float]  # value, and the bounds of its 95% interval
# Function of the weights [R, P] of P points in R samples; returns one value per sample [R]
WeightedMeasure = Callable[[np.ndarray], np.ndarray]
# Function of two arrays, each [P] or [P, K], and of weights [R, P]; returns values [R]
WeightedPairMeasure = Callable[[np.ndarray, np.ndarray, np.ndarray], np.ndarray]


@dataclass(frozen=True, slots=True)
class AuditedTurn:
    """Turn at which an audit executed K options: all thinking levels, or several actions.

    After each option the episode was continued to its end. ``returns`` [K][M] are the returns of M
    such rollouts per option. ``chosen`` is the number (from 1) of the option in the original
    trajectory. ``won`` is true if this trajectory had success.

    A credit rule gives an option a score. ``scores`` has the scores [K] of all options by credit
    rule; it is empty for actions. ``step_scores`` has the score of the chosen option by credit
    rule, NaN if it is unknown. ``step`` is the turn number and ``seed`` the seed of the episode.
    Turns of one ``task`` are correlated; a turn without a task is independent. ``options`` are the
    actions; it is empty for levels. Field names are keys of ``audit.json``.
    """

    traj_uid: str
    step: int
    chosen: int
    won: bool
    returns: tuple[tuple[float, ...], ...]
    scores: Mapping[str, tuple[float, ...]]
    step_scores: Mapping[str, float] = field(default_factory=dict)
    task: str | None = None
    seed: int = 0
    options: tuple[str, ...] = ()

    @property
    def option_effects(self) -> np.ndarray:
        """Effect of every option [K]: its mean return minus the mean over all options."""
        return _subtract_mean([fmean(option_returns) for option_returns in self.returns])


@dataclass(frozen=True, slots=True)
class ScoreCorrelations:
    """Rank correlations of one score with the measured effects of options on the return.

    A score is the credit that a rule gives to an option. A point is a turn at which all options
    (levels or actions) were executed. ``all_levels``: over all levels of all points. ``in_won``:
    over the points in successful trajectories. ``in_lost``: over the points in unsuccessful
    trajectories. ``chosen``: over the original option of every point. The first three are None for
    a score that exists for the original option only.
    """

    name: str
    all_levels: Interval | None
    in_won: Interval | None
    in_lost: Interval | None
    chosen: Interval


@dataclass(frozen=True, slots=True)
class AuditResult:
    """Result of an audit: credit rules compared with measured effects of options on the return.

    An option is a thinking level or an action. At each of ``points`` turns every option was
    executed ``rollouts_per_option`` times. ``level_effects``: mean effects of levels 1 to 4; empty
    for actions. ``scores``: correlations of each credit rule with the effects, sorted by the
    correlation at the chosen options. ``reliability``: expected correlation of the effects of all
    options in two audits. ``second_audit``: this expected correlation for all options, for those of
    turns in successful and in unsuccessful trajectories, and for the chosen options.
    """

    points: int
    rollouts_per_option: int
    level_effects: tuple[Interval, ...]
    reliability: float
    second_audit: ScoreCorrelations
    scores: tuple[ScoreCorrelations, ...]


def correlate_scores(
    turns: Sequence[AuditedTurn], seed: int = 0, resamples: int = NUM_RESAMPLES
) -> AuditResult:
    """Compare every score of the audited turns ``turns`` with the measured effects of options.

    A score is the credit that a rule gives to an option (level or action). The score ``random``, of
    random numbers, is added as a control. Intervals are from ``resamples`` bootstrap samples of
    tasks, each task with all of its turns. Raises ``ValueError`` without turns.
    """
    if not turns:
        raise ValueError(
            "the audit needs at least one decision point without failed rollouts, and there is none"
        )
    audit_statistics = _AuditStatistics(turns, seed, resamples)
    rng = np.random.default_rng(seed)
    random_scores = [rng.normal(size=len(turn.returns)) for turn in turns]
    step_scores = {
        name: np.array([turn.step_scores[name] for turn in turns]) for name in turns[0].step_scores
    }
    if turns[0].scores:
        centred_scores = {
            name: np.array([_subtract_mean(turn.scores[name]) for turn in turns])
            for name in turns[0].scores
        }
        option_effects = np.array([turn.option_effects for turn in turns])
        level_effects = tuple(
            audit_statistics.compute_interval(partial(_compute_means, c)) for c in option_effects.T
        )
        score_correlations = [
            audit_statistics.compute_level_statistics(name, _correlate_ranks, table, option_effects)
            for name, table in {**centred_scores, "random": np.array(random_scores)}.items()
        ]
    else:
        step_scores["random"] = _select_chosen_values(turns, random_scores)
        level_effects, score_correlations = (), []
    chosen_option_effects = _select_chosen_values(turns, [turn.option_effects for turn in turns])
    score_correlations += [
        audit_statistics.compute_chosen_statistics(
            name, _correlate_ranks, values, chosen_option_effects
        )
        for name, values in step_scores.items()
    ]
    return AuditResult(
        points=len(turns),
        rollouts_per_option=len(turns[0].returns[0]),
        level_effects=level_effects,
        reliability=compute_reliability(turns),
        second_audit=_estimate_audit_reliability(audit_statistics, turns),
        scores=tuple(sorted(score_correlations, key=_get_correlation_sort_key)),
    )


class _AuditStatistics:
    """Statistics of the audited turns ``turns``, with bootstrap intervals over tasks."""

    def __init__(self, turns: Sequence[AuditedTurn], seed: int, resamples: int) -> None:
        self._turns = turns
        self._seed, self._num_resamples = seed, resamples
        numbered_tasks = enumerate(turn.task for turn in turns)
        self._tasks = factorize_keys(
            [point_index if task is None else task for point_index, task in numbered_tasks]
        ).numpy()
        self._is_success = np.array([turn.won for turn in turns])

    def compute_interval(
        self, measure: WeightedMeasure, selected: np.ndarray | None = None
    ) -> Interval:
        """Compute a statistic of the audited turns by ``measure``, with its bootstrap interval.

        ``selected`` [P] marks the turns to include (default: all).
        """
        is_counted = np.ones(len(self._turns), dtype=bool) if selected is None else selected
        return _bootstrap_interval(
            measure, is_counted, self._tasks, self._seed, self._num_resamples
        )

    def compute_level_statistics(
        self, name: str, measure: WeightedPairMeasure, first: np.ndarray, second: np.ndarray
    ) -> ScoreCorrelations:
        """Return the statistic ``measure`` of two tables of values [P, K] (P turns, K levels).

        The statistic is computed for all levels, for those in successful and in unsuccessful
        trajectories, and for the chosen ones. ``name`` is the name of the score in ``first``.
        """
        measure_levels = partial(measure, first, second)
        chosen_values = [_select_chosen_values(self._turns, table) for table in (first, second)]
        return ScoreCorrelations(
            name,
            all_levels=self.compute_interval(measure_levels),
            in_won=self.compute_interval(measure_levels, self._is_success),
            in_lost=self.compute_interval(measure_levels, ~self._is_success),
            chosen=self.compute_interval(partial(measure, chosen_values[0], chosen_values[1])),
        )

    def compute_chosen_statistics(
        self, name: str, measure: WeightedPairMeasure, first: np.ndarray, second: np.ndarray
    ) -> ScoreCorrelations:
        """Return the statistic ``measure`` of two arrays [P], with one value per audited turn.

        A value belongs to the option (level or action) that the original trajectory chose. Turns
        where ``first`` is NaN are omitted. ``name`` is the name of the score in ``first``.
        """
        interval = self.compute_interval(partial(measure, first, second), ~np.isnan(first))
        return ScoreCorrelations(name, None, None, None, interval)


def _estimate_audit_reliability(
    audit_statistics: _AuditStatistics, turns: Sequence[AuditedTurn]
) -> ScoreCorrelations:
    """Return the correlations that the measured effects would have with those of a second audit.

    They are estimated from two halves of the rollouts, and show how noisy the effects are.
    """
    first, second = (
        [_compute_split_half_effects(turn, half_index) for turn in turns] for half_index in (0, 1)
    )
    if turns[0].scores:
        return audit_statistics.compute_level_statistics(
            SECOND_AUDIT, _compute_reliabilities, np.array(first), np.array(second)
        )
    chosen = _select_chosen_values(turns, first), _select_chosen_values(turns, second)
    return audit_statistics.compute_chosen_statistics(SECOND_AUDIT, _compute_reliabilities, *chosen)


def compute_reliability(turns: Sequence[AuditedTurn]) -> float:
    """Return the expected correlation of the effects that two audits measure at the same turns.

    The effect of an option (level or action) is its mean return minus the mean over all options of
    the turn. The result is computed from two halves of the rollouts of ``turns`` (Spearman-Brown);
    NaN with one rollout per option.

        correlation of the halves 0.5: reliability 2 * 0.5 / (1 + 0.5) = 0.67
    """
    half_effects = [
        np.concatenate([_compute_split_half_effects(turn, half_index) for turn in turns])
        for half_index in (0, 1)
    ]
    weights = np.ones((1, len(half_effects[0])))
    return float(_compute_reliabilities(half_effects[0], half_effects[1], weights)[0])


def _compute_reliabilities(
    first_effects: np.ndarray, second_effects: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    weights = _repeat_weights_for_options(weights, first_effects)
    half_correlations = compute_weighted_correlations(
        first_effects.ravel(), second_effects.ravel(), weights
    )
    with np.errstate(divide="ignore"):
        # Spearman-Brown formula. It is below -1 if the correlation of the halves is below -1/3.
        return np.maximum(2 * half_correlations / (1 + half_correlations), -1.0)


def _compute_split_half_effects(turn: AuditedTurn, half_index: int) -> np.ndarray:
    """Return the effects [K] of all options, measured with every second one of their rollouts."""
    half_returns = [option_returns[half_index::2] for option_returns in turn.returns]
    return _subtract_mean([fmean(half) if half else math.nan for half in half_returns])


def _select_chosen_values(
    turns: Sequence[AuditedTurn], values: Sequence[np.ndarray] | np.ndarray
) -> np.ndarray:
    """Return the value of the option that the original trajectory chose, for each turn [P]."""
    return np.array([row[turn.chosen - 1] for turn, row in zip(turns, values, strict=True)])


def _get_correlation_sort_key(score: ScoreCorrelations) -> float:
    """Return a sort key: the highest correlation comes first, unknown correlations last."""
    return math.inf if math.isnan(score.chosen[0]) else -score.chosen[0]


def _subtract_mean(values: Sequence[float] | np.ndarray) -> np.ndarray:
    array = np.asarray(values)
    return array - array.mean()


def _bootstrap_interval(
    measure: WeightedMeasure,
    is_counted: np.ndarray,
    task_numbers: np.ndarray,
    seed: int,
    resamples: int,
) -> Interval:
    """Return the statistic ``measure`` of the counted turns, with a bootstrap interval over tasks.

    Tasks are resampled, because neither the options of a turn nor the turns of a task are
    independent. With one task there are no bounds (NaN).
    """
    if not is_counted.any():
        return math.nan, math.nan, math.nan
    counted_tasks = factorize_keys(task_numbers[is_counted].tolist()).numpy()
    num_tasks = int(counted_tasks.max()) + 1

    def weigh_points(task_counts: np.ndarray) -> np.ndarray:
        weights = np.zeros((len(task_counts), len(task_numbers)))
        weights[:, is_counted] = task_counts[:, counted_tasks]
        return weights

    (value,) = measure(weigh_points(np.ones((1, num_tasks))))
    if num_tasks < 2:
        return float(value), math.nan, math.nan
    drawn_tasks = np.random.default_rng(seed).integers(num_tasks, size=(resamples, num_tasks))
    resample_counts = np.stack([np.bincount(draw, minlength=num_tasks) for draw in drawn_tasks])
    resampled_values = measure(weigh_points(resample_counts))
    # In a resample with equal values, correlation and reliability are NaN.
    finite_values = resampled_values[np.isfinite(resampled_values)]
    confidence_level = expand_confidence_level(0.95, num_tasks)
    return float(value), *percentile_interval(finite_values, confidence_level)


def _repeat_weights_for_options(weights: np.ndarray, values: np.ndarray) -> np.ndarray:
    """Return the bootstrap weights [R, P] of P turns as one weight per value.

    R is the number of bootstrap samples. If ``values`` is [P, K], each weight is repeated for the K
    options of its turn.
    """
    return np.repeat(weights, values.size // weights.shape[1], axis=1)


def _compute_means(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    return (weights * values).sum(1) / weights.sum(1)


def _correlate_ranks(
    first_values: np.ndarray, second_values: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    weights = _repeat_weights_for_options(weights, first_values)
    return compute_weighted_rank_correlations(first_values.ravel(), second_values.ravel(), weights)
