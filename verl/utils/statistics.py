"""Confidence intervals of rates and ratios, rank correlation, and pass@k, best@k and maj@k."""

import math
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000  # default number of bootstrap resamples
MAX_CONFIDENCE_LEVEL = 1 - 1e-9  # result of ``expand_confidence_level``: must be below 1
# If there are more subsets than this, maj_at_k draws this number of random subsets.
MAX_LISTED_SUBSETS = 2000


def bootstrap_interval(
    values: Sequence[float] | np.ndarray, resamples: int = RESAMPLES
) -> tuple[float, float]:
    """Compute the 95% percentile bootstrap interval of the mean of ``values`` (Efron, 1979).

    ``values`` are independent outcomes, one per task. The same values give the same interval.
    Without values the result is ``(nan, nan)``.
    """
    (means,) = compute_resampled_means([values], resamples)
    return percentile_interval(means)


def rate_interval(values: Sequence[float] | np.ndarray) -> tuple[float, float]:
    """Compute the 95% interval of a success rate from ``values``, one rate (0 to 1) per task.

    The result is the bootstrap interval of the mean, which would have length 0 if all values are
    equal. The result is then the interval of Clopper and Pearson (1934) for values of 0 or 1, and
    that of Wilson (1927) for values between. For example, 0 successes in 4 tasks give the interval
    from 0 to ``1 - 0.025 ** (1 / 4)`` = 0.60.
    """
    confidence_level = 0.95
    outcomes = np.asarray(values, dtype=np.float64)
    if len(outcomes) and (np.all(outcomes == 0) or np.all(outcomes == 1)):
        bound = ((1 - confidence_level) / 2) ** (1 / len(outcomes))
        return (bound, 1.0) if outcomes[0] == 1 else (0.0, 1 - bound)
    if len(outcomes) and np.ptp(outcomes) == 0:
        z = NormalDist().inv_cdf((1 + confidence_level) / 2)
        num_outcomes, rate = len(outcomes), outcomes[0]
        interval_center = (rate + z**2 / (2 * num_outcomes)) / (1 + z**2 / num_outcomes)
        variance = rate * (1 - rate) / num_outcomes + z**2 / (4 * num_outcomes**2)
        half_length = z * math.sqrt(variance) / (1 + z**2 / num_outcomes)
        return float(interval_center - half_length), float(interval_center + half_length)
    return bootstrap_interval(outcomes)


def compute_resampled_means(
    columns: Sequence[Sequence[float] | np.ndarray], resamples: int = RESAMPLES
) -> np.ndarray:
    """Return the means [K, R] of ``columns`` [K, T] over R bootstrap resamples of the T tasks.

    A resample has the same tasks in every column, so differences between columns are paired.
    Without tasks R is 0.
    """
    column_arrays = [np.asarray(column, dtype=np.float64) for column in columns]
    num_tasks = len(column_arrays[0])
    if num_tasks == 0:
        return np.empty((len(column_arrays), 0))
    task_indices = np.random.default_rng(0).integers(0, num_tasks, size=(resamples, num_tasks))
    return np.stack([column_array[task_indices].mean(axis=1) for column_array in column_arrays])


def percentile_interval(values: np.ndarray, confidence_level: float = 0.95) -> tuple[float, float]:
    """Return the bounds of the central share ``confidence_level`` of ``values`` [R].

    ``values`` are a statistic of R resamples. With 0.95 the bounds are the 2.5% and 97.5%
    quantiles. Without values the result is ``(nan, nan)``.
    """
    if len(values) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - confidence_level) / 2, (1 + confidence_level) / 2])
    return float(low), float(high)


def make_interval_metrics(name: str, value: float, low: float, high: float) -> dict[str, float]:
    """Return the metrics ``name``, ``<name>_low`` and ``<name>_high``: a value and its interval."""
    return {name: float(value), f"{name}_low": low, f"{name}_high": high}


def expand_confidence_level(confidence_level: float, count: int) -> float:
    """Return the confidence level to use for a percentile interval of ``count`` independent units.

    With this level the interval has the coverage ``confidence_level``. Without correction,
    percentile intervals are too narrow for two reasons. Resamples have only ``(count - 1) / count``
    of the variance, and they follow a normal distribution instead of Student's t. The expanded
    percentiles of Hesterberg (2015) correct both. ``count`` is at least 2.

        0.95 with 10 units: 0.983; with 64 units: 0.956
    """
    normal_distribution = NormalDist()
    z = normal_distribution.inv_cdf((1 + confidence_level) / 2)
    degrees_of_freedom = count - 1
    # Quantile of Student's t: a series in 1 / degrees_of_freedom (Abramowitz and Stegun, 26.7.5).
    t = (
        z
        + (z**3 + z) / (4 * degrees_of_freedom)
        + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * degrees_of_freedom**2)
    )
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * degrees_of_freedom**3)
    return min(
        1 - 2 * normal_distribution.cdf(-math.sqrt(count / degrees_of_freedom) * t),
        MAX_CONFIDENCE_LEVEL,
    )


