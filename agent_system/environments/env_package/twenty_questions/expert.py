"""Expert for twenty questions: the scripted questioner, which knows all training words.

Noise: ``useless_share`` is the share of questions about random attributes. ``invalid_share`` is the
probability of a guess while several candidates are left.
"""

from agent_system.environments.env import Observation
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, knowledge
from agent_system.environments.env_package.twenty_questions.player import Questioner
from agent_system.environments.env_package.twenty_questions.settings import GameSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert

NAMED = 4  # most candidates that a thought names; above that it gives their number
FACTS = 6  # latest facts in a thought
_SAID = {Answer.YES: "", Answer.NO: "not ", Answer.UNKNOWN: "maybe "}


class ThinkingPlayer:
    """Expert that adds thoughts to the moves of a ``Questioner``: candidates, facts, plan."""

    def __init__(self, player: Questioner) -> None:
        self.player = player

    def act(self) -> Decision:
        """Return the next question or guess, with the remaining candidates and the known facts."""
        facts = [f"{_SAID[answer]}{_spoken(name)}" for name, answer in self.player.facts[-FACTS:]]
        candidates = self.player.candidates
        summary = ", ".join(candidates) if len(candidates) <= NAMED else str(len(candidates))
        situation = f"{summary} fit"
        tried = ", ".join(facts) or "tried nothing"
        attribute = self.player.choose()
        is_random = self.player.blind
        if attribute is None:
            guess = f"[{self.player.guess()}]"
            return Decision(guess, situation, tried, f"guess {guess}", slip=is_random)
        question = knowledge().attributes[attribute].question
        return Decision(question, situation, tried, f"ask {_spoken(attribute)}", slack=is_random)

    def observe(self, action: str, observation: Observation) -> None:
        """Pass the reply to a question on. Ignore guesses, which end the game."""
        if not action.startswith("["):
            self.player.hear(observation.text)


def _spoken(attribute: str) -> str:
    return attribute.replace("_", " ")


def start(episode: EpisodeStart[GameSettings]) -> ThinkingPlayer:
    """Return an expert for one episode. Its candidates are the secret words of training."""
    given = episode.settings.words
    clues = episode.task.get("clues", ())
    if not clues:
        words = game.words_of("train", given)
    else:
        words = sorted(set(given)) or sorted(knowledge().things)  # with clues, all are trained on
    noise = episode.noise
    questioner = Questioner(words, episode.rng, careless=noise.slack, hasty=noise.slips)
    for clue in clues:
        questioner.learn(clue, Answer.YES)
    return ThinkingPlayer(questioner)


EXPERT = Expert(start)
