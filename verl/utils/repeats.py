"""What several answers to one question are worth: pass@k, best@k and maj@k, without bias from the
choice of k among n.

All three are expectations over k answers drawn without replacement from the n that were given.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb

import numpy as np

# More subsets than that are drawn instead of listed.
LISTED_SUBSETS = 2000


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Probability that one of ``k`` answers is right, ``correct`` of ``n`` being right (Chen et
    al., 2021): ``1 - C(n - correct, k) / C(n, k)``.

    Raises ``ValueError`` unless ``1 <= k <= n`` and ``0 <= correct <= n``.
    """
    _check(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"{correct} of {n} answers cannot be right")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Expected largest of ``k`` of the ``scores``: sorted upwards, the i-th is the largest of
    ``C(i - 1, k - 1)`` of the ``C(n, k)`` subsets.

    Raises ``ValueError`` unless ``1 <= k <= len(scores)``.
    """
    _check(len(scores), k)
    ordered = sorted(scores)
    whole = comb(len(scores), k)
    return sum(score * (comb(i, k - 1) / whole) for i, score in enumerate(ordered))


def maj_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int, seed: int = 0) -> float:
    """Expected score of the answer that most of ``k`` answers give; ties are broken at random.

    Answers are compared for equality; an answer's score is the mean over those who gave it in the
    subset. All subsets are counted where there are at most ``LISTED_SUBSETS``, else as many are
    drawn from ``seed``. Raises ``ValueError`` for lists of different lengths and unless ``1 <= k <=
    n``.
    """
    if len(answers) != len(scores):
        raise ValueError(f"{len(answers)} answers and {len(scores)} scores cannot be paired")
    _check(len(answers), k)
    found = [_majority(answers, scores, chosen) for chosen in _subsets(len(answers), k, seed)]
    return float(np.mean(found))


def powers_up_to(n: int) -> list[int]:
    """1, 2, 4, ... below ``n``, and ``n``: the k that are reported."""
    powers = [2**i for i in range(n.bit_length()) if 2**i < n]
    return [*powers, n]


def _check(n: int, k: int) -> None:
    if not 1 <= k <= n:
        raise ValueError(f"k={k}: of {n} answers, 1 to {n} can be drawn")


def _subsets(n: int, k: int, seed: int) -> list[tuple[int, ...]]:
    if comb(n, k) <= LISTED_SUBSETS:
        return list(combinations(range(n), k))
    rng = np.random.default_rng(seed)
    draws = (rng.choice(n, size=k, replace=False) for _ in range(LISTED_SUBSETS))
    return [tuple(drawn.tolist()) for drawn in draws]


def _majority(
    answers: Sequence[Hashable], scores: Sequence[float], chosen: tuple[int, ...]
) -> float:
    """Mean score of the most frequent answers among ``chosen``."""
    given: dict[Hashable, list[float]] = {}
    for i in chosen:
        given.setdefault(answers[i], []).append(scores[i])
    most = max(map(len, given.values()))
    return float(np.mean([np.mean(found) for found in given.values() if len(found) == most]))
