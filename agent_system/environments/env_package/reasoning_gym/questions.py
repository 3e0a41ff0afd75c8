"""Questions of reasoning-gym, and their split into training and validation.

reasoning-gym makes question ``n`` of a data set from the seed ``task_seed + n``. Validation
questions have the first numbers, training questions the next ones, so the splits share no seed. A
small generator repeats questions. Training drops questions that occur in the validation split.
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
from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean
from verl.utils.seeds import preserve_random_state

NAME = "reasoning_gym"
# Number of generated questions per training task. Repeated questions are dropped.
QUESTIONS_PER_TASK = 4
CACHED_QUESTIONS = 64  # number of cached questions per data set
_SLOW_REASON = "a question takes seconds to generate, and a run needs hundreds"
_HASH_SEED_REASON = "its questions depend on Python's hash seed, which differs between processes"
UNLISTED_GENERATORS = {
    "codeio": (
        "it executes code samples, some of which write files or depend on the time or on an "
        "unseeded random generator"
    ),
    "composite": "it needs options that name the generators to combine",
    "isomorphic_strings": _HASH_SEED_REASON,
    "knight_swap": _SLOW_REASON,
    "polynomial_multiplication": _HASH_SEED_REASON,
    "propositional_logic": (
        "the constant answer (P \u2228 Q) is right for 28 of 32 questions, and some "
        "questions have no right answer"
    ),
    "ransom_note": _HASH_SEED_REASON,
    "zebra_puzzles": _SLOW_REASON,
}
# Generators that provide no right answer. Their graders simulate the actions in an answer.
GENERATORS_WITHOUT_ANSWER = ("boxnet", "rush_hour")


class Questions:
    """Data set of reasoning-gym whose questions depend only on their number.

    Some generators also use Python's global random generator, so it is seeded for each question.
    Recent questions are cached, because some generators need a tenth of a second, and all rows of a
    group have the same question.
    """

    def __init__(self, dataset: Any) -> None:
        self._dataset = dataset
        self._get_cached_question = lru_cache(maxsize=CACHED_QUESTIONS)(self._generate_question)

    def __getitem__(self, number: int, /) -> dict[str, Any]:
        # Copy the cached question, because the caller may change it.
        return copy.deepcopy(self._get_cached_question(number))

    def _generate_question(self, number: int) -> dict[str, Any]:
        with preserve_random_state():
            random.seed(number)
            return self._dataset[number]

    def score_answer(self, answer: str, entry: dict[str, Any]) -> float:
        """Return the grade of ``answer`` to the question ``entry``, from 0 to 1."""
        return self._dataset.score_answer(answer, entry)


def load_questions(settings: ReasoningGymSettings) -> Questions:
    """Return the data set that ``settings`` describe.

    Raises ``ValueError`` if the generator does not exist or does not accept its options.
    """
    num_questions = settings.val_tasks + QUESTIONS_PER_TASK * settings.train_tasks
    options_json = json.dumps(settings.options.get(settings.task, {}), sort_keys=True)
    return _create_questions(settings.task, options_json, num_questions, settings.task_seed)


def list_generators() -> list[str]:
    """Return the generators of reasoning-gym by name, without ``UNLISTED_GENERATORS``."""
    return sorted(name for name in _load_generators() if name not in UNLISTED_GENERATORS)


def _load_generators() -> Mapping[str, Any]:
    """Return class and configuration class of each generator by name."""
    with warnings.catch_warnings():
        # Hide the warning that a dependency causes on import: it compares numbers with ``is``.
        warnings.simplefilter("ignore", SyntaxWarning)
        from reasoning_gym.factory import DATASETS

    return DATASETS


@lru_cache(maxsize=4)
def _create_questions(
    generator: str, options_json: str, num_questions: int, seed: int
) -> Questions:
    generators = _load_generators()
    if generator not in generators:
        raise UserError(
            f"env.{NAME}.task={generator!r}: reasoning-gym has no such generator"
            f"{did_you_mean(generator, generators)}; allowed: {', '.join(sorted(generators))}; "
            f"fix: env.{NAME}.task=chain_sum",
            "unknown_name",
        )
    import reasoning_gym

    options = json.loads(options_json)
    try:
        return Questions(
            reasoning_gym.create_dataset(generator, **options, size=num_questions, seed=seed)
        )
    except (TypeError, AssertionError, ValueError) as error:
        allowed_options = sorted(set(vars(generators[generator][1]())) - {"size", "seed"})
        raise UserError(
            f"env.{NAME}.options.{generator}={options!r}: {error}; allowed: "
            f"{', '.join(allowed_options)}; fix: remove all other options",
            "out_of_range",
        ) from error


def list_tasks(settings: ReasoningGymSettings, split: str) -> list[Task]:
    """Return one task per distinct question of ``split``.

    At most half of the questions have the same answer, so that a constant answer does not solve
    most tasks. A small generator gives fewer tasks than ``train_tasks`` or ``val_tasks``.
    """
    questions = load_questions(settings)
    val_questions = _read_first_questions(questions, settings.val_tasks)
    if split == "val":
        task_and_answer_by_question: dict[str, tuple[Task, str]] = {}
        for number, (question, answer) in enumerate(val_questions):
            task_and_answer_by_question.setdefault(question, (_make_task(settings, number), answer))
        return _balance_answers(list(task_and_answer_by_question.values()))
    val_question_texts = {question for question, _ in val_questions}
    tasks_and_answers: list[tuple[Task, str]] = []
    answer_counts: Counter[str] = Counter()
    for number in get_task_number_range(
        split, QUESTIONS_PER_TASK * settings.train_tasks, settings.val_tasks
    ):
        question, answer = _read_question(questions, number)
        if question in val_question_texts or 2 * answer_counts[answer] >= settings.train_tasks + 1:
            continue
        answer_counts[answer] += 1
        tasks_and_answers.append((_make_task(settings, number), answer))
        if len(tasks_and_answers) == settings.train_tasks:
            break
    return _balance_answers(tasks_and_answers)


def _balance_answers(tasks_and_answers: Sequence[tuple[Task, str]]) -> list[Task]:
    """Drop tasks, last ones first, until at most half of the tasks have the most common answer."""
    if not tasks_and_answers:
        return []
    ((common_answer, count),) = Counter(answer for _, answer in tasks_and_answers).most_common(1)
    # Drop nothing if all tasks have the same answer, because no task would be left.
    excess_count = 2 * count - len(tasks_and_answers) if count < len(tasks_and_answers) else 0
    selected_tasks: list[Task] = []
    for task, task_answer in reversed(tasks_and_answers):
        if task_answer == common_answer and excess_count > 0:
            excess_count -= 1
        else:
            selected_tasks.append(task)
    return selected_tasks[::-1]


def _read_question(questions: Questions, number: int) -> tuple[str, str]:
    """Return the text of a question, and its answer.

    Without a stored answer, the answer is the question. Otherwise all questions of such a generator
    would count as questions with the same answer.
    """
    entry = questions[number]
    question, answer = entry["question"], entry.get("answer")
    return question, question if answer is None else str(answer)


@lru_cache(maxsize=4)
def _read_first_questions(questions: Questions, count: int) -> list[tuple[str, str]]:
    """Return (question, answer) of the first ``count`` questions: the validation split."""
    return [_read_question(questions, number) for number in range(count)]


def _make_task(settings: ReasoningGymSettings, number: int) -> Task:
    data_source = f"{NAME}/{settings.task}"
    return {"task_id": f"{data_source}/{number}", "data_source": data_source, "number": number}
