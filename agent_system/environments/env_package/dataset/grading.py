"""Grading of answers by a user-provided function, or by comparison with the ground truth.

The default grader extracts the answer (module ``answers``) and compares it with the ground truth
(module ``comparison``).
"""

import contextlib
import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.dataset.answer_text import normalize_answer
from agent_system.environments.env_package.dataset.answers import extract_answer
from agent_system.environments.env_package.dataset.comparison import (
    canonicalize_answer,
    matches_truth,
)
from agent_system.environments.env_package.dataset.settings import RewardFromFile
from agent_system.environments.event_loop import await_if_needed
from agent_system.reward_manager.custom import load_function
from agent_system.reward_manager.scores import (
    compute_weighted_sum,
    is_full_score,
    is_number,
    read_finite_number,
    read_flag,
)
from verl.utils.limits import time_limit

# A ground truth may be a dictionary with these keys. Its values are accepted answers. Dictionaries
# with other keys need a user-provided grader.
TRUTH_KEYS = (
    *("answer", "answers", "target", "targets", "value", "text", "aliases"),
    *("normalized_value", "normalized_aliases"),
)
_FIX_TEXT = (
    "fix: custom_reward_function.path=FILE (env.dataset.reward.path), or a column ground_truth"
)


class InvalidGradeError(ValueError):
    """Error: the grader returned no valid grade. The trajectory is aborted and gets no reward."""


@dataclass(frozen=True, slots=True)
class Grade:
    """Grade of an answer: a finite score, and True if the answer counts as a success.

    If the grader returned a dictionary, ``rewards`` contains all its numbers by name.
    """

    score: float
    is_right: bool
    rewards: Mapping[str, float] = field(default_factory=dict)


class Grader:
    """Grader of answers: the user's function at ``reward.path``, else comparison with the truth."""

    def __init__(self, reward: RewardFromFile) -> None:
        self._kwargs = reward.reward_kwargs
        self._weights = reward.weights
        self._grading_function: Callable[..., Any] = compare_with_truth
        if reward.path is not None:
            function_name = reward.name or "compute_score"
            self._grading_function = load_function(reward.path, function_name)

    def __call__(self, task: Task, solution: str) -> Grade:
        """Grade ``solution``, the reply to ``task``. Raises the exceptions of ``read_grade``."""
        returned_value = self._grading_function(
            data_source=task["data_source"],
            solution_str=solution,
            ground_truth=task["ground_truth"],
            extra_info=task["extra_info"],
            **self._kwargs,
        )
        return read_grade(await_if_needed(returned_value), task["task_id"], self._weights)


def read_grade(
    returned_value: object, task_id: str, weights: Mapping[str, float] | None = None
) -> Grade:
    """Convert the return value of a grader: a number, or a dictionary of rewards with ``score``.

    The answer is right if ``acc`` of the dictionary is true. Without ``acc`` it is right if the
    score is at least 1, up to rounding. With ``weights`` the score is the weighted sum of the named
    rewards. Values that are not numbers are ignored. Raises ``InvalidGradeError`` for NaN and
    infinity, for a missing score, and for an ``acc`` other than true, false, 0 and 1.

    >>> read_grade({"score": 0.5, "acc": 1}, "task").rewards
    {'score': 0.5, 'acc': 1.0}
    """
    rewards = returned_value if isinstance(returned_value, Mapping) else {"score": returned_value}
    error_context = f"{task_id}: the grader returned {str(returned_value)[:80]!r}"
    try:
        scores = {
            reward_name: read_finite_number(value, error_context)
            for reward_name, value in rewards.items()
            if is_number(value)
        }
    except ValueError as error:
        raise InvalidGradeError(f"{error}; allowed: finite numbers") from error
    try:
        if weights:
            scores["score"] = compute_weighted_sum(scores, weights, error_context)
        if "score" not in scores:
            raise InvalidGradeError(
                f"{error_context}; allowed: a finite number, or a dictionary with one as score; "
                "fix: return such a value, or name the rewards of the dictionary in "
                "reward_model.weights"
            )
        is_success = is_full_score(scores["score"])
        if "acc" in rewards:
            is_success = read_flag(rewards["acc"], f"{error_context}, 'acc'")
    except ValueError as error:
        raise InvalidGradeError(str(error)) from error
    return Grade(scores["score"], is_success, scores if isinstance(returned_value, Mapping) else {})


