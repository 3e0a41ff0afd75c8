"""Environment whose episode is a series of questions, one per turn."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar, Generic, TypeVar

from agent_system.environments.env import Env, Observation, Step, Task

QuestionT = TypeVar("QuestionT")


class QuestionSeries(Env, ABC, Generic[QuestionT]):
    """Environment with reward 1.0 at the end if all answers were right, else 0.0.

    An episode ends after the last question or with the first wrong answer. An answer in a wrong
    form changes nothing and is not valid. Subclasses define the questions and these texts:

    - ``invalid_text``: shown before the repeated question after an answer in a wrong form.
    - ``wrong_text``: last observation after a wrong ``{answer}``.
    - ``passed_text``: last observation if all answers were right.
    - ``wrong_state``, ``passed_state``: canonical texts of these two final states.
    """

    placement = "inline"
    invalid_text: ClassVar[str]
    wrong_text: ClassVar[str]
    wrong_state: ClassVar[str]
    passed_text: ClassVar[str]
    passed_state: ClassVar[str]

    def __init__(self) -> None:
        self._questions: Sequence[QuestionT] = ()
        self._num_answered = 0

    @abstractmethod
    def load_questions(self, task: Task) -> Sequence[QuestionT]:
        """Return the questions of ``task`` in order."""

    @abstractmethod
    def is_valid(self, question: QuestionT, answer: str) -> bool:
        """Return True if ``answer``, in lower case, has the form of an answer to ``question``."""

    @abstractmethod
    def is_right(self, question: QuestionT, answer: str) -> bool:
        """Return True if the valid ``answer``, in lower case, is right."""

    @abstractmethod
    def make_question_observation(
        self, question: QuestionT, number: int, count: int
    ) -> Observation:
        """Return the observation that asks ``question``, the ``number``-th of ``count``, from 1."""

    def reset(self, task: Task, seed: int) -> Observation:
        self._questions = self.load_questions(task)
        self._num_answered = 0
        return self._make_current_observation()

    def step(self, action: str) -> Step:
        answer = action.strip().lower()
        question = self._questions[self._num_answered]
        info: dict[str, Any] = {"won": False, "is_action_valid": True}
        if not self.is_valid(question, answer):
            observation = self._make_current_observation()
            observation = replace(observation, text=f"{self.invalid_text}{observation.text}")
            return observation, 0.0, False, {**info, "is_action_valid": False}
        if not self.is_right(question, answer):
            text = self.wrong_text.format(answer=answer)
            return Observation(text, anchor=self.wrong_state), 0.0, True, info
        self._num_answered += 1
        if self._num_answered < len(self._questions):
            return self._make_current_observation(), 0.0, False, info
        observation = Observation(self.passed_text, anchor=self.passed_state)
        return observation, 1.0, True, {**info, "won": True}

    def _make_current_observation(self) -> Observation:
        question = self._questions[self._num_answered]
        return self.make_question_observation(
            question, self._num_answered + 1, len(self._questions)
        )
