"""Expert for the exam. A thought contains results of the steps in which a solver finds the answer.

The thought of level l contains the result of every (5 - l)-th step and of the last one, for any
question. The thought of level 1 is empty. The expert names no required level, because the level
that suffices depends on what the policy can compute without writing.
"""

from collections.abc import Sequence
from typing import Any

from agent_system.environments.env import Observation
from agent_system.environments.env_package.exam.questions import NAME, draw_tasks
from agent_system.environments.env_package.exam.settings import ExamSettings
from agent_system.environments.env_package.exam.solvers import solve_question
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Thought
from rlvcr.levels import LEVELS

MAX_NUMBERED_STEPS = 20  # step numbers that a new tokenizer encodes as one token each


class ExamExpert:
    """Expert of one episode. It reads questions from observations."""

    def __init__(self, episode: EpisodeStart[ExamSettings]) -> None:
        self.solution = solve_question(episode.first.text)

    def act(self) -> Decision:
        """Return the right answer to the current question, with a thought for each level."""
        answer = self.solution.answer
        thoughts = {
            level: Thought(format_step_results(self.solution.results, level), answer)
            for level in LEVELS
        }
        return Decision(answer, thoughts=thoughts)

    def observe(self, action: str, observation: Observation) -> None:
        """Read the next question from ``observation``."""
        del action  # the action was right: a wrong answer would have ended the episode
        self.solution = solve_question(observation.text)


def format_step_results(results: Sequence[str], level: int) -> str:
    """Return the results of every (5 - ``level``)-th step and of the last one, with step numbers.

    Level 1 has an empty thought. Example with the results a, b, c, d, e::

        level 2: "#3 c #5 e"
        level 3: "#2 b #4 d #5 e"
        level 4: "#1 a #2 b #3 c #4 d #5 e"
    """
    if level == LEVELS[0]:
        return ""
    stride = LEVELS[-1] + 1 - level
    return " ".join(
        f"#{step} {result}"
        for step, result in enumerate(results, start=1)
        if step % stride == 0 or step == len(results)
    )


def make_demonstration_cache_key(settings: ExamSettings) -> list[Any]:
    """Return everything that determines the demonstrations, as a cache key."""
    included = {"generators", "options", "task_seed", "demonstrated_questions", "prompt"}
    return [NAME, EXPERT.version, settings.model_dump(mode="json", include=included)]


def list_single_token_texts(_settings: ExamSettings) -> list[str]:
    """Return the step numbers of any question, which a new tokenizer encodes as one token each."""
    # List each step number with and without a space: no space precedes the first one of a thought.
    return [f"{space}#{step}" for step in range(1, MAX_NUMBERED_STEPS + 1) for space in (" ", "")]


EXPERT = Expert(
    ExamExpert,
    # Training questions, drawn with another seed than those of the training tasks.
    tasks=lambda settings, count: draw_tasks(
        settings, "demonstrations", count, settings.demonstrated_questions
    ),
    key=make_demonstration_cache_key,
    symbols=list_single_token_texts,
)
