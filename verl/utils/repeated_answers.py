"""Unbiased estimates of pass@k, best@k and maj@k from n answers to one question.

All three are expectations over k answers, drawn without replacement from the n answers.
"""

from collections.abc import Hashable, Sequence
from itertools import combinations
from math import comb

import numpy as np

# Above this number of subsets, maj_at_k draws this many instead of listing all.
MAX_LISTED_SUBSETS = 2000


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the probability that at least one of ``k`` answers is correct (Chen et al., 2021).

    ``correct`` of the ``n`` answers are correct: ``1 - C(n - correct, k) / C(n, k)``. For example
    ``pass_at_k(4, 1, 2)`` is 0.5. Raises ``ValueError`` unless ``1 <= k <= n`` and ``0 <= correct
    <= n``.
    """
    _require_valid_k(n, k)
    if not 0 <= correct <= n:
        raise ValueError(f"correct={correct}; allowed: 0 to n={n}")
    return 1.0 - comb(n - correct, k) / comb(n, k)


def best_at_k(scores: Sequence[float], k: int) -> float:
    """Return the expected maximum of ``k`` of the ``scores``.

    In ascending order, the i-th score is the maximum of ``C(i - 1, k - 1)`` of the ``C(n, k)``
    subsets. Raises ``ValueError`` unless ``1 <= k <= len(scores)``.
    """
    _require_valid_k(len(scores), k)
    ordered = sorted(scores)
    num_subsets = comb(len(scores), k)
    return sum(score * (comb(i, k - 1) / num_subsets) for i, score in enumerate(ordered))


def maj_at_k(answers: Sequence[Hashable], scores: Sequence[float], k: int, seed: int = 0) -> float:
    """Return the expected score of the most frequent answer among ``k`` of the ``answers``.

    If several are equally frequent, their mean score counts.
    Answers are compared for equality. An answer's score is the mean over its occurrences in the
    subset. All subsets are used if there are at most ``MAX_LISTED_SUBSETS``, else as many are
    drawn with ``seed``. Raises ``ValueError`` for lists of different lengths, and unless ``1 <= k
    <= n``.
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
    max_count = max(map(len, scores_of_answer.values()))
    return float(
        np.mean([np.mean(group) for group in scores_of_answer.values() if len(group) == max_count])
    )
