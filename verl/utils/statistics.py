"""Confidence intervals of rates and ratios, rank correlation, and pass@k, best@k and maj@k."""

import math
from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb
from statistics import NormalDist

import numpy as np

RESAMPLES = 10_000
# With few units the interval reaches from the smallest to the largest value.
LARGEST_LEVEL = 1 - 1e-9
# Above this number of subsets, maj_at_k draws this many instead of listing all.
MAX_LISTED_SUBSETS = 2000


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    confidence_level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the mean of ``values`` (Efron, 1979).

    ``values`` are independent outcomes, one per task. The same values and ``seed`` give the same
    interval. Without values the result is ``(nan, nan)``.
    """
    (means,) = compute_resampled_means([values], resamples, seed)
    return percentile_interval(means, confidence_level)


def rate_interval(
    values: Sequence[float] | np.ndarray, confidence_level: float = 0.95
) -> tuple[float, float]:
    """Compute the interval of a success rate: ``bootstrap_interval`` or Clopper-Pearson (1934).

    The latter applies if all ``values`` are equal, so that all resamples would be. For example 0
    successes of 4 give 0 to ``1 - 0.025 ** (1 / 4)`` = 0.60.
    """
    rates = np.asarray(values, dtype=np.float64)
    if len(rates) and (np.all(rates == 0) or np.all(rates == 1)):
        far_bound = ((1 - confidence_level) / 2) ** (1 / len(rates))
        return (far_bound, 1.0) if rates[0] == 1 else (0.0, 1 - far_bound)
    return bootstrap_interval(rates, confidence_level)


def compute_resampled_means(
    columns: Sequence[Sequence[float] | np.ndarray], resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Return the means [K, R] of ``columns`` [K, T] over R resamples of the T tasks.

    R is 0 without tasks. A resample has the same tasks in every column: differences are paired.
    """
    samples = [np.asarray(column, dtype=np.float64) for column in columns]
    tasks = len(samples[0])
    if tasks == 0:
        return np.empty((len(samples), 0))
    # All resamples at once: the indices take 80 MB for 1,000 tasks.
    task_indices = np.random.default_rng(seed).integers(0, tasks, size=(resamples, tasks))
    return np.stack([sample[task_indices].mean(axis=1) for sample in samples])


def percentile_interval(values: np.ndarray, confidence_level: float = 0.95) -> tuple[float, float]:
    """Return the bounds of the central ``confidence_level`` of a statistic ``values [R]``.

    Without values the result is ``(nan, nan)``.
    """
    if not 0 < confidence_level < 1:
        raise ValueError(
            f"confidence_level={confidence_level}; allowed: between 0 and 1, exclusive"
        )
    if len(values) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - confidence_level) / 2, (1 + confidence_level) / 2])
    return float(low), float(high)


def expand_confidence_level(confidence_level: float, count: int) -> float:
    """Return the level of percentiles whose bootstrap interval covers with ``confidence_level``.

    Percentile intervals of ``count`` independent units are too narrow. Resamples vary by ``(count -
    1) / count`` of the variance, and the normal distribution replaces Student's t. The expanded
    percentiles of Hesterberg (2015) correct both. ``count`` is at least 2.

        0.95 of 10 units: 0.983, of 64 units: 0.956
    """
    normal = NormalDist()
    z = normal.inv_cdf((1 + confidence_level) / 2)
    nu = count - 1
    # Quantile of Student's t, expanded in 1 / nu (Abramowitz and Stegun, 26.7.5).
    t = z + (z**3 + z) / (4 * nu) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * nu**2)
    t += (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * nu**3)
    return min(1 - 2 * normal.cdf(-math.sqrt(count / nu) * t), LARGEST_LEVEL)


def compute_rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Spearman's rank correlation; tied values get the mean of their ranks.

    NaN for fewer than two values, or if one of the lists is constant. Raises ``ValueError`` for
    lists of different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"the lists must have the same length, not {len(first)} and {len(second)}")
    if len(first) < 2:
        return math.nan
    weights = np.ones((1, len(first)))
    return float(
        compute_weighted_rank_correlations(np.asarray(first), np.asarray(second), weights)[0]
    )


