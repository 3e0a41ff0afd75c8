"""Expert for twenty questions: the scripted questioner, which knows all training words.

Noise: ``useless_share`` is the share of questions about random attributes. ``invalid_share`` is the
probability of a guess while several candidates are left.
"""

from agent_system.environments.env import Observation
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, load_knowledge
from agent_system.environments.env_package.twenty_questions.questioner import Questioner
from agent_system.environments.env_package.twenty_questions.settings import TwentyQuestionsSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert

MAX_NAMED_CANDIDATES = 4  # a thought names up to this many candidates, else only their number
MAX_FACTS = 6  # maximum number of facts in a thought; the latest are used
_ANSWER_PREFIXES = {Answer.YES: "", Answer.NO: "not ", Answer.UNKNOWN: "maybe "}


class TwentyQuestionsExpert:
    """Expert that adds thoughts to the moves of a ``Questioner``: candidates, facts, plan."""

    def __init__(self, questioner: Questioner) -> None:
        self.questioner = questioner

    def act(self) -> Decision:
        """Return the next question or guess, with the remaining candidates and the known facts."""
        facts = [
            f"{_ANSWER_PREFIXES[answer]}{_to_phrase(name)}"
            for name, answer in self.questioner.facts[-MAX_FACTS:]
        ]
        candidates = self.questioner.candidates
        summary = (
            ", ".join(candidates)
            if len(candidates) <= MAX_NAMED_CANDIDATES
            else str(len(candidates))
        )
        situation = f"{summary} fit"
        tried = ", ".join(facts) or "tried nothing"
        attribute = self.questioner.choose_attribute()
        is_random = self.questioner.is_random
        if attribute is None:
            guess = f"[{self.questioner.choose_guess()}]"
            return Decision(guess, situation, tried, f"guess {guess}", is_invalid=is_random)
        question = load_knowledge().attributes[attribute].question
        return Decision(
            question, situation, tried, f"ask {_to_phrase(attribute)}", is_useless=is_random
        )

    def observe(self, action: str, observation: Observation) -> None:
        """Pass the reply to a question on. Ignore guesses, which end the game."""
        if not action.startswith("["):
            self.questioner.read_reply(observation.text)


def _to_phrase(attribute: str) -> str:
    return attribute.replace("_", " ")


def start_expert(episode: EpisodeStart[TwentyQuestionsSettings]) -> TwentyQuestionsExpert:
    """Return an expert for one episode. Its candidates are the secret words of training."""
    config_words = episode.settings.words
    clues = episode.task.get("clues", ())
    if not clues:
        words = game.split_words("train", config_words)
    else:
        # Tasks with clues use all words in every split.
        words = sorted(set(config_words)) or sorted(load_knowledge().things)
    noise = episode.noise
    questioner = Questioner(
        words, episode.rng, careless=noise.useless_share, hasty=noise.invalid_share
    )
    for clue in clues:
        questioner.add_fact(clue, Answer.YES)
    return TwentyQuestionsExpert(questioner)


EXPERT = Expert(start_expert)
