"""Intervals for reported rates and ratios, and rank correlation."""

from collections.abc import Sequence

import numpy as np

RESAMPLES = 10_000


def bootstrap_interval(
    values: Sequence[float] | np.ndarray,
    confidence: float = 0.95,
    resamples: int = RESAMPLES,
    seed: int = 0,
) -> tuple[float, float]:
    """Percentile bootstrap interval of the mean of ``values`` (Efron 1979); ``(nan, nan)`` without
    values.

    ``values`` are independent outcomes, one per task (won 0/1, returns ...). The same values give
    the same interval.
    """
    (means,) = resampled_means([values], resamples, seed)
    return percentile_interval(means, confidence)


def rate_interval(
    values: Sequence[float] | np.ndarray, confidence: float = 0.95
) -> tuple[float, float]:
    """Interval of a success rate: ``bootstrap_interval``, but where all ``values`` are 0 or all are
    1 that of Clopper and Pearson (1934), because every resample of these is the same.

    For example 4 failures of 4: 0 to ``1 - 0.025 ** (1 / 4)`` = 0.60.
    """
    rates = np.asarray(values, dtype=np.float64)
    if len(rates) and (np.all(rates == 0) or np.all(rates == 1)):
        far = ((1 - confidence) / 2) ** (1 / len(rates))
        return (far, 1.0) if rates[0] == 1 else (0.0, 1 - far)
    return bootstrap_interval(rates, confidence)


def resampled_means(
    columns: Sequence[Sequence[float] | np.ndarray], resamples: int = RESAMPLES, seed: int = 0
) -> np.ndarray:
    """Means [K, R] of ``columns`` [K, T] over R resamples of the T tasks, drawn with replacement;
    R is 0 without tasks.

    A resample holds the same tasks in every column. So what is computed from several columns is
    paired by task, and a ratio of two means is that of their totals.
    """
    samples = [np.asarray(column, dtype=np.float64) for column in columns]
    tasks = len(samples[0])
    if tasks == 0:
        return np.empty((len(samples), 0))
    # All resamples at once: 80 MB of indices for a panel of 1,000 tasks.
    drawn = np.random.default_rng(seed).integers(0, tasks, size=(resamples, tasks))
    return np.stack([sample[drawn].mean(axis=1) for sample in samples])


def percentile_interval(values: np.ndarray, confidence: float = 0.95) -> tuple[float, float]:
    """What the middle ``confidence`` of ``values`` [R], a statistic of R resamples, lies between;
    ``(nan, nan)`` without any.
    """
    if not 0 < confidence < 1:
        raise ValueError(f"confidence must lie between 0 and 1, got {confidence}")
    if len(values) == 0:
        return float("nan"), float("nan")
    low, high = np.quantile(values, [(1 - confidence) / 2, (1 + confidence) / 2])
    return float(low), float(high)


def rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's correlation of two lists of equal length; ties share the mean of their ranks.

    NaN for fewer than two values, or where one of the lists is constant. Raises ``ValueError`` for
    lists of different lengths.
    """
    if len(first) != len(second):
        raise ValueError(f"{len(first)} and {len(second)} values cannot be paired")
    ranks = _ranks(first), _ranks(second)
    if len(first) < 2 or any(np.ptp(one) == 0 for one in ranks):
        return float("nan")
    return float(np.corrcoef(*ranks)[0, 1])


def _ranks(values: Sequence[float]) -> np.ndarray:
    _, place, counts = np.unique(
        np.asarray(values, dtype=np.float64), return_inverse=True, return_counts=True
    )
    # The last rank of each value, less half of its ties: the mean of the ranks that it has.
    return (counts.cumsum() - (counts - 1) / 2)[place]
