"""Recall: shelves with numbered things (``mug 3 pen 7``), and one thing to take at the end.

The thing is known from the beginning, its number only from its shelf. A shelf is shown once, so an
agent whose context does not hold all shelves must write down what it needs (``env.compact``).
"""

import random
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts, project_action
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.recall.settings import RecallSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.package import EnvPackage
from verl.utils.seeds import derive_seed

NAME = "recall"
LOOK = "look"
THINGS = ("apple", "book", "bowl", "bread", "cup", "egg", "knife", "mug", "pen", "vase")
NUMBERS = range(1, 10)
EMPTY_END = 2  # shelves at the end that do not have the needed thing
RULES = """\
You walk along shelves with numbered things. "need mug" tells you what you need at the end. Go from
shelf to shelf with look. At "take mug", take it with the number that it had: take mug 3."""


class RecallEnv:
    """Environment with reward 1.0 for the right thing with its number at the end, else 0.0.

    Every action except ``look`` is invalid before the end. It changes nothing, and the shelf is not
    shown again.
    """

    placement = "inline"

    def __init__(self, settings: RecallSettings) -> None:
        del settings  # the task contains the shelves
        self._texts: list[str] = []
        self._turn = 0
        self._answer = ""

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode in front of the first of ``task["shelves"]``."""
        del seed  # nothing is random
        shelves = [f"shelf {shelf}" for shelf in task["shelves"]]
        self._texts = [f"need {task['thing']}", *shelves, f"take {task['thing']}"]
        self._turn = 0
        self._answer = find_answer(task)
        return self._make_observation(self._texts[0])

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Go to the next shelf with ``look``; after the last one, take the thing."""
        if self._turn == len(self._texts) - 1:
            won = action == self._answer
            info = {"won": won, "is_action_valid": action.startswith("take ")}
            return Observation("right" if won else "wrong"), float(won), True, info
        is_valid = action == LOOK
        self._turn += is_valid
        info = {"won": False, "is_action_valid": is_valid}
        text = self._texts[self._turn] if is_valid else f"go on with {LOOK}"
        return self._make_observation(text), 0.0, False, info

    def close(self) -> None:
        """Do nothing: no resources are in use."""

    def _make_observation(self, text: str) -> Observation:
        is_end = self._turn == len(self._texts) - 1
        actions = [f"{self._texts[-1]} {number}" for number in NUMBERS] if is_end else [LOOK]
        anchor = f"{self._turn} {self._texts}"
        return Observation(text, anchor=anchor, info={"admissible_actions": actions})


def find_answer(task: Task) -> str:
    """Return ``take mug 3`` for a task with the thing ``mug`` and ``pen 7 mug 3`` on a shelf."""
    words = " ".join(task["shelves"]).split()
    return f"take {task['thing']} {words[words.index(task['thing']) + 1]}"


def list_tasks(settings: RecallSettings, purpose: str, count: int | None = None) -> list[Task]:
    """Return tasks with random shelves, drawn from ``settings.task_seed`` and ``purpose``.

    A thing has one number. ``purpose`` is the split, or any other name with ``count``.
    """
    rng = random.Random(derive_seed(NAME, settings.task_seed, purpose))
    count = count or (settings.val_tasks if purpose == "val" else settings.train_tasks)
    tasks = []
    for task_number in range(count):
        numbers = {thing: rng.choice(NUMBERS) for thing in THINGS}
        needed = rng.choice(THINGS)
        others = [thing for thing in THINGS if thing != needed]
        shelves = [rng.sample(others, settings.things) for _ in range(settings.shelves)]
        shelf = rng.randrange(settings.shelves - EMPTY_END)
        shelves[shelf][rng.randrange(settings.things)] = needed
        texts = [" ".join(f"{thing} {numbers[thing]}" for thing in shelf) for shelf in shelves]
        task_id = f"{NAME}/{purpose}-{settings.task_seed}-{task_number}"
        tasks.append({"task_id": task_id, "data_source": NAME, "shelves": texts, "thing": needed})
    return tasks


class RecallExpert:
    """Expert of one episode, which remembers all shelves."""

    def __init__(self, episode: EpisodeStart[RecallSettings]) -> None:
        self.answer = find_answer(episode.task)
        self.action = LOOK

    def act(self) -> Decision:
        """Return ``look``, or the answer at the end."""
        return Decision(self.action)

    def observe(self, action: str, observation: Observation) -> None:
        """Record whether the thing is to be taken now."""
        self.action = self.answer if observation.text.startswith("take") else action


def make_prompts(settings: RecallSettings) -> ChatPrompts | CompactPrompts:
    """Return prompts with rules and answer format, or compact prompts with observations only."""
    if settings.prompt == "compact":
        return CompactPrompts(keep_first=True)
    return ChatPrompts(RULES, example=LOOK, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=RecallSettings,
    make=RecallEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    expert=Expert(RecallExpert, levels=()),
)
