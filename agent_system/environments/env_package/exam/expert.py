"""Expert (scripted policy) for the exam. Its thoughts contain results of solution steps.

A solver finds the answer to a question in steps. The thought of thinking level 1 is empty. For l
from 2 to 4, the thought of level l contains the result of every (5 - l)-th step and of the last
one. The expert does not state the lowest level that suffices for a question: it depends on what the
policy can compute without writing.
"""

from collections.abc import Sequence
from typing import Any

from agent_system.environments.env import Observation
from agent_system.environments.env_package.exam.questions import NAME, generate_tasks
from agent_system.environments.env_package.exam.settings import ExamSettings
from agent_system.environments.env_package.exam.solvers import solve_question
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert, Thought
from rlvcr.levels import LEVELS

MAX_NUMBERED_STEPS = 20  # a new tokenizer encodes step numbers up to this one as one token


class ExamExpert:
    """Scripted policy for one episode of the exam. It reads questions from observations."""

    def __init__(self, episode: EpisodeStart[ExamSettings]) -> None:
        self.solution = solve_question(episode.first.text)

    def act(self) -> Decision:
        answer = self.solution.answer
        thoughts = {
            level: Thought(format_step_results(self.solution.results, level), answer)
            for level in LEVELS
        }
        return Decision(answer, thoughts=thoughts)

    def observe(self, action: str, observation: Observation) -> None:
        # The action was right: a wrong answer would have ended the episode.
        self.solution = solve_question(observation.text)


def format_step_results(results: Sequence[str], level: int) -> str:
    """Return the thought of ``level``: every (5 - ``level``)-th result and the last one.

    Example with the results a, b, c, d, e::

        level 1: ""
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
    """Return the values that determine the demonstrations (``Expert.key``)."""
    key_settings = {"generators", "options", "task_seed", "demonstrated_questions", "prompt"}
    return [NAME, EXPERT.version, settings.model_dump(mode="json", include=key_settings)]


def list_single_token_texts(_settings: ExamSettings) -> list[str]:
    """Return the step numbers (``#3``), with and without a leading space.

    A new tokenizer encodes each of them as one token.
    """
    return [f"{space}#{step}" for step in range(1, MAX_NUMBERED_STEPS + 1) for space in (" ", "")]


EXPERT = Expert(
    ExamExpert,
    # Training questions, drawn with another seed than those of the training tasks.
    tasks=lambda settings, count: generate_tasks(
        settings, "demonstrations", count, settings.demonstrated_questions
    ),
    key=make_demonstration_cache_key,
    symbols=list_single_token_texts,
)
