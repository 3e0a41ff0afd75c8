"""reasoning-gym: a hundred generators of questions with automatic graders.

An episode is one turn: the question is the first observation and the answer is the action. The
reward is the grade of the generator's grader, from 0 to 1. A full grade is a success.
"""

import re
from typing import Any

from agent_system.environments.chat_prompts import CompactPrompts, SingleTurnPrompts
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.reasoning_gym import answers, questions
from agent_system.environments.env_package.reasoning_gym.expert import EXPERT
from agent_system.environments.env_package.reasoning_gym.settings import ReasoningGymSettings
from agent_system.environments.package import EnvPackage
from agent_system.reward_manager.scores import is_full_score
from rlvcr.levels import render_level_instructions
from verl.utils.limits import time_limit

# Errors that graders raise for answers in an unexpected form. Such answers are wrong.
GRADER_ERRORS = (
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
ANSWER_FORMAT = (
    "First think about it, between <think> and </think>. "
    "Then write the answer alone between <action> and </action>."
)
# Accept the tag ``answer`` too, which other data sets of questions use.
_ANSWER_PATTERN = re.compile(r"<(action|answer)>(.*?)</\1>", re.DOTALL)


class ReasoningGymEnv(Env):
    """Environment that asks one question per episode."""

    placement = "process"  # some graders take a long time

    def __init__(self, settings: ReasoningGymSettings) -> None:
        self.settings = settings
        self.separates_digits = settings.prompt == "compact"
        self.questions = questions.load_questions(settings)
        self.entry: dict[str, Any] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        self.entry = self.questions[task["number"]]
        return Observation(self.entry["question"])

    def step(self, action: str) -> Step:
        answer = answers.join_digits(action) if self.separates_digits else action
        # Do not grade a missing answer: some graders give a small grade for any text.
        grade = self._grade_answer(answer) if answer else 0.0
        won = is_full_score(grade)
        return Observation(""), grade, True, {"won": won, "is_action_valid": bool(answer)}

    def _grade_answer(self, answer: str) -> float:
        safe_answer = answers.sanitize_answer(answer, self.settings.task, self.entry)
        if safe_answer is None:
            return 0.0
        with time_limit(self.settings.grade_s, f"grading {self.settings.task}"):
            try:
                return answers.normalize_grade(self.questions.score_answer(safe_answer, self.entry))
            except GRADER_ERRORS:
                return 0.0


class QuestionPrompts(SingleTurnPrompts):
    """Prompts with the answer format in the system message, and the question as user message."""

    asks_for_levels = True

    def system(self, levels: bool) -> str | None:
        return render_level_instructions() if levels else ANSWER_FORMAT


def parse_answer(text: str) -> tuple[str, bool]:
    """Return the last answer in ``<answer>`` or ``<action>`` tags, and True; else "" and False."""
    tagged_answers = _ANSWER_PATTERN.findall(text)
    return (tagged_answers[-1][1].strip(), True) if tagged_answers else ("", False)


PACKAGE = EnvPackage(
    name=questions.NAME,
    settings=ReasoningGymSettings,
    make=ReasoningGymEnv,
    tasks=questions.list_tasks,
    prompts=lambda settings: (
        CompactPrompts(answers.separate_digits)
        if settings.prompt == "compact"
        else QuestionPrompts()
    ),
    project=parse_answer,
    stop=("</action>", "</answer>"),
    expert=EXPERT,
    variants=questions.list_generators,
    unlisted=lambda: questions.UNLISTED_GENERATORS,
    without_oracle=questions.GENERATORS_WITHOUT_ANSWER,
)
