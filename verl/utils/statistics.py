"""Confidence intervals of rates and ratios, rank correlation, and pass@k, best@k and maj@k."""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb

import numpy as np

RESAMPLES = 10_000
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


def compute_rank_correlation(first: Sequence[float], second: Sequence[float]) -> float:
    """Compute Spearman's rank correlation; tied values get the mean of their ranks.

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
