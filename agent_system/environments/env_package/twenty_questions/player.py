"""A scripted player: asks what it does not know yet, guesses when it knows.

For demonstrations and tests.
"""

import random
from collections import Counter
from collections.abc import Sequence

from agent_system.environments.env_package.twenty_questions.gamemaster import read_answer
from agent_system.environments.env_package.twenty_questions.knowledge import Knowledge, knowledge


class Player:
    """Plays one game about one of ``words``: ``move`` says a question or a guess, ``hear`` takes
    the reply.

    Args:
        words: What the secret word can be.
        rng: Draws what is left to chance.
        careless: Share of questions that are drawn blindly among all attributes; the others split
            the candidates best.
        hasty: Chance, at every turn after the first, of guessing one of the candidates at once.
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
        self._table = knowledge() if table is None else table
        self._rng = random.Random(0) if rng is None else rng
        self._careless, self._hasty = careless, hasty
        self._asked: list[str] = []

    def move(self) -> str:
        """The next question, or ``[word]`` once one candidate is left (or before, if hasty)."""
        if len(self.candidates) == 1 or (self._asked and self._rng.random() < self._hasty):
            return f"[{self._rng.choice(self.candidates)}]"
        left = [name for name in self._table.attributes if name not in self._asked]
        careless = self._rng.random() < self._careless
        name = self._rng.choice(left) if careless else min(left, key=self._largest_part)
        self._asked.append(name)
        return self._table.attributes[name].question

    def hear(self, reply: str) -> None:
        """Drop the candidates that the reply to the last question rules out."""
        if self._asked:
            fits = self._table.consistent(self.candidates, self._asked[-1], read_answer(reply))
            self.candidates = fits or self.candidates

    def _largest_part(self, name: str) -> int:
        """Candidates that are left after the most common answer."""
        return max(Counter(self._table.answer(word, name) for word in self.candidates).values())
