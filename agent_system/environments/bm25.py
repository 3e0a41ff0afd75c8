"""Keyword search over a small collection of texts, for environments with a search engine."""

import re
from collections.abc import Sequence

import numpy as np
from rank_bm25 import BM25Okapi

_WORD_PATTERN = re.compile(r"[a-z0-9]+")


def tokenize_words(text: str) -> list[str]:
    """Return the words of ``text`` in lower case."""
    return _WORD_PATTERN.findall(text.lower())


class KeywordIndex:
    """BM25 index over ``texts``. Of two texts with equal scores the earlier one is ranked first."""

    def __init__(self, texts: Sequence[str]) -> None:
        self._bm25 = BM25Okapi([tokenize_words(text) for text in texts])

    def find_best_texts(self, query: str, count: int) -> list[int]:
        """Return the positions of at most ``count`` texts that match ``query``, best first.

        Texts without a word of the query are never returned.
        """
        scores = self._bm25.get_scores(tokenize_words(query))
        # Stable: equal scores stay in the order of the texts, on every machine.
        ranked_positions = np.argsort(-scores, kind="stable")[:count]
        return [int(position) for position in ranked_positions if scores[position] > 0]