def compute_weighted_rank_correlations(
    first: np.ndarray, second: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return Spearman's rank correlations [R] of ``first`` [N] and ``second`` [N] in R samples.

    ``weights`` [R, N] are the numbers of times that a sample contains each value.
    """
    first_ranks = compute_weighted_ranks(first, weights)
    second_ranks = compute_weighted_ranks(second, weights)
    return compute_weighted_correlations(first_ranks, second_ranks, weights)


def compute_weighted_ranks(values: np.ndarray, weights: np.ndarray) -> np.ndarray:
    """Return the ranks [R, N] of ``values`` [N] in R samples; tied values get their mean rank.

    ``weights`` [R, N] are the numbers of times that a sample contains each value.

        values 5, 7, 9 with weights 1, 2, 0: ranks 1, 2.5, 3.5 (the last one is not in the sample)
    """
    distinct, value_index = np.unique(values, return_inverse=True)
    order = np.argsort(value_index, kind="stable")
    starts = np.searchsorted(value_index[order], np.arange(len(distinct)))
    counts = np.add.reduceat(weights[:, order], starts, axis=1)
    # The last rank of a value minus half the number of its other ties is its mean rank.
    return (counts.cumsum(1) - (counts - 1) / 2)[:, value_index]


def compute_weighted_correlations(
    first: np.ndarray, second: np.ndarray, weights: np.ndarray
) -> np.ndarray:
    """Return Pearson's correlations [R] of ``first`` and ``second`` ([N] or [R, N]).

    ``weights`` [R, N] are the weights of the values in R samples. NaN where one of the two is
    constant in the sample.
    """
    total = weights.sum(1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        deviations = [x - (weights * x).sum(1, keepdims=True) / total for x in (first, second)]
        products = (weights * deviations[0] * deviations[1]).sum(1)
        squares = [(weights * deviation**2).sum(1) for deviation in deviations]
        return products / np.sqrt(squares[0] * squares[1])


# ---- several answers to one question ------------------------------------------------------------
# pass@k, best@k and maj@k are unbiased estimates of expectations over k answers, drawn without
# replacement from the n answers.


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of ``k`` answers is correct (Chen et al., 2021).

    ``correct`` of ``n`` are correct: ``1 - C(n - correct, k) / C(n, k)``. ``pass_at_k(4, 1, 2)`` is
    0.5.
    """
    _require_valid_k(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"correct={correct}; allowed: 0 to n={n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of ``k`` of the ``scores``.

    In ascending order, the i-th score is the maximum of ``C(i - 1, k - 1)`` of the ``C(n, k)``
    subsets.
    """
    _require_valid_k(len(scores), k)
    ordered = sorted(scores)
    num_subsets = comb(len(scores), k)
    return sum(score * (comb(i, k - 1) / num_subsets) for i, score in enumerate(ordered))


def maj_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int, seed: int = 0) -> float:
    """Return the expected score of the most frequent answer among ``k`` of the ``answers``.

    Equally frequent answers count with their mean score, an answer with the mean over its
    occurrences. At most ``MAX_LISTED_SUBSETS`` subsets are listed; of more, as many are drawn with
    ``seed``.
    """
    if len(answers) != len(scores):
        raise ValueError(
            f"answers and scores must have the same length, not {len(answers)} and {len(scores)}"
        )
    _require_valid_k(len(answers), k)
    majority_scores = [
        _score_majority(answers, scores, subset) for subset in _list_subsets(len(answers), k, seed)
    ]
    return float(np.mean(majority_scores))


def list_powers_up_to(n: int) -> list[int]:
    """Return the powers of 2 below ``n``, and ``n``: the values of k that are reported."""
    powers = [2**i for i in range(n.bit_length()) if 2**i < n]
    return [*powers, n]


def _require_valid_k(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k}; allowed: 1 to {n}, the number of answers")


def _list_subsets(n: int, k: int, seed: int) -> list[tuple[int, ...]]:
    if comb(n, k) <= MAX_LISTED_SUBSETS:
        return list(combinations(range(n), k))
    rng = np.random.default_rng(seed)
    draws = (rng.choice(n, size=k, replace=False) for _ in range(MAX_LISTED_SUBSETS))
    return [tuple(draw.tolist()) for draw in draws]


def _score_majority(
    answers: Sequence[Hashable], scores: Sequence[float], answer_indices: tuple[int, ...]
) -> float:
    """Return the mean score of the most frequent answers among those at ``answer_indices``."""
    scores_of_answer: dict[Hashable, list[float]] = {}
    for i in answer_indices:
        scores_of_answer.setdefault(answers[i], []).append(scores[i])
    groups = scores_of_answer.values()
    max_count = max(map(len, groups))
    return float(np.mean([np.mean(group) for group in groups if len(group) == max_count]))
