"""Exam: an episode is a series of reasoning-gym questions, one per turn.

The questions were not designed for thinking levels. The length of the thought that a policy needs
depends on the question, and on what the policy can compute without writing.
"""

from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.exam import questions
from agent_system.environments.env_package.exam.expert import EXPERT
from agent_system.environments.env_package.exam.settings import ExamSettings
from agent_system.environments.env_package.exam.solvers import shorten_observation, solve_question
from agent_system.environments.package import EnvPackage
from agent_system.environments.question_series import QuestionSeries

RULES = """\
You answer {questions} questions. The first wrong answer ends the exam.
Answer with the result alone: a color, or a number in digits.
A thought that helps writes the result of each step with its number: #1 7 #2 3"""


class ExamEnv(QuestionSeries[dict[str, Any]]):
    """Environment that asks a series of reasoning-gym questions.

    reasoning-gym's grader decides if an answer is right. An answer in a wrong form, such as a word
    instead of a number, is invalid, and the question is asked again. ``info["situation"]`` groups
    questions in metrics, by generator and number of solution steps: ``chain_sum 3``.
    """

    invalid_text = "That is not the form of an answer. "
    wrong_text = "{answer} is wrong: the exam is over."
    wrong_state = "failed"
    passed_text = "All answers are right."
    passed_state = "passed"

    def __init__(self, settings: ExamSettings) -> None:
        super().__init__()
        self._questions_by_generator = questions.load_questions_by_generator(settings)

    def load_questions(self, task: Task) -> list[dict[str, Any]]:
        return questions.load_task_questions(self._questions_by_generator, task)

    def is_valid(self, question: dict[str, Any], answer: str) -> bool:
        solution = solve_question(question["question"])
        return solution.answer_form.fullmatch(answer) is not None

    def is_right(self, question: dict[str, Any], answer: str) -> bool:
        generator_name = solve_question(question["question"]).generator
        return self._questions_by_generator[generator_name].score_answer(answer, question) >= 1.0

    def make_question_observation(
        self, question: dict[str, Any], number: int, count: int
    ) -> Observation:
        text = f"Question {number} of {count}. {question['question']}"
        solution = solve_question(question["question"])
        info = {"admissible_actions": list(solution.choices), "situation": solution.situation}
        return Observation(text, anchor=question["question"], info=info)


def make_prompts(settings: ExamSettings) -> ChatPrompts | CompactPrompts:
    if settings.prompt == "compact":
        return CompactPrompts(shorten_observation)
    return ChatPrompts(RULES.format(questions=settings.questions), example="7")


PACKAGE = EnvPackage(
    name=questions.NAME,
    settings=ExamSettings,
    make=ExamEnv,
    tasks=questions.list_tasks,
    prompts=make_prompts,
    expert=EXPERT,
)
