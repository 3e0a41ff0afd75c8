"""A scripted player: asks what it does not know yet, guesses when it knows.

For demonstrations and tests.
"""

import random
from collections import Counter
from collections.abc import Sequence

from agent_system.environments.env_package.twenty_questions.gamemaster import read_answer
from agent_system.environments.env_package.twenty_questions.knowledge import Knowledge, knowledge


class Questioner:
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
        self.facts: list[tuple[str, str]] = []  # attribute and answer, in the order of asking
        self.blind = False  # whether the last move was drawn without thought
        self._table = knowledge() if table is None else table
        self._rng = random.Random(0) if rng is None else rng
        self._careless = careless
        self._hasty = hasty
        self._asked: list[str] = []

    def move(self) -> str:
        """The next question, or ``[word]`` once one candidate is left (or before, if hasty)."""
        attribute = self.choose()
        if attribute is None:
            return f"[{self.guess()}]"
        return self._table.attributes[attribute].question

    def choose(self) -> str | None:
        """The attribute to ask for next; None to guess."""
        certain = len(self.candidates) == 1
        if certain or (self._asked and self._rng.random() < self._hasty):
            self.blind = not certain
            return None
        left = [name for name in self._table.attributes if name not in self._asked]
        self.blind = self._rng.random() < self._careless
        name = self._rng.choice(left) if self.blind else min(left, key=self._largest_part)
        self._asked.append(name)
        return name

    def guess(self) -> str:
        """One of the candidates."""
        return self._rng.choice(self.candidates)

    def hear(self, reply: str) -> None:
        """Drop the candidates that the reply to the last question rules out."""
        if self._asked:
            self._keep(self._asked[-1], read_answer(reply))

    def learn(self, attribute: str, answer: str) -> None:
        """Take in a fact that was not asked for."""
        self._asked.append(attribute)
        self._keep(attribute, answer)

    def _keep(self, attribute: str, answer: str) -> None:
        self.facts.append((attribute, answer))
        fits = self._table.consistent(self.candidates, attribute, answer)
        # An answer that rules out every candidate is not believed: a server may err.
        self.candidates = fits or self.candidates

    def _largest_part(self, name: str) -> int:
        """Candidates that are left after the most common answer."""
        return max(Counter(self._table.answer(word, name) for word in self.candidates).values())
