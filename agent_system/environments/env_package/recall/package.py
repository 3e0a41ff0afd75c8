"""Recall: pages of codes such as ``a3 f1 c9``. At the end the agent tells the code of one letter.

The letter is known from the beginning. A page is shown once, so an agent whose context does not
hold all pages must write down what it needs (``env.compact``).
"""

import random
import string
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts, project_action
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.recall.settings import RecallSettings
from agent_system.environments.expert_protocol import Decision, EpisodeStart, Expert
from agent_system.environments.package import EnvPackage
from verl.utils.seeds import derive_seed

NAME = "recall"
NEXT = "next"
LATEST_PAGES = 2  # pages at the end without the asked code
RULES = """\
You read pages with codes. A code is a letter and its digit, such as a3. "find f" tells you that the
letter f matters. Answer every page with next. "tell f" asks for the digit of f: answer with it."""


class RecallEnv:
    """Environment with reward 1.0 for the right digit at the end, else 0.0.

    Every action except ``next`` is invalid before the question. It changes nothing, and the page is
    not shown again.
    """

    placement = "inline"

    def __init__(self, settings: RecallSettings) -> None:
        del settings  # the task contains the pages
        self._texts: list[str] = []
        self._turn = 0
        self._digit = ""

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode in front of the first of ``task["pages"]``."""
        del seed  # nothing is random
        key, pages = task["key"], task["pages"]
        self._texts = [f"find {key}", *(f"page {page}" for page in pages), f"tell {key}"]
        self._turn = 0
        self._digit = find_digit(task)
        return self._make_observation(self._texts[0])

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Turn the page with ``next``; after the last page, answer with a digit."""
        if self._turn == len(self._texts) - 1:
            won = action == self._digit
            info = {"won": won, "is_action_valid": action.isdigit()}
            return Observation("right" if won else "wrong"), float(won), True, info
        is_valid = action == NEXT
        self._turn += is_valid
        info = {"won": False, "is_action_valid": is_valid}
        text = self._texts[self._turn] if is_valid else f"answer with {NEXT}"
        return self._make_observation(text), 0.0, False, info

    def close(self) -> None:
        """Do nothing: no resources are in use."""

    def _make_observation(self, text: str) -> Observation:
        is_question = self._turn == len(self._texts) - 1
        info = {"admissible_actions": list(string.digits) if is_question else [NEXT]}
        return Observation(text, anchor=f"{self._turn} {self._texts}", info=info)


def find_digit(task: Task) -> str:
    """Return the digit of the letter ``task["key"]``: the code of ``f`` in ``a3 f1`` is 1."""
    codes = " ".join(task["pages"]).split()
    return next(digit for letter, digit in codes if letter == task["key"])


def list_tasks(settings: RecallSettings, purpose: str, count: int | None = None) -> list[Task]:
    """Return tasks with random pages, drawn from ``settings.task_seed`` and ``purpose``.

    A letter has one digit. ``purpose`` is the split, or any other name with ``count``.
    """
    rng = random.Random(derive_seed(NAME, settings.task_seed, purpose))
    count = count or (settings.val_tasks if purpose == "val" else settings.train_tasks)
    tasks = []
    for number in range(count):
        digits = {letter: rng.choice(string.digits) for letter in string.ascii_lowercase}
        key = rng.choice(string.ascii_lowercase)
        others = [letter for letter in digits if letter != key]
        pages = [rng.sample(others, settings.codes) for _ in range(settings.pages)]
        page = rng.randrange(settings.pages - LATEST_PAGES)
        pages[page][rng.randrange(settings.codes)] = key
        texts = [" ".join(letter + digits[letter] for letter in letters) for letters in pages]
        task_id = f"{NAME}/{purpose}-{settings.task_seed}-{number}"
        tasks.append({"task_id": task_id, "data_source": NAME, "pages": texts, "key": key})
    return tasks


class RecallExpert:
    """Expert of one episode, which remembers all pages."""

    def __init__(self, episode: EpisodeStart[RecallSettings]) -> None:
        self.task = episode.task
        self.action = NEXT

    def act(self) -> Decision:
        """Return ``next``, or the digit if it is asked for."""
        return Decision(self.action)

    def observe(self, action: str, observation: Observation) -> None:
        """Record whether the digit is asked for."""
        self.action = find_digit(self.task) if observation.text.startswith("tell") else action


def list_token_symbols(_settings: RecallSettings) -> list[str]:
    """Return codes and letters with the space before them, which a new tokenizer keeps whole."""
    letters = string.ascii_lowercase
    return [f" {letter}{digit}" for letter in letters for digit in ("", *string.digits)]


def make_prompts(settings: RecallSettings) -> ChatPrompts | CompactPrompts:
    """Return prompts with rules and answer format, or compact prompts with observations only."""
    if settings.prompt == "compact":
        return CompactPrompts(keep_first=True)
    return ChatPrompts(RULES, example=NEXT, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=RecallSettings,
    make=RecallEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    expert=Expert(RecallExpert, levels=(), symbols=list_token_symbols),
)
