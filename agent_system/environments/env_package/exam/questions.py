"""Tasks of the exam. A task is a list of reasoning-gym questions."""

import hashlib
import random
import zlib
from collections.abc import Iterator, Mapping
from itertools import islice
from typing import Any

from agent_system.environments.env import Task
from agent_system.environments.env_package.exam.settings import ExamSettings
from agent_system.environments.env_package.reasoning_gym.questions import Questions, load_questions
from agent_system.environments.env_package.reasoning_gym.settings import ReasoningGymSettings
from agent_system.environments.tasks import make_task_ids_unique
from verl.utils.seeds import derive_seed

NAME = "exam"
VAL_DIVISOR = 4  # one question in four belongs to the validation split
# Each generator numbers its questions; the exam draws from this many numbers. A simple generator
# gives equal questions for different numbers.
QUESTION_NUMBERS = 2**24


def load_questions_by_generator(settings: ExamSettings) -> dict[str, Questions]:
    """Return the data set of questions of each generator that ``settings`` name."""
    return {
        name: load_questions(
            ReasoningGymSettings(
                task=name,
                options={name: settings.options.get(name, {})},
                train_tasks=QUESTION_NUMBERS,
                task_seed=settings.task_seed,
            )
        )
        for name in settings.generators
    }


def is_validation_question(question: str) -> bool:
    # Hash the text: a generator repeats questions, and both splits must not have the same one.
    return zlib.crc32(question.encode()) % VAL_DIVISOR == 0


def generate_questions(
    settings: ExamSettings, seed: int, is_validation: bool
) -> Iterator[tuple[str, int]]:
    """Yield an endless sequence of random questions of one split: (generator, number)."""
    questions_by_generator = load_questions_by_generator(settings)
    rng = random.Random(seed)
    while True:
        generator_name = rng.choice(settings.generators)
        question_number = rng.randrange(QUESTION_NUMBERS)
        # Redraw only the number, so that all generators have the same share of the questions.
        while (
            is_validation_question(
                questions_by_generator[generator_name][question_number]["question"]
            )
            != is_validation
        ):
            question_number = rng.randrange(QUESTION_NUMBERS)
        yield generator_name, question_number


def list_tasks(settings: ExamSettings, split: str) -> list[Task]:
    """Return the tasks of ``split``. The splits share no question.

    With few questions per episode, several tasks may have the same questions.
    """
    num_tasks = settings.count_configured_tasks(split)
    return make_task_ids_unique(generate_tasks(settings, split, num_tasks, settings.questions))


def generate_tasks(
    settings: ExamSettings, task_set: str, task_count: int, questions_per_task: int
) -> list[Task]:
    """Return ``task_count`` tasks with ``questions_per_task`` random questions each.

    ``task_set`` is a split or the name of another set of tasks. Together with
    ``settings.task_seed`` it determines the questions. The set ``val`` has validation questions,
    all others have training questions.
    """
    seed = derive_seed(NAME, settings.task_seed, task_set)
    drawn_questions = generate_questions(settings, seed, is_validation=task_set == "val")
    tasks = []
    for _ in range(task_count):
        questions = [list(question) for question in islice(drawn_questions, questions_per_task)]
        questions_hash = hashlib.blake2b(repr(questions).encode(), digest_size=8).hexdigest()
        tasks.append(
            {"task_id": f"{NAME}/{questions_hash}", "data_source": NAME, "questions": questions}
        )
    return tasks


def load_task_questions(questions: Mapping[str, Questions], task: Task) -> list[dict[str, Any]]:
    """Return the questions of ``task`` with answers and metadata."""
    return [
        questions[generator_name][question_number]
        for generator_name, question_number in task["questions"]
    ]
