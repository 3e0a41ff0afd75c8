"""Expert for twenty questions. It asks about unknown attributes, and guesses the last candidate.

Noise: ``useless_share`` is the share of questions about random attributes. ``invalid_share`` is the
probability of a guess while several candidates are left.
"""

import random
from collections import Counter
from collections.abc import Sequence

from agent_system.environments.env import Observation
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.gamemaster import read_answer
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge
from agent_system.environments.env_package.twenty_questions.settings import TwentyQuestionsSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert

MAX_NAMED_CANDIDATES = 4  # a thought names up to this many candidates, else only their number
MAX_FACTS = 6  # maximum number of facts in a thought; the latest are used
_ANSWER_PREFIXES = {Answer.YES: "", Answer.NO: "not ", Answer.UNKNOWN: "maybe "}


class TwentyQuestionsExpert:
    """Expert of one game.

    Args:
        words: Candidates for the secret word.
        rng: Random generator of all draws.
        careless: Share of questions about a random attribute. The others ask for the attribute
            whose most common answer leaves the fewest candidates.
        hasty: Probability, in every turn after the first, of guessing a random candidate.
    """

    def __init__(
        self, words: Sequence[str], rng: random.Random, careless: float = 0.0, hasty: float = 0.0
    ) -> None:
        self.candidates = list(words)
        self.facts: list[tuple[str, Answer]] = []  # attribute and answer, in the order of questions
        self._rng = rng
        self._table = load_knowledge()
        self._careless = careless
        self._hasty = hasty
        self._used_attributes: list[str] = []

    def act(self) -> Decision:
        """Return the next question or guess, with the remaining candidates and the known facts."""
        facts = [
            f"{_ANSWER_PREFIXES[answer]}{_to_phrase(name)}"
            for name, answer in self.facts[-MAX_FACTS:]
        ]
        names_candidates = len(self.candidates) <= MAX_NAMED_CANDIDATES
        summary = ", ".join(self.candidates) if names_candidates else str(len(self.candidates))
        situation = f"{summary} fit"
        tried = ", ".join(facts) or "tried nothing"
        is_certain = len(self.candidates) == 1
        if is_certain or (self._used_attributes and self._rng.random() < self._hasty):
            guess = f"[{self._rng.choice(self.candidates)}]"
            return Decision(guess, situation, tried, f"guess {guess}", is_invalid=not is_certain)
        attribute, is_random = self._choose_attribute()
        self._used_attributes.append(attribute)
        question = self._table.attributes[attribute].question
        plan = f"ask {_to_phrase(attribute)}"
        return Decision(question, situation, tried, plan, is_useless=is_random)

    def observe(self, action: str, observation: Observation) -> None:
        """Remove the candidates that the reply to the last question excludes."""
        # A guess in brackets ends the game.
        if self._used_attributes and not action.startswith("["):
            self._filter_candidates(self._used_attributes[-1], read_answer(observation.text))

    def add_clue(self, attribute: str) -> None:
        """Add an attribute of the word that is known without a question."""
        self._used_attributes.append(attribute)
        self._filter_candidates(attribute, Answer.YES)

    def _choose_attribute(self) -> tuple[str, bool]:
        """Choose the attribute of the next question. True: at random."""
        unused = [name for name in self._table.attributes if name not in self._used_attributes]
        if self._rng.random() < self._careless:
            return self._rng.choice(unused), True
        return min(unused, key=self._largest_part), False

    def _largest_part(self, attribute: str) -> int:
        """Return the number of candidates that are left after the most common answer."""
        answers = Counter(self._table.get_answer(word, attribute) for word in self.candidates)
        return max(answers.values())

    def _filter_candidates(self, attribute: str, answer: Answer) -> None:
        self.facts.append((attribute, answer))
        fitting = [
            word for word in self.candidates if self._table.get_answer(word, attribute) == answer
        ]
        # Ignore an answer that excludes every candidate: a server may be wrong.
        self.candidates = fitting or self.candidates


def _to_phrase(attribute: str) -> str:
    return attribute.replace("_", " ")


def start_expert(episode: EpisodeStart[TwentyQuestionsSettings]) -> TwentyQuestionsExpert:
    """Return an expert for one episode. Its candidates are the secret words of training."""
    clues = episode.task.get("clues", ())
    words = episode.settings.words
    # Tasks with clues use all words in every split.
    candidates = game.list_words(words) if clues else game.split_words("train", words)
    noise = episode.noise
    expert = TwentyQuestionsExpert(
        candidates, episode.rng, careless=noise.useless_share, hasty=noise.invalid_share
    )
    for clue in clues:
        expert.add_clue(clue)
    return expert


EXPERT = Expert(start_expert)
