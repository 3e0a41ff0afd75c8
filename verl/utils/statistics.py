"""Confidence intervals for reported rates and ratios, and rank correlation."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    confidence_level: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Compute the percentile bootstrap interval of the mean of ``values`` (Efron, 1979).

    ``values`` are independent outcomes, one per task, such as success (0 or 1) or returns. The same
    values and ``seed`` give the same interval. Without values the result is ``(nan, nan)``.
    """
    (means,) = compute_resampled_means([values], resamples, seed)
    return percentile_interval(means, confidence_level)


def rate_interval(
    values: Sequence[float] | np.ndarray, confidence_level: float = 0.95
) -> tuple[float, float]:
    """Compute the interval of a success rate: ``bootstrap_interval`` or Clopper-Pearson (1934).

    The latter applies if all ``values`` are 0 or all are 1, where all resamples would be equal. For
    example 0 successes of 4 give 0 to ``1 - 0.025 ** (1 / 4)`` = 0.60.
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

    Tasks are drawn with replacement, and R is 0 without tasks. A resample has the same tasks in
    every column, so differences and ratios of the means are paired by task.
    """
    samples = [np.asarray(column, dtype=np.float64) for column in columns]
    tasks = len(samples[0])
    if tasks == 0:
        return np.empty((len(samples), 0))
    # All resamples at once: the indices take 80 MB for 1,000 tasks.
    task_indices = np.random.default_rng(seed).integers(0, tasks, size=(resamples, tasks))
    return np.stack([sample[task_indices].mean(axis=1) for sample in samples])


def percentile_interval(values: np.ndarray, confidence_level: float = 0.95) -> tuple[float, float]:
    """Return the bounds that enclose the central fraction ``confidence_level`` of ``values [R]``.

    ``values`` are a statistic of R resamples. Without values the result is ``(nan, nan)``.
    """
    if not 0 < confidence_level < 1:
        raise ValueError(
            f"confidence_level={confidence_level}; allowed: between 0 and 1, exclusive"
        )
    if len(values) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - confidence_level) / 2, (1 + confidence_level) / 2])
    return float(low), float(high)


def compute_rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Spearman's rank correlation of two lists; tied values get the mean of their ranks.

    NaN for fewer than two values, or if one of the lists is constant. Raises ``ValueError`` for
    lists of different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"the lists must have the same length, not {len(first)} and {len(second)}")
    ranks = _compute_ranks(first), _compute_ranks(second)
    if len(first) < 2 or any(np.ptp(list_ranks) == 0 for list_ranks in ranks):
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def _compute_ranks(values: Sequence[float]) -> np.ndarray:
    _, value_index, counts = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    # The last rank of a value minus half the number of its other ties is its mean rank.
    return (counts.cumsum() - (counts - 1) / 2)[value_index]
