"""Expert (scripted policy) for twenty questions.

It asks about attributes of the secret word, and guesses the last candidate: the word that fits all
answers. Noise has two forms. ``useless_share`` is the share of questions about random attributes.
``invalid_share`` is the probability of a guess although several candidates are left.
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

MAX_NAMED_CANDIDATES = 4  # with more candidates, a thought states only their number
MAX_FACTS = 6  # a thought states at most this number of answers, the latest ones
_ANSWER_PREFIXES = {Answer.YES: "", Answer.NO: "not ", Answer.UNKNOWN: "maybe "}


class TwentyQuestionsExpert:
    """Scripted policy for one game, which becomes a demonstration.

    Args:
        words: Candidates for the secret word.
        rng: Random generator of all draws.
        random_question_share: Share of questions about a random attribute. All other questions are
            about the attribute whose most common answer leaves the fewest candidates.
        early_guess_probability: Probability of guessing a random candidate, in each turn after the
            first.
    """

    def __init__(
        self,
        words: Sequence[str],
        rng: random.Random,
        random_question_share: float = 0.0,
        early_guess_probability: float = 0.0,
    ) -> None:
        self.candidates = list(words)
        self.answered_attributes: list[tuple[str, Answer]] = []  # in the order of questions
        self._rng = rng
        self._knowledge = load_knowledge()
        self._random_question_share = random_question_share
        self._early_guess_probability = early_guess_probability
        self._used_attributes: list[str] = []

    def act(self) -> Decision:
        fact_texts = [
            f"{_ANSWER_PREFIXES[answer]}{_format_attribute(name)}"
            for name, answer in self.answered_attributes[-MAX_FACTS:]
        ]
        can_name_candidates = len(self.candidates) <= MAX_NAMED_CANDIDATES
        candidates_text = (
            ", ".join(self.candidates) if can_name_candidates else str(len(self.candidates))
        )
        situation = f"{candidates_text} fit"
        facts_text = ", ".join(fact_texts) or "tried nothing"
        unused_attributes = [
            name for name in self._knowledge.attributes if name not in self._used_attributes
        ]
        must_guess = len(self.candidates) == 1 or not unused_attributes
        if must_guess or (
            self._used_attributes and self._rng.random() < self._early_guess_probability
        ):
            guess = f"[{self._rng.choice(self.candidates)}]"
            return Decision(
                guess, situation, facts_text, f"guess {guess}", is_invalid=not must_guess
            )
        attribute, is_random = self._choose_attribute(unused_attributes)
        self._used_attributes.append(attribute)
        question = self._knowledge.attributes[attribute].question
        plan = f"ask {_format_attribute(attribute)}"
        return Decision(question, situation, facts_text, plan, is_useless=is_random)

    def observe(self, action: str, observation: Observation) -> None:
        # A guess in brackets ends the game, so its reply contains no answer.
        if self._used_attributes and not action.startswith("["):
            self._filter_candidates(self._used_attributes[-1], read_answer(observation.text))

    def add_known_attribute(self, attribute: str) -> None:
        """Record that the secret word has ``attribute``, which a clue states."""
        self._used_attributes.append(attribute)
        self._filter_candidates(attribute, Answer.YES)

    def _choose_attribute(self, unused_attributes: Sequence[str]) -> tuple[str, bool]:
        """Return the attribute of the next question, and True if it was chosen at random."""
        if self._rng.random() < self._random_question_share:
            return self._rng.choice(unused_attributes), True
        return min(unused_attributes, key=self._count_worst_case_candidates), False

    def _count_worst_case_candidates(self, attribute: str) -> int:
        """Return the number of candidates that have the most common value of ``attribute``.

        These candidates remain if a question about ``attribute`` gets this answer.
        """
        answer_counts = Counter(
            self._knowledge.get_answer(word, attribute) for word in self.candidates
        )
        return max(answer_counts.values())

    def _filter_candidates(self, attribute: str, answer: Answer) -> None:
        self.answered_attributes.append((attribute, answer))
        matching_words = [
            word
            for word in self.candidates
            if self._knowledge.get_answer(word, attribute) == answer
        ]
        # Ignore an answer that excludes all candidates, because a server may give wrong answers.
        self.candidates = matching_words or self.candidates


def _format_attribute(attribute: str) -> str:
    return attribute.replace("_", " ")


def start_expert(episode: EpisodeStart[TwentyQuestionsSettings]) -> TwentyQuestionsExpert:
    """Return an expert for one episode. Candidates are training words; with clues, all words."""
    clues = episode.task.get("clues", ())
    words = episode.settings.words
    candidates = game.list_words(words) if clues else game.select_split_words("train", words)
    noise = episode.noise
    expert = TwentyQuestionsExpert(
        candidates,
        episode.rng,
        random_question_share=noise.useless_share,
        early_guess_probability=noise.invalid_share,
    )
    for clue in clues:
        expert.add_known_attribute(clue)
    return expert


EXPERT = Expert(start_expert)
