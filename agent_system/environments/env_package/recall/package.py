"""Recall: pages of arrows (``a>f c>e``), and a question at the end: to which place does d lead?

The place d is known from the beginning. Its arrow is on one page. A page is shown once, so an agent
whose context does not hold all pages must write a summary of what it needs (``env.compact``).
"""

import random

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.recall.settings import RecallSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.package import EnvPackage
from verl.utils.seeds import derive_seed

NAME = "recall"
TURN_PAGE_ACTION = "."
PLACES = "abcdefghij"
LAST_PAGES = 2  # number of pages at the end that never have the arrow that the question asks for
QUESTION_END = " ?"
RULES = """\
You read pages with arrows between places: a>f leads from a to f. "d+1" asks to which place the
arrow from d leads. This arrow is on one of the pages. Turn the page with a full stop. At the
question "d+1 ?" answer with the place."""


class RecallEnv(Env):
    """Environment that shows pages of arrows (``a>f``) and then asks where one arrow leads.

    The reward is 1.0 for the right place at the end, else 0.0. Before the end, the action ``.``
    turns the page and every other action is invalid. An invalid action changes nothing, and the
    page is not shown again.
    """

    placement = "inline"

    def __init__(self, settings: RecallSettings) -> None:
        self._observation_texts: list[str] = []
        self._turn = 0
        self._answer = ""

    def reset(self, task: Task, seed: int) -> Observation:
        """Return the question as first observation, before any page."""
        question = f"{task['place']}+1"
        pages = [f"{question} {page}" for page in task["pages"]]
        self._observation_texts = [question, *pages, question + QUESTION_END]
        self._turn = 0
        self._answer = find_answer(task)
        return self._make_observation(question)

    def step(self, action: str) -> Step:
        if self._turn == len(self._observation_texts) - 1:
            won = action == self._answer
            info = {"won": won, "is_action_valid": action in list(PLACES)}
            return Observation("right" if won else "wrong"), float(won), True, info
        is_valid = action == TURN_PAGE_ACTION
        self._turn += is_valid
        info = {"won": False, "is_action_valid": is_valid}
        text = self._observation_texts[self._turn] if is_valid else "turn the page with ."
        return self._make_observation(text), 0.0, False, info

    def _make_observation(self, text: str) -> Observation:
        is_end = self._turn == len(self._observation_texts) - 1
        info = {"admissible_actions": list(PLACES) if is_end else [TURN_PAGE_ACTION]}
        return Observation(text, anchor=f"{self._turn} {self._observation_texts}", info=info)


def find_answer(task: Task) -> str:
    """Return the place to which the arrow from ``task["place"]`` leads."""
    arrows = " ".join(task["pages"]).split()
    return next(arrow[-1] for arrow in arrows if arrow[0] == task["place"])


def list_tasks(settings: RecallSettings, task_set: str, count: int | None = None) -> list[Task]:
    """Return tasks with random pages, drawn from ``settings.task_seed`` and ``task_set``.

    In a task all arrows from one place lead to the same place. ``task_set`` is the split or the
    name of another set of tasks. ``count`` is the number of tasks (default: that of ``settings``).
    """
    rng = random.Random(derive_seed(NAME, settings.task_seed, task_set))
    count = count or (settings.val_tasks if task_set == "val" else settings.train_tasks)
    tasks = []
    for task_number in range(count):
        arrows = {place: f"{place}>{rng.choice(PLACES.replace(place, ''))}" for place in PLACES}
        question_place = rng.choice(PLACES)
        other_places = PLACES.replace(question_place, "")
        pages = [rng.sample(other_places, settings.arrows) for _ in range(settings.pages)]
        answer_page_index = rng.randrange(settings.pages - LAST_PAGES)
        pages[answer_page_index][rng.randrange(settings.arrows)] = question_place
        page_texts = [" ".join(map(arrows.__getitem__, page)) for page in pages]
        task_id = f"{NAME}/{task_set}-{settings.task_seed}-{task_number}"
        tasks.append(
            {"task_id": task_id, "data_source": NAME, "pages": page_texts, "place": question_place}
        )
    return tasks


class RecallExpert:
    """Scripted policy for one episode. It reads the answer from the task."""

    def __init__(self, episode: EpisodeStart[RecallSettings]) -> None:
        self.answer = find_answer(episode.task)
        self.action = TURN_PAGE_ACTION

    def act(self) -> Decision:
        return Decision(self.action)

    def observe(self, action: str, observation: Observation) -> None:
        self.action = self.answer if observation.text.endswith(QUESTION_END) else action


def make_prompts(settings: RecallSettings) -> ChatPrompts | CompactPrompts:
    if settings.prompt == "compact":
        return CompactPrompts(keep_first=True)
    return ChatPrompts(RULES, example=TURN_PAGE_ACTION, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=RecallSettings,
    make=RecallEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    expert=Expert(RecallExpert, levels=()),
)
