"""Number line: reach a target number with steps of 1 and jumps of 3.

It is pure Python and deterministic, and an episode has a few turns. Tests use it when any
environment will do. It is also the template for a new environment.
"""

import re
from collections.abc import Sequence
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.number_line.expert import EXPERT, MOVES, POSITIONS
from agent_system.environments.env_package.number_line.settings import LineSettings
from agent_system.environments.package import EnvPackage
from rlvcr.levels import merge_level_prompts

MAX_STEPS = 12  # default number of turns
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
    """Environment that is solved when the target is reached.

    An unknown move or a move off the line changes nothing and is not valid.
    """

    placement = "inline"

    def __init__(self, settings: LineSettings) -> None:
        self.size = settings.size
        self.max_steps = settings.max_steps or MAX_STEPS

    def reset(self, task: Task, seed: int) -> Observation:
        """Start an episode on the number ``task["start"]``."""
        del seed  # nothing is random
        self.position: int = task["start"]
        self.target: int = task["target"]
        self.steps = 0
        return self._make_observation("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Apply a move. The reward is 1 on the target, else 0.

        The episode is done on the target or after ``max_steps`` moves.
        """
        goal = self.position + MOVES.get(action, 0)
        is_valid = action in MOVES and 0 <= goal <= self.size
        self.position = goal if is_valid else self.position
        self.steps += 1
        won = self.position == self.target
        observation = self._make_observation("" if is_valid else "Nothing happens. ")
        info = {"won": won, "is_action_valid": is_valid}
        return observation, float(won), won or self.steps >= self.max_steps, info

    def close(self) -> None:
        """Do nothing: no resources are in use."""

    def _make_observation(self, prefix: str) -> Observation:
        text = f"{prefix}You are at {self.position}. The target is {self.target}."
        possible = [move for move, by in MOVES.items() if 0 <= self.position + by <= self.size]
        anchor = f"{self.position}->{self.target}"
        return Observation(text, anchor=anchor, info={"admissible_actions": possible})


class NumberLinePrompts(ChatPrompts):
    """Prompts with the rules in the system message and plain observations after it.

    Only the answer format differs between prompts with and without thinking levels.
    """

    shows_level_prompts = True

    def __init__(self, settings: LineSettings) -> None:
        super().__init__(RULES, example="right")
        texts = merge_level_prompts(settings.level_prompts, LEVEL_TEXTS)
        self._levels = LEVELS.format(*texts.values())

    def system(self, levels: bool) -> str | None:
        """Return the rules and the answer format."""
        return f"{RULES}\n{self._levels if levels else PLAIN}"

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Return the last turns, followed by the observation."""
        del first, levels  # not needed here
        past_turns = "".join(f"{past_text} You chose: {action}\n" for past_text, action in history)
        return f"{past_turns}{observation.text}"


def shorten_observation(text: str) -> str:
    """Return position, distance and side of the target: ``at 3, target 13 right``.

    The short text is for policies that cannot subtract.
    """
    match = POSITIONS.search(text)
    if match is None:
        return text
    position, target = map(int, match.groups())
    side = "right" if target > position else "left"
    return f"{text[: match.start()]}at {position}, target {abs(target - position)} {side}"


def list_tasks(settings: LineSettings, split: str) -> list[Task]:
    """Return the (start, target) pairs of a split. ``val`` has a quarter of all pairs."""
    numbers = range(settings.size + 1)
    pairs = [(a, b) for a in numbers for b in numbers if a != b]
    # Both numbers determine the split. If only their difference did, training would lack some
    # distances completely, and validation would need moves that were never trained on.
    split_pairs = [(a, b) for a, b in pairs if ((a + 2 * b) % 4 == 0) == (split == "val")]
    limit = settings.val_tasks if split == "val" else settings.train_tasks
    return [
        {"task_id": f"number_line/{a}-{b}", "data_source": "number_line", "start": a, "target": b}
        for a, b in split_pairs[:limit]
    ]


def make_prompts(settings: LineSettings) -> NumberLinePrompts | CompactPrompts:
    """Return prompts with rules and answer format, or compact prompts with positions only."""
    if settings.prompt == "compact":
        return CompactPrompts(shorten_observation)
    return NumberLinePrompts(settings)


def project_move(text: str) -> tuple[str, bool]:
    """Return the last tagged action and True; without a tag, the end of the text and False."""
    actions = ACTION.findall(text)
    # An action is expected at the end of the text. Every move is shorter than 40 characters.
    return (actions[-1].strip().lower(), True) if actions else (text.strip().lower()[-40:], False)


PACKAGE = EnvPackage(
    name="number_line",
    settings=LineSettings,
    make=NumberLineEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_move,
    expert=EXPERT,
)
