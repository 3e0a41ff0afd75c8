"""Expert (scripted policy) for reasoning-gym. It gives the right answer, or a wrong one as noise.

It reads the answer from the generator, so it has no thoughts for thinking levels. It is for small
policies that answer without thinking. Demonstrations include wrong answers, so that RL can improve
on them.
"""

import random

from agent_system.environments.env import Observation
from agent_system.environments.env_package.reasoning_gym import answers, questions
from agent_system.environments.env_package.reasoning_gym.settings import ReasoningGymSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.experts.expert_helpers import add_noise

DIGITS = "0123456789"


class AnswerExpert:
    """Scripted policy for one episode, which consists of one question."""

    def __init__(self, episode: EpisodeStart[ReasoningGymSettings]) -> None:
        self.episode = episode
        entry = questions.load_questions(episode.settings)[episode.task["number"]]
        self.separates_digits = episode.settings.prompt == "compact"
        self.answer = answers.find_right_answer(entry) or ""

    def act(self) -> Decision:
        decision = Decision(self._format_answer(self.answer))
        wrong_answer = self._format_answer(change_one_digit(self.answer, self.episode.rng))
        useless_answers = [wrong_answer] if wrong_answer != decision.action else []
        return add_noise(
            decision, self.episode.rng, self.episode.noise, useless_answers, impossible=[]
        )

    def observe(self, action: str, observation: Observation) -> None:
        """Do nothing: an answer ends the episode, so this method is never called."""

    def _format_answer(self, answer: str) -> str:
        return answers.separate_digits(answer) if self.separates_digits else answer


def change_one_digit(answer: str, rng: random.Random) -> str:
    """Return ``answer`` with one random digit changed, or unchanged if it has no digit."""
    digit_positions = [position for position, character in enumerate(answer) if character in DIGITS]
    if not digit_positions:
        return answer
    digit_position = rng.choice(digit_positions)
    new_digit = rng.choice([digit for digit in DIGITS if digit != answer[digit_position]])
    return f"{answer[:digit_position]}{new_digit}{answer[digit_position + 1 :]}"


EXPERT = Expert(
    AnswerExpert,
    levels=(),
    tasks=lambda settings, num_tasks: questions.list_tasks(
        settings.model_copy(update={"train_tasks": num_tasks}), "train"
    ),
    words=lambda: [f" {digit}" for digit in DIGITS],
    keeps_unsuccessful=True,
    # The cache key contains all settings that change demonstrations: all except grading limits.
    key=lambda settings: [
        questions.NAME,
        1,
        settings.model_dump(mode="json", exclude={"grade_s", "memory_gb"}),
    ],
    knows_solution=lambda settings: settings.task not in questions.GENERATORS_WITHOUT_ANSWER,
)
