"""Scripted questioner, for demonstrations and tests.

It asks about unknown attributes, and guesses once a single candidate is left.
"""

import random
from collections import Counter
from collections.abc import Sequence

from agent_system.environments.env_package.twenty_questions.gamemaster import read_answer
from agent_system.environments.env_package.twenty_questions.knowledge import Knowledge, knowledge


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
        self.blind = False  # True if the last move was random (careless or hasty)
        self._table = knowledge() if table is None else table
        self._rng = random.Random(0) if rng is None else rng
        self._careless = careless
        self._hasty = hasty
        self._asked: list[str] = []

    def move(self) -> str:
        """Return the next question, or ``[word]`` if one candidate is left or a hasty guess is
        drawn.
        """
        attribute = self.choose()
        if attribute is None:
            return f"[{self.guess()}]"
        return self._table.attributes[attribute].question

    def choose(self) -> str | None:
        """Choose the attribute of the next question. None means to guess."""
        is_certain = len(self.candidates) == 1
        if is_certain or (self._asked and self._rng.random() < self._hasty):
            self.blind = not is_certain
            return None
        unused_attributes = [name for name in self._table.attributes if name not in self._asked]
        self.blind = self._rng.random() < self._careless
        name = (
            self._rng.choice(unused_attributes)
            if self.blind
            else min(unused_attributes, key=self._largest_part)
        )
        self._asked.append(name)
        return name

    def guess(self) -> str:
        """Return a random candidate as guess."""
        return self._rng.choice(self.candidates)

    def hear(self, reply: str) -> None:
        """Remove the candidates that the reply to the last question excludes."""
        if self._asked:
            self._keep(self._asked[-1], read_answer(reply))

    def learn(self, attribute: str, answer: str) -> None:
        """Add a known fact, such as a clue, without a question."""
        self._asked.append(attribute)
        self._keep(attribute, answer)

    def _keep(self, attribute: str, answer: str) -> None:
        self.facts.append((attribute, answer))
        fits = self._table.consistent(self.candidates, attribute, answer)
        # Ignore an answer that excludes every candidate: a server may be wrong.
        self.candidates = fits or self.candidates

    def _largest_part(self, name: str) -> int:
        """Return the number of candidates that are left after the most common answer."""
        return max(Counter(self._table.answer(word, name) for word in self.candidates).values())