def compute_weighted_rank_correlations(
    first: np.ndarray, second: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return Spearman's rank correlations [R] of ``first`` [N] and ``second`` [N] in R samples.

    ``weights[r, n]`` is the number of times that sample r contains the pair n.
    """
    first_ranks = compute_weighted_ranks(first, weights)
    second_ranks = compute_weighted_ranks(second, weights)
    return compute_weighted_correlations(first_ranks, second_ranks, weights)


def compute_weighted_ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the ranks [R, N] of ``values`` [N] in R samples. Tied values get their mean rank.

    ``weights[r, n]`` is the number of times that sample r contains value n.

        values 5, 7, 9 with weights 1, 2, 0: ranks 1, 2.5, 3.5 (the last one is not in the sample)
    """
    distinct_values, value_index = np.unique(values, return_inverse=True)
    sorted_positions = np.argsort(value_index, kind="stable")
    value_starts = np.searchsorted(value_index[sorted_positions], np.arange(len(distinct_values)))
    value_counts = np.add.reduceat(weights[:, sorted_positions], value_starts, axis=1)
    return (value_counts.cumsum(1) - (value_counts - 1) / 2)[:, value_index]


def compute_weighted_correlations(
    first: np.ndarray, second: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return Pearson's correlations [R] of ``first`` and ``second`` (each [N] or [R, N]).

    ``weights[r, n]`` is the weight of pair n in sample r. The result is NaN for a sample in which
    ``first`` or ``second`` is constant.
    """
    total_weights = weights.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        deviations = [
            x - (weights * x).sum(1, keepdims=True) / total_weights for x in (first, second)
        ]
        covariances = (weights * deviations[0] * deviations[1]).sum(1)
        variances = [(weights * deviation**2).sum(1) for deviation in deviations]
        return covariances / np.sqrt(variances[0] * variances[1])


# ---- several answers to one question ------------------------------------------------------------
# pass@k, best@k and maj@k are expectations over subsets of k answers, drawn without replacement
# from n answers to the same question.


def pass_at_k(n: int, num_correct: int, k: int) -> float:
    """Return the probability that a subset of ``k`` answers has a correct one (Chen et al., 2021).

    ``num_correct`` of the ``n`` answers are correct. The result is
    ``1 - C(n - num_correct, k) / C(n, k)``. Example: ``pass_at_k(4, 1, 2)`` is 0.5.
    """
    _require_valid_k(n, k)
    return 1.0 - comb(n - num_correct, k) / comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of a subset of ``k`` of the ``scores``.

    In ascending order (i from 1), the i-th score is the maximum of ``C(i - 1, k - 1)`` of the
    ``C(n, k)`` subsets. Example: ``best_at_k([0, 1, 2], 2)`` is (1 + 2 + 2) / 3.
    """
    _require_valid_k(len(scores), k)
    ascending_scores = sorted(scores)
    num_subsets = comb(len(scores), k)
    return sum(score * (comb(i, k - 1) / num_subsets) for i, score in enumerate(ascending_scores))


def maj_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int) -> float:
    """Return the expected score of the most frequent answer in a subset of ``k`` answers.

    The score of an answer is the mean over its occurrences in the subset. If several answers are
    most frequent, their scores are averaged. If there are more than ``MAX_LISTED_SUBSETS`` subsets,
    this number of subsets is drawn with a fixed seed.
    """
    _require_valid_k(len(answers), k)
    majority_scores = [
        _score_majority(answers, scores, subset) for subset in _list_subsets(len(answers), k)
    ]
    return float(np.mean(majority_scores))


def list_k_values(n: int) -> list[int]:
    """Return the k of reported metrics such as pass@k: the powers of 2 below ``n``, and ``n``."""
    powers_of_2 = [2**i for i in range(n.bit_length()) if 2**i < n]
    return [*powers_of_2, n]


def _require_valid_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k}; allowed: 1 to {n}, the number of answers")


def _list_subsets(n: int, k: int) -> list[tuple[int, ...]]:
    if comb(n, k) <= MAX_LISTED_SUBSETS:
        return list(combinations(range(n), k))
    rng = np.random.default_rng(0)
    drawn_subsets = (rng.choice(n, size=k, replace=False) for _ in range(MAX_LISTED_SUBSETS))
    return [tuple(subset.tolist()) for subset in drawn_subsets]


def _score_majority(
    answers: Sequence[Hashable], scores: Sequence[float], answer_indices: tuple[int, ...]
) -> float:
    """Return the mean score of the most frequent answers in the subset ``answer_indices``."""
    scores_of_answer: dict[Hashable, list[float]] = {}
    for i in answer_indices:
        scores_of_answer.setdefault(answers[i], []).append(scores[i])
    score_lists = scores_of_answer.values()
    max_count = max(map(len, score_lists))
    return float(
        np.mean([np.mean(score_list) for score_list in score_lists if len(score_list) == max_count])
    )
