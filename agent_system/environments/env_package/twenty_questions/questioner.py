"""Scripted questioner, for demonstrations and tests.

It asks about unknown attributes, and guesses once a single candidate is left.
"""

import random
from collections import Counter
from collections.abc import Sequence

from agent_system.environments.env_package.twenty_questions.gamemaster import read_answer
from agent_system.environments.env_package.twenty_questions.knowledge import (
    Knowledge,
    load_knowledge,
)


class Questioner:
    """Questioner of one game. ``next_move`` returns a question or a guess; ``read_reply`` takes the
    reply.

    Args:
        words: Candidates for the secret word.
        rng: Random generator of all draws.
        careless: Share of questions about a random attribute. The others ask for the attribute
            whose most common answer leaves the fewest candidates.
        hasty: Probability, in every turn after the first, of guessing a random candidate.
        table: Knowledge table. Default: the shipped one.
    """

    def __init__(
        self,
        words: Sequence[str],
        rng: random.Random | None = None,
        careless: float = 0.0,
        hasty: float = 0.0,
        table: Knowledge | None = None,
    ) -> None:
        self.candidates = list(words)
        self.facts: list[tuple[str, str]] = []  # attribute and answer, in the order of questions
        self.is_random = False  # True if ``careless`` or ``hasty`` made the last move random
        self._table = load_knowledge() if table is None else table
        self._rng = random.Random(0) if rng is None else rng
        self._careless = careless
        self._hasty = hasty
        self._used_attributes: list[str] = []

    def next_move(self) -> str:
        """Return the next question, or ``[word]`` if one candidate is left or a hasty guess is
        drawn.
        """
        attribute = self.choose_attribute()
        if attribute is None:
            return f"[{self.choose_guess()}]"
        return self._table.attributes[attribute].question

    def choose_attribute(self) -> str | None:
        """Choose the attribute of the next question. None means to guess."""
        is_certain = len(self.candidates) == 1
        if is_certain or (self._used_attributes and self._rng.random() < self._hasty):
            self.is_random = not is_certain
            return None
        unused_attributes = [
            name for name in self._table.attributes if name not in self._used_attributes
        ]
        self.is_random = self._rng.random() < self._careless
        name = (
            self._rng.choice(unused_attributes)
            if self.is_random
            else min(unused_attributes, key=self._largest_part)
        )
        self._used_attributes.append(name)
        return name

    def choose_guess(self) -> str:
        """Return a random candidate as guess."""
        return self._rng.choice(self.candidates)

    def read_reply(self, reply: str) -> None:
        """Remove the candidates that the reply to the last question excludes."""
        if self._used_attributes:
            self._filter_candidates(self._used_attributes[-1], read_answer(reply))

    def add_fact(self, attribute: str, answer: str) -> None:
        """Add a known fact, such as a clue, without a question."""
        self._used_attributes.append(attribute)
        self._filter_candidates(attribute, answer)

    def _filter_candidates(self, attribute: str, answer: str) -> None:
        self.facts.append((attribute, answer))
        fits = self._table.filter_consistent(self.candidates, attribute, answer)
        # Ignore an answer that excludes every candidate: a server may be wrong.
        self.candidates = fits or self.candidates

    def _largest_part(self, name: str) -> int:
        """Return the number of candidates that are left after the most common answer."""
        return max(Counter(self._table.get_answer(word, name) for word in self.candidates).values())
