"""Questions by number, and their split into training and validation.

reasoning-gym makes question ``n`` of a data set from the seed ``task_seed + n``. Validation
questions have the first numbers, training questions those after them, so no seed is in both splits.
A small generator repeats questions. Training drops the questions of the validation split.
"""

import copy
import json
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.reasoning_gym.settings import ReasoningGymSettings
from agent_system.environments.tasks import get_task_number_range
from verl.config.settings.hints import did_you_mean

NAME = "reasoning_gym"
# Questions generated per training question. Some are dropped, because generators repeat them.
QUESTIONS_PER_TASK = 4
CACHED_QUESTIONS = 64
_SLOW = "a question takes seconds to generate, and a run needs hundreds"
_HASHED = "its questions depend on Python's hash seed, which differs between processes"
# Generators that are not listed as variants, with the reason.
UNLISTED = {
    "codeio": (
        "it executes code samples, some of which write files or depend on the time or on an "
        "unseeded random generator"
    ),
    "composite": "it needs options that name the generators to combine",
    "isomorphic_strings": _HASHED,
    "knight_swap": _SLOW,
    "polynomial_multiplication": _HASHED,
    "propositional_logic": (
        "the constant answer (P \u2228 Q) is right for 28 of 32 questions, and some "
        "questions have no right answer"
    ),
    "ransom_note": _HASHED,
    "zebra_puzzles": _SLOW,
}
# Generators that state no right answer. Their graders simulate the actions in an answer.
WITHOUT_ANSWER = ("boxnet", "rush_hour")


class Questions:
    """Data set of reasoning-gym whose questions depend only on their number.

    Some generators also use Python's global random generator, so it is seeded for each question.
    The last questions are cached: some generators need a tenth of a second, and the rows of a group
    start with the same question.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._cached_question = lru_cache(maxsize=CACHED_QUESTIONS)(self._generate)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        # Copy the question: the caller may change it.
        return copy.deepcopy(self._cached_question(number))

    def _generate(self, number: int) -> dict[str, Any]:
        random_state = random.getstate()
        random.seed(number)
        try:
            return self._dataset[number]
        finally:
            random.setstate(random_state)

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the grade of ``answer`` to ``entry``, from 0 to 1."""
        return self._dataset.score_answer(answer, entry)


def load_questions(settings: ReasoningGymSettings) -> Questions:
    """Return the data set that ``settings`` describe.

    Raises ``ValueError`` if the generator does not exist, or does not accept these options.
    """
    size = settings.val_tasks + QUESTIONS_PER_TASK * settings.train_tasks
    options = json.dumps(settings.options.get(settings.task, {}), sort_keys=True)
    return _create_questions(settings.task, options, size, settings.task_seed)


def list_generators() -> list[str]:
    """Return the names of reasoning-gym's generators without those of ``UNLISTED``."""
    return sorted(name for name in _load_generators() if name not in UNLISTED)


def _load_generators() -> Mapping[str, Any]:
    """Return reasoning-gym's generators by name: class and configuration of each."""
    with warnings.catch_warnings():
        # A dependency compares numbers with ``is``, which causes a warning on import.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS

    return DATASETS


@lru_cache(maxsize=4)
def _create_questions(task: str, options_json: str, size: int, seed: int) -> Questions:
    known_tasks = _load_generators()
    if task not in known_tasks:
        raise ValueError(
            f"env.{NAME}.task={task!r}: reasoning-gym has no such generator"
            f"{did_you_mean(task, known_tasks)}; allowed: {', '.join(sorted(known_tasks))}; "
            f"fix: env.{NAME}.task=chain_sum"
        )
    import reasoning_gym

    options = json.loads(options_json)
    try:
        return Questions(reasoning_gym.create_dataset(task, **options, size=size, seed=seed))
    except (TypeError, AssertionError, ValueError) as error:
        known_options = sorted(set(vars(known_tasks[task][1]())) - {"size", "seed"})
        raise ValueError(
            f"env.{NAME}.options.{task}={options!r}: {error}; allowed: "
            f"{', '.join(known_options)}; fix: remove all other options"
        ) from error


def list_tasks(settings: ReasoningGymSettings, split: str) -> list[Task]:
    """Return the questions of ``split`` by number.

    A small generator gives fewer than the settings ask for. At most half of the questions have the
    same answer, so that a constant answer does not solve most tasks.
    """
    questions = load_questions(settings)
    val_questions = _first_questions(questions, settings.val_tasks)
    if split == "val":
        # By question, so that repeated questions are dropped: task and answer.
        distinct: dict[str, tuple[Task, str]] = {}
        for number, (question, answer) in enumerate(val_questions):
            distinct.setdefault(question, (_make_task(settings, number), answer))
        return _balance_answers(list(distinct.values()))
    known_questions = {question for question, _ in val_questions}
    tasks_and_answers: list[tuple[Task, str]] = []
    counts: Counter[str] = Counter()
    for number in get_task_number_range(
        split, QUESTIONS_PER_TASK * settings.train_tasks, settings.val_tasks
    ):
        question, answer = _read_question(questions, number)
        if question in known_questions or 2 * counts[answer] >= settings.train_tasks + 1:
            continue
        counts[answer] += 1
        tasks_and_answers.append((_make_task(settings, number), answer))
        if len(tasks_and_answers) == settings.train_tasks:
            break
    return _balance_answers(tasks_and_answers)


def _balance_answers(tasks_and_answers: Sequence[tuple[Task, str]]) -> list[Task]:
    """Drop the last tasks of the most common answer until at most half of the tasks have it."""
    if not tasks_and_answers:
        return []
    ((answer, count),) = Counter(answer for _, answer in tasks_and_answers).most_common(1)
    # If all tasks have the same answer, keep all.
    excess = 2 * count - len(tasks_and_answers) if count < len(tasks_and_answers) else 0
    kept_tasks: list[Task] = []
    for task, task_answer in reversed(tasks_and_answers):
        if task_answer == answer and excess > 0:
            excess -= 1
        else:
            kept_tasks.append(task)
    return kept_tasks[::-1]


def _read_question(questions: Questions, number: int) -> tuple[str, str]:
    entry = questions[number]
    return entry["question"], str(entry.get("answer"))


@lru_cache(maxsize=4)
def _first_questions(questions: Questions, count: int) -> list[tuple[str, str]]:
    """Return the first ``count`` questions, which are the validation questions."""
    return [_read_question(questions, number) for number in range(count)]


def _make_task(settings: ReasoningGymSettings, number: int) -> Task:
    source = f"{NAME}/{settings.task}"
    return {"task_id": f"{source}/{number}", "data_source": source, "number": number}