def grade_answer(grader: Grader, task: Task, answer: str, timeout_s: float) -> Step:
    """Grade ``answer`` within ``timeout_s`` seconds.

    Return (observation, reward, done, info) of the env step that ends the episode.

    Raises ``TimeLimitError``, ``InvalidGradeError`` and the exceptions of the grader.
    """
    with time_limit(timeout_s, f"grading {task['task_id']}"):
        grade = grader(task, answer)
    info: dict[str, Any] = {"won": grade.is_right, "is_action_valid": bool(answer)}
    # Store "" if there is no answer: with None, maj@k would use the whole action as the vote.
    info["answer"] = canonicalize_answer(answer) or ""
    if grade.rewards:
        info["reward_parts"] = dict(grade.rewards)
    return Observation(""), grade.score, True, info


def compare_with_truth(
    data_source: str, solution_str: str, ground_truth: object, extra_info: Mapping[str, Any]
) -> float:
    """Return 1.0 if the answer in ``solution_str`` equals one of the ground truths, else 0.0.

    Raises ``InvalidGradeError`` if the ground truth is missing, empty or of an unsupported form.
    """
    del extra_info  # part of the grader interface, unused here
    try:
        truths = read_truths(ground_truth)
    except ValueError as error:
        raise InvalidGradeError(f"data_source {data_source!r}: {error}") from error
    answer = extract_answer(solution_str)
    return float(answer is not None and any(matches_truth(answer, truth) for truth in truths))


def read_truths(ground_truth: object) -> list[str]:
    """Return the accepted answers as texts: all items of a list, all values of a dictionary.

    Raises ``ValueError`` for a missing or empty ground truth, and for other structures.

    >>> read_truths({"value": "Paris", "aliases": ["City of Light"]})
    ['Paris', 'City of Light']
    """
    truths = list(_list_accepted_answers(ground_truth))
    if not truths or not all(map(normalize_answer, truths)):
        raise ValueError(
            f"ground_truth={_quote_value(ground_truth)} is no ground truth; allowed: a text, a "
            f"number, or a list of them; {_FIX_TEXT}"
        )
    return list(dict.fromkeys(truths))


def _list_accepted_answers(truth: object) -> Iterator[str]:
    if isinstance(truth, str) and truth.lstrip().startswith("{"):
        with contextlib.suppress(ValueError, RecursionError):
            truth = json.loads(truth)
    if isinstance(truth, Mapping):
        _check_truth_keys(truth)
        for value in truth.values():
            yield from _list_accepted_answers(value)
    elif isinstance(truth, (list, tuple)):
        _check_truth_list(truth)
        for accepted_answer in truth:
            yield from _list_accepted_answers(accepted_answer)
    elif isinstance(truth, bool):
        # The JSON value true accepts the words "true" and "yes".
        yield from (("true", "yes") if truth else ("false", "no"))
    else:
        is_missing = truth is None or (isinstance(truth, float) and not math.isfinite(truth))
        yield "" if is_missing else str(truth)


def _check_truth_keys(truth: Mapping[Any, Any]) -> None:
    unknown_keys = [key for key in truth if key not in TRUTH_KEYS]
    if unknown_keys or not truth:
        raise ValueError(
            f"ground_truth={_quote_value(truth)}: an answer cannot be compared with a "
            f"dictionary with {unknown_keys[:1] or 'no keys'}; allowed: the keys "
            f"{', '.join(sorted(TRUTH_KEYS))}; {_FIX_TEXT}"
        )


def _check_truth_list(truth: Sequence[object]) -> None:
    for accepted_answer in truth:
        if isinstance(accepted_answer, (list, tuple, Mapping)):
            raise ValueError(
                f"ground_truth={_quote_value(truth)} contains {_quote_value(accepted_answer)}; "
                f"allowed: a list of texts and numbers; {_FIX_TEXT}"
            )


def _quote_value(value: object) -> str:
    return f"{str(value)[:80]!r}"
