"""Grading of answers by a user-provided function, or by comparison with the ground truth.

The grader of the package extracts the answer (``answers``) and compares it according to the kind of
the ground truth (``comparison``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.dataset.answers import extract_answer
from agent_system.environments.env_package.dataset.comparison import answer_key, is_right
from agent_system.environments.env_package.dataset.ground_truths import read_truths
from agent_system.environments.env_package.dataset.settings import RewardFromFile
from agent_system.environments.experts.episode import await_if_needed
from agent_system.reward_manager.custom import load_function
from agent_system.reward_manager.scores import (
    is_full,
    is_number,
    read_finite_number,
    read_flag,
    weighted_sum,
)
from verl.utils.limits import time_limit

__all__ = ["Grade", "Grader", "NoGrade", "compare_with_truth", "read_grade"]


class NoGrade(ValueError):
    """Error: the grader returned no valid grade. The trajectory is aborted and gets no reward."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Grade of an answer: a finite score, True if the answer counts as a success, and the single
    rewards by name if the grader returned a dictionary.
    """

    score: float
    is_right: bool
    parts: Mapping[str, float] = field(default_factory=dict)


class Grader:
    """Grader of answers: the function of ``reward.path``, or ``compare_with_truth``."""

    def __init__(self, reward: RewardFromFile) -> None:
        self._kwargs = reward.reward_kwargs
        self._weights = reward.weights
        self._grade: Callable[..., Any] = compare_with_truth
        if reward.path is not None:
            self._grade = load_function(
                reward.path, reward.name or "compute_score", "env.dataset.reward"
            )

    def __call__(self, task: Task, solution: str) -> Grade:
        """Return the grade of ``solution``. A coroutine of the grader is awaited.

        Raises ``NoGrade`` and the exceptions of the grader.
        """
        returned = self._grade(
            data_source=task["data_source"],
            solution_str=solution,
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            **self._kwargs,
        )
        return read_grade(await_if_needed(returned), task["task_id"], self._weights)


def read_grade(returned: Any, task_id: str, weights: Mapping[str, float] | None = None) -> Grade:
    """Convert the return value of a grader: a number, or a dictionary of rewards with ``score``.

    The answer is right if ``acc`` of the dictionary is true. Without ``acc`` it is right if the
    score is at least 1, up to rounding. With ``weights`` the score is the weighted sum of the named
    rewards. Entries that are not numbers are ignored. Raises ``NoGrade`` for NaN and infinity, for
    a missing score, and for an ``acc`` other than true, false, 0 and 1.

    >>> read_grade({"score": 0.5, "acc": 1}, "task").parts
    {'score': 0.5, 'acc': 1.0}
    """
    rewards = returned if isinstance(returned, Mapping) else {"score": returned}
    context = f"{task_id}: the grader returned {str(returned)[:80]!r}"
    try:
        scores = {
            name: read_finite_number(value, context)
            for name, value in rewards.items()
            if is_number(value)
        }
    except ValueError as error:
        raise NoGrade(f"{error}; allowed: finite numbers") from error
    if weights:
        scores["score"] = _weighted_score(scores, weights, context)
    if "score" not in scores:
        raise NoGrade(
            f"{context}; allowed: a finite number, or a dictionary with one as score; fix: return "
            "such a value, or name the rewards of the dictionary in reward_model.weights"
        )
    is_success = is_full(scores["score"])
    if "acc" in rewards:
        is_success = _read_flag(rewards["acc"], context)
    return Grade(scores["score"], is_success, scores if isinstance(returned, Mapping) else {})


def _read_flag(value: Any, context: str) -> bool:
    try:
        return read_flag(value, f"{context}, 'acc'")
    except ValueError as error:
        raise NoGrade(str(error)) from error


def _weighted_score(
    parts: Mapping[str, float], weights: Mapping[str, float], context: str
) -> float:
    try:
        return weighted_sum(parts, weights, context)
    except ValueError as error:
        raise NoGrade(str(error)) from error


def grade_step(grader: Grader, task: Task, answer: str, grade_s: float) -> Step:
    """Grade ``answer`` within ``grade_s`` seconds and return the last step of the episode.

    Raises ``TimeLimit``, ``NoGrade`` and the exceptions of the grader.
    """
    with time_limit(grade_s, f"grading {task['task_id']}"):
        grade = grader(task, answer)
    info: dict[str, Any] = {"won": grade.is_right, "is_action_valid": bool(answer)}
    info["answer"] = answer_key(answer)
    if grade.parts:
        info["reward_parts"] = dict(grade.parts)
    return Observation(""), grade.score, True, info


def compare_with_truth(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Return 1.0 if the answer in ``solution_str`` equals one of the ground truths, else 0.0.

    Raises ``NoGrade`` if the row has no ground truth that an answer can be compared with.
    """
    del extra_info  # part of the grader interface, unused here
    try:
        truths = read_truths(ground_truth)
    except ValueError as error:
        raise NoGrade(f"data_source {data_source!r}: {error}") from error
    answer = extract_answer(solution_str)
    return float(answer is not None and any(is_right(answer, truth) for truth in truths))
