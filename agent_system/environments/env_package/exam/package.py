"""Exam: an episode is a series of reasoning-gym questions, one per turn.

The questions were not designed for thinking levels. Whether a policy needs a long thought depends
on the question and on what the policy can compute without writing.
"""

from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts, project_action
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.exam.expert import EXPERT
from agent_system.environments.env_package.exam.questions import (
    NAME,
    list_tasks,
    load_entries,
    load_generators,
)
from agent_system.environments.env_package.exam.settings import ExamSettings
from agent_system.environments.env_package.exam.solvers import (
    Solution,
    shorten_observation,
    solve_question,
)
from agent_system.environments.package import EnvPackage

RULES = """\
You answer {questions} questions. The first wrong answer ends the exam.
Answer with the result alone: a color, or a number in digits.
A thought that helps writes the result of each step with its number: #1 7 #2 3"""


class ExamEnv:
    """Environment with reward 1.0 for the last of all right answers, else 0.0.

    An episode ends after the last question or with the first wrong answer. The generator's own
    grader decides. An answer in a wrong form, such as a word for a number, changes nothing and is
    not valid. ``info`` holds ``situation``, such as ``chain_sum 3`` (three steps).
    """

    placement = "inline"

    def __init__(self, settings: ExamSettings) -> None:
        self.settings = settings
        self._generators = load_generators(settings)
        self._entries: list[dict[str, Any]] = []
        self._solutions: list[Solution] = []
        self._task_questions: list[tuple[str, int]] = []
        self._answered = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode at the first of ``task["questions"]``."""
        del seed  # nothing is random
        self._task_questions = task["questions"]
        self._entries = load_entries(self._generators, task)
        self._solutions = [solve_question(entry["question"]) for entry in self._entries]
        self._answered = 0
        return self._make_observation("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Answer the current question with ``action``, and return the next one."""
        answer = action.strip().lower()
        if self._solutions[self._answered].answer_form.fullmatch(answer) is None:
            observation = self._make_observation("That is not the form of an answer. ")
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        name, _ = self._task_questions[self._answered]
        grade = self._generators[name].score_answer(answer, self._entries[self._answered])
        if grade < 1.0:
            observation = Observation(f"{answer} is wrong: the exam is over.", anchor="failed")
            return observation, 0.0, True, {"won": False, "is_action_valid": True}
        self._answered += 1
        if self._answered < len(self._entries):
            return self._make_observation(""), 0.0, False, {"won": False, "is_action_valid": True}
        observation = Observation("All answers are right.", anchor="passed")
        return observation, 1.0, True, {"won": True, "is_action_valid": True}

    def close(self) -> None:
        """Do nothing: no resources are in use."""

    def _make_observation(self, prefix: str) -> Observation:
        solution = self._solutions[self._answered]
        question = self._entries[self._answered]["question"]
        text = f"{prefix}Question {self._answered + 1} of {len(self._entries)}. {question}"
        info = {"admissible_actions": list(solution.choices), "situation": solution.situation}
        return Observation(text, anchor=question, info=info)


def make_prompts(settings: ExamSettings) -> ChatPrompts | CompactPrompts:
    """Return prompts with rules and answer format, or compact prompts with questions only."""
    if settings.prompt == "compact":
        return CompactPrompts(shorten_observation)
    return ChatPrompts(RULES.format(questions=settings.questions), example="7")


PACKAGE = EnvPackage(
    name=NAME,
    settings=ExamSettings,
    make=ExamEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    expert=EXPERT,
)
