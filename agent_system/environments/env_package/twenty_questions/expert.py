"""An expert for twenty questions: the scripted player, which knows all words of training.

Its slack are questions drawn blindly among all attributes, its slips guesses before it is certain.
"""

from agent_system.environments.env import Observation
from agent_system.environments.env_package.twenty_questions import game
from agent_system.environments.env_package.twenty_questions.knowledge import Answer, knowledge
from agent_system.environments.env_package.twenty_questions.player import Questioner
from agent_system.environments.env_package.twenty_questions.settings import GameSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert

NAMED = 4  # candidates: as many are named, more are counted
FACTS = 6  # the latest ones are told
_SAID = {Answer.YES: "", Answer.NO: "not ", Answer.UNKNOWN: "maybe "}


class ThinkingPlayer:
    """A ``Questioner`` that says what it knows."""

    def __init__(self, player: Questioner) -> None:
        self.player = player

    def act(self) -> Decision:
        """The next question or guess, with the words that fit and the facts that say so."""
        facts = [f"{_SAID[said]}{_spoken(name)}" for name, said in self.player.facts[-FACTS:]]
        candidates = self.player.candidates
        few = ", ".join(candidates) if len(candidates) <= NAMED else str(len(candidates))
        situation = f"{few} fit"
        tried = ", ".join(facts) or "tried nothing"
        attribute = self.player.choose()
        blind = self.player.blind
        if attribute is None:
            guess = f"[{self.player.guess()}]"
            return Decision(guess, situation, tried, f"guess {guess}", slip=blind)
        question = knowledge().attributes[attribute].question
        return Decision(question, situation, tried, f"ask {_spoken(attribute)}", slack=blind)

    def observe(self, action: str, observation: Observation) -> None:
        """The reply to a question; a guess ends the game."""
        if not action.startswith("["):
            self.player.hear(observation.text)


def _spoken(attribute: str) -> str:
    return attribute.replace("_", " ")


def start(episode: EpisodeStart[GameSettings]) -> ThinkingPlayer:
    """An expert that knows which words can be the secret one in training."""
    given = episode.settings.words
    clues = episode.task.get("clues", ())
    if not clues:
        words = game.words_of("train", given)
    else:
        words = sorted(set(given)) or sorted(knowledge().things)  # all of them are trained on
    noise = episode.noise
    player = Questioner(words, episode.rng, careless=noise.slack, hasty=noise.slips)
    for clue in clues:
        player.learn(clue, Answer.YES)
    return ThinkingPlayer(player)


EXPERT = Expert(start)
