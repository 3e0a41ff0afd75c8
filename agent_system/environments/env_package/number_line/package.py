"""Number line: stand on one number, reach another with steps of 1 and jumps of 3.

Pure Python, deterministic, a few steps long: what tests play when the environment is not what they
test, and the pattern for a new environment.
"""

import re
from collections.abc import Sequence
from typing import Any

from agent_system.environments.chat_prompts import CompactPrompts
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.number_line.expert import EXPERT
from agent_system.environments.env_package.number_line.prompts import shorten
from agent_system.environments.env_package.number_line.settings import LineSettings
from agent_system.environments.package import EnvPackage
from rlvcr.levels import level_prompts

MAX_STEPS = 12  # where the settings say nothing
MOVES = {"left": -1, "right": 1, "jump left": -3, "jump right": 3}
ACTION = re.compile(r"<action>(.*?)</action>", re.DOTALL)
RULES = """You stand on a number line. Reach the target number.
Moves: left (-1), right (+1), jump left (-3), jump right (+3)."""
PLAIN = "Answer with your move between tags: <action>right</action>"
LEVELS = """First choose how much to think, then think, then act:
<level>1</level><think></think><action>move</action> {}
<level>2</level><think>where am I?</think><action>move</action> {}
<level>3</level><think>what did I try?</think><action>move</action> {}
<level>4</level><think>what is my plan?</think><action>move</action> {}"""
LEVEL_TEXTS = {
    1: "acts at once.",
    2: "reads the situation.",
    3: "also reflects on what was tried.",
    4: "also plans and weighs options.",
}


class NumberLineEnv:
    """Won when the target is reached; a move off the line or an unknown move changes nothing and is
    not valid.
    """

    placement = "inline"

    def __init__(self, settings: LineSettings) -> None:
        self.size = settings.size
        self.max_steps = settings.max_steps or MAX_STEPS
        self.position = 0
        self.target = 0
        self.steps = 0

    def reset(self, task: Task, seed: int) -> Observation:
        """Stand on ``task["start"]``; the seed changes nothing, the task says it all."""
        del seed  # the task says it all
        self.position = task["start"]
        self.target = task["target"]
        self.steps = 0
        return self._look("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Move; reward 1 on the target, 0 elsewhere; done on the target or after ``max_steps``
        moves.
        """
        goal = self.position + MOVES.get(action, 0)
        valid = action in MOVES and 0 <= goal <= self.size
        self.position = goal if valid else self.position
        self.steps += 1
        won = self.position == self.target
        info = {"won": won, "is_action_valid": valid}
        return (
            self._look("" if valid else "Nothing happens. "),
            float(won),
            won or self.steps >= self.max_steps,
            info,
        )

    def close(self) -> None:
        """Nothing to free."""

    def _look(self, before: str) -> Observation:
        text = f"{before}You are at {self.position}. The target is {self.target}."
        possible = [move for move, by in MOVES.items() if 0 <= self.position + by <= self.size]
        return Observation(
            text, anchor=f"{self.position}->{self.target}", info={"admissible_actions": possible}
        )


class NumberLinePrompts:
    """Rules first, observations after; the same texts with and without thinking levels but for how
    to answer.
    """

    asks_for_levels = True
    shows_level_prompts = True

    def __init__(self, settings: LineSettings) -> None:
        texts = level_prompts(settings.level_prompts, LEVEL_TEXTS)
        self._levels = LEVELS.format(*texts.values())

    def system(self, levels: bool) -> str | None:
        """Rules and answer format."""
        return f"{RULES}\n{self._levels if levels else PLAIN}"

    def first(self, observation: Observation, levels: bool) -> str:
        """The first observation as it is."""
        del levels  # both variants read the same
        return observation.text

    def turn(self, observation: Observation) -> str:
        """The observation as it is."""
        return observation.text

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """The remembered turns, then where the agent stands now."""
        del first, levels  # not needed here
        past = "".join(f"{seen} You chose: {action}\n" for seen, action in history)
        return f"{past}{observation.text}"


def tasks(settings: LineSettings, split: str) -> list[Task]:
    """Return the (start, target) pairs of a split; ``val`` is a quarter, chosen by both numbers."""
    numbers = range(settings.size + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a != b]
    # By both numbers: by their difference alone, whole distances would be held out, and validation
    # would ask for moves that were never trained.
    chosen = [(a, b) for a, b in pairs if ((a + 2 * b) % 4 == 0) == (split == "val")]
    limit = settings.val_tasks if split == "val" else settings.train_tasks
    return [
        {"task_id": f"number_line/{a}-{b}", "data_source": "number_line", "start": a, "target": b}
        for a, b in chosen[:limit]
    ]


def prompts(settings: LineSettings) -> NumberLinePrompts | CompactPrompts:
    """Rules, answer format and places, or the places alone."""
    return CompactPrompts(shorten) if settings.prompt == "compact" else NumberLinePrompts(settings)


def project(text: str) -> tuple[str, bool]:
    """The last tagged action in ``text``; without one the stripped text, not well-formed."""
    found = ACTION.findall(text)
    # The end of the text, for an action stands last; 40 characters are more than any move has.
    return (found[-1].strip().lower(), True) if found else (text.strip().lower()[-40:], False)


PACKAGE = EnvPackage(
    name="number_line",
    settings=LineSettings,
    make=NumberLineEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    expert=EXPERT,
)
