"""reasoning-gym: a hundred generators of questions whose answers a program can grade.

An episode is one step: the question is the first observation, the answer is the action, and the
generator's own grader says what it earns, from 0 to 1. It is won with the full grade.
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

# What graders raise on an answer that has not the form they expect: it is a wrong one.
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
# ``answer`` is what data sets of this kind ask for; with thinking levels the tag is ``action``.
_ANSWER = re.compile(r"<(action|answer)>(.*?)</\1>", re.DOTALL)


class ReasoningGymEnv:
    """One question at a time."""

    placement = "process"  # graders run what was answered against rules, some of them for long

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self.settings = settings
        self.spelt = settings.prompt == "compact"
        self.questions = questions_of(settings)
        self.entry: dict[str, Any] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """Ask question ``task["number"]``; the seed changes nothing, the number says it all."""
        del seed  # the task says it all
        self.entry = self.questions[task["number"]]
        return Observation(self.entry["question"])

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Grade the answer; always done. Raises ``TimeLimit``."""
        answer = together(action) if self.spelt else action
        # Without an answer there is nothing to grade: some graders pay a little for any text.
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
        """Nothing to free."""


class QuestionPrompts(SingleTurnPrompts):
    """How to answer in the system message, the question as it is."""

    asks_for_levels = True

    def system(self, levels: bool) -> str | None:
        """The answer format."""
        return level_instructions() if levels else PLAIN


def prompts(settings: ReasoningGymSettings) -> Prompts:
    """The question and how to answer, or the question alone with its numbers spelt."""
    return CompactPrompts(apart) if settings.prompt == "compact" else QuestionPrompts()


def project(text: str) -> tuple[str, bool]:
    """The last tagged answer in ``text``, its lines kept; without one nothing, not well-formed."""
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
