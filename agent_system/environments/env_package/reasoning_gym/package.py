"""reasoning-gym: a hundred generators of questions with automatic graders.

An episode is one turn: the question is the first observation and the answer is the action. The
reward is the grade of the generator's grader, from 0 to 1. A full grade is a success.
"""

import re
from typing import Any

from agent_system.environments.chat_prompts import CompactPrompts, SingleTurnPrompts
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.reasoning_gym.answers import (
    as_graded,
    read_grade,
)
from agent_system.environments.env_package.reasoning_gym.expert import EXPERT
from agent_system.environments.env_package.reasoning_gym.questions import (
    NAME,
    UNLISTED,
    WITHOUT_ANSWER,
    generators,
    questions_of,
    tasks,
)
from agent_system.environments.env_package.reasoning_gym.settings import ReasoningGymSettings
from agent_system.environments.env_package.reasoning_gym.spelling import apart, together
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts
from agent_system.reward_manager.scores import is_full
from rlvcr.levels import level_instructions
from verl.utils.limits import time_limit

# Errors of graders for an answer in an unexpected form. Such an answer is wrong.
UNREADABLE = (
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
    re.error,
)
PLAIN = (
    "First think about it, between <think> and </think>. "
    "Then write the answer alone between <action> and </action>."
)
# Other data sets of this kind use the tag ``answer``. Prompts with thinking levels use ``action``.
_ANSWER = re.compile(r"<(action|answer)>(.*?)</\1>", re.DOTALL)


class ReasoningGymEnv:
    """Environment that asks one question per episode."""

    placement = "process"  # some graders take a long time

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self.settings = settings
        self.spelt = settings.prompt == "compact"
        self.questions = questions_of(settings)
        self.entry: dict[str, Any] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode with question ``task["number"]``."""
        del seed  # the number determines the question
        self.entry = self.questions[task["number"]]
        return Observation(self.entry["question"])

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Grade the answer and end the episode. Raises ``TimeLimit``."""
        answer = together(action) if self.spelt else action
        # Do not grade a missing answer: some graders give a small grade for any text.
        grade = 0.0
        shown = as_graded(answer, self.settings.task, self.entry) if answer else None
        if shown is not None:
            grade = self._grade(shown)
        won = is_full(grade)
        return Observation(""), grade, True, {"won": won, "is_action_valid": bool(answer)}

    def _grade(self, answer: str) -> float:
        with time_limit(self.settings.grade_s, f"grading {self.settings.task}"):
            try:
                return read_grade(self.questions.score_answer(answer, self.entry))
            except UNREADABLE:
                return 0.0

    def close(self) -> None:
        """Do nothing: no resources are in use."""


class QuestionPrompts(SingleTurnPrompts):
    """Prompts with the answer format in the system message and the unchanged question."""

    asks_for_levels = True

    def system(self, levels: bool) -> str | None:
        """Return the answer format as system message."""
        return level_instructions() if levels else PLAIN


def prompts(settings: ReasoningGymSettings) -> Prompts:
    """Return prompts with question and answer format, or compact prompts with separate digits."""
    return CompactPrompts(apart) if settings.prompt == "compact" else QuestionPrompts()


def project(text: str) -> tuple[str, bool]:
    """Return the last tagged answer in ``text`` and True, or an empty text and False."""
    found = _ANSWER.findall(text)
    return (found[-1][1].strip(), True) if found else ("", False)


PACKAGE = EnvPackage(
    name=NAME,
    settings=ReasoningGymSettings,
    make=ReasoningGymEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    stop=("</action>", "</answer>"),
    expert=EXPERT,
    variants=generators,
    unlisted=lambda: UNLISTED,
    without_oracle=WITHOUT_ANSWER,
)
