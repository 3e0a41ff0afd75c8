"""What an answer earns: by a function of the user's own, or compared with the row's truth.

The package's own grader finds the answer in one place (``answers``) and compares it by the kind of
the truth (``comparison``).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.dataset.answers import announced, find_answer
from agent_system.environments.env_package.dataset.comparison import answer_key, is_right
from agent_system.environments.env_package.dataset.settings import RewardFromFile
from agent_system.environments.env_package.dataset.truths import read_truths
from agent_system.environments.experts.episode import now
from agent_system.reward_manager.custom import load_function
from agent_system.reward_manager.scores import finite, is_full, is_number, read_flag, weighed
from verl.utils.limits import time_limit

__all__ = ["Grade", "Grader", "NoGrade", "announced", "compare_with_truth", "read_grade"]


class NoGrade(ValueError):
    """The grader gave no grade: the play counts for nothing, neither won nor lost."""


@dataclass(frozen=True, slots=True)
class Grade:
    """A finite score, whether the answer is right, and the rewards by name, where there are any."""

    score: float
    right: bool
    parts: Mapping[str, float] = field(default_factory=dict)


class Grader:
    """Grades answers to tasks of this package."""

    def __init__(self, reward: RewardFromFile) -> None:
        self._kwargs = reward.reward_kwargs
        self._weights = reward.weights
        self._grade: Callable[..., Any] = compare_with_truth
        if reward.path is not None:
            self._grade = load_function(
                reward.path, reward.name or "compute_score", "env.dataset.reward"
            )

    def __call__(self, task: Task, solution: str) -> Grade:
        """The grade of ``solution``, waited for where it is a coroutine. Raises ``NoGrade``, and
        what the grader raises.
        """
        found = self._grade(
            data_source=task["data_source"],
            solution_str=solution,
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            **self._kwargs,
        )
        return read_grade(now(found), task["task_id"], self._weights)


def read_grade(found: Any, task_id: str, weights: Mapping[str, float] | None = None) -> Grade:
    """The grade in what a grader returned: a number, or a dictionary of rewards with ``score`` and
    perhaps ``acc``, which says whether the answer is right; else it is with a score of 1 or more,
    but for rounding.

    ``weights`` make the score of other rewards of the dictionary; what is no number is no reward.
    Raises ``NoGrade`` for anything else: NaN and infinity, and an ``acc`` other than true, false, 0
    and 1.
    """
    rewards = found if isinstance(found, Mapping) else {"score": found}
    who = f"{task_id}: the grader returned {str(found)[:80]!r}"
    try:
        parts = {name: finite(value, who) for name, value in rewards.items() if is_number(value)}
    except ValueError as error:
        raise NoGrade(f"{error}; allowed: finite numbers") from error
    if weights:
        parts["score"] = _weighed(parts, weights, who)
    if "score" not in parts:
        raise NoGrade(
            f"{who}; allowed: a finite number, or a dictionary with one as score; fix: return one, "
            "or name what counts in reward_model.weights"
        )
    right = is_full(parts["score"])
    if "acc" in rewards:
        right = _flag(rewards["acc"], who)
    return Grade(parts["score"], right, parts if isinstance(found, Mapping) else {})


def _flag(value: Any, who: str) -> bool:
    try:
        return read_flag(value, f"{who}, 'acc'")
    except ValueError as error:
        raise NoGrade(str(error)) from error


def _weighed(parts: Mapping[str, float], weights: Mapping[str, float], who: str) -> float:
    try:
        return weighed(parts, weights, who)
    except ValueError as error:
        raise NoGrade(str(error)) from error


def graded_step(grader: Grader, task: Task, answer: str, grade_s: float) -> Step:
    """The last step of an episode: ``answer`` to ``task``, graded within ``grade_s`` seconds.

    Raises ``TimeLimit``, and what the grader raises.
    """
    with time_limit(grade_s, f"grading {task['task_id']}"):
        grade = grader(task, answer)
    info: dict[str, Any] = {"won": grade.right, "is_action_valid": bool(answer)}
    info["answer"] = answer_key(answer)
    if grade.parts:
        info["reward_parts"] = dict(grade.parts)
    return Observation(""), grade.score, True, info


def compare_with_truth(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: Mapping[str, Any]
) -> float:
    """Return 1.0 where the answer in ``solution_str`` is ``ground_truth``, else 0.0; of several
    truths one suffices.

    Raises ``NoGrade`` where the row has no truth that an answer can be compared with.
    """
    del extra_info  # for graders that need more than the truth
    try:
        truths = read_truths(ground_truth)
    except ValueError as error:
        raise NoGrade(f"data_source {data_source!r}: {error}") from error
    answer = find_answer(solution_str)
    return float(answer is not None and any(is_right(answer, truth) for truth in truths))
