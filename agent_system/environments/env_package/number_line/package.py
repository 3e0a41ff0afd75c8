"""Number line: reach a target number with steps of 1 and jumps of 3.

It is pure Python and deterministic, and an episode has only a few turns. Tests use it if they do
not need a specific environment. It is also the template for new environments.
"""

from agent_system.environments.chat_prompts import ACTION_TAG_PATTERN, ChatPrompts, CompactPrompts
from agent_system.environments.env import Env, Observation, PastTurns, Step, Task
from agent_system.environments.env_package.number_line.expert import (
    EXPERT,
    MOVES,
    POSITIONS_PATTERN,
)
from agent_system.environments.env_package.number_line.settings import LineSettings
from agent_system.environments.package import EnvPackage
from rlvcr.levels import merge_level_prompts

MAX_STEPS = 12  # default number of turns
RULES = """You stand on a number line. Reach the target number.
Moves: left (-1), right (+1), jump left (-3), jump right (+3)."""
ANSWER_FORMAT = "Answer with your move between tags: <action>right</action>"
LEVELS_ANSWER_FORMAT = """First choose how much to think, then think, then act:
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


class NumberLineEnv(Env):
    """Environment that is solved when the agent reaches the target number.

    An unknown move or a move off the line changes nothing and is not valid.
    """

    placement = "inline"

    def __init__(self, settings: LineSettings) -> None:
        self.size = settings.size
        self.max_steps = settings.max_steps or MAX_STEPS

    def reset(self, task: Task, seed: int) -> Observation:
        self.position: int = task["start"]
        self.target: int = task["target"]
        self.steps = 0
        return self._make_observation("")

    def step(self, action: str) -> Step:
        """Apply the move ``action``. The reward is 1.0 on the target, else 0.0."""
        new_position = self.position + MOVES.get(action, 0)
        is_valid = action in MOVES and 0 <= new_position <= self.size
        self.position = new_position if is_valid else self.position
        self.steps += 1
        won = self.position == self.target
        observation = self._make_observation("" if is_valid else "Nothing happens. ")
        info = {"won": won, "is_action_valid": is_valid}
        return observation, float(won), won or self.steps >= self.max_steps, info

    def _make_observation(self, prefix: str) -> Observation:
        text = f"{prefix}You are at {self.position}. The target is {self.target}."
        possible_moves = [
            move for move, offset in MOVES.items() if 0 <= self.position + offset <= self.size
        ]
        state_key = f"{self.position}->{self.target}"
        return Observation(text, anchor=state_key, info={"admissible_actions": possible_moves})


class NumberLinePrompts(ChatPrompts):
    """Prompts with the rules in the system message. Later messages are the observations."""

    shows_level_prompts = True

    def __init__(self, settings: LineSettings) -> None:
        super().__init__(RULES, example="right")
        level_texts = merge_level_prompts(settings.level_prompts, LEVEL_TEXTS)
        self._levels_answer_format = LEVELS_ANSWER_FORMAT.format(*level_texts.values())

    def system(self, levels: bool) -> str | None:
        return f"{RULES}\n{self._levels_answer_format if levels else ANSWER_FORMAT}"

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        past_turns = "".join(f"{past_text} You chose: {action}\n" for past_text, action in history)
        return f"{past_turns}{observation.text}"


def shorten_observation(text: str) -> str:
    """Return position, distance and side of the target: ``at 3, target 13 right``.

    The short text is for policies that cannot subtract.
    """
    match = POSITIONS_PATTERN.search(text)
    if match is None:
        return text
    position, target = map(int, match.groups())
    side = "right" if target > position else "left"
    return f"{text[: match.start()]}at {position}, target {abs(target - position)} {side}"


def list_tasks(settings: LineSettings, split: str) -> list[Task]:
    """Return one task per (start, target) pair. A quarter of all pairs belongs to ``val``."""
    positions = range(settings.size + 1)
    pairs = [(start, target) for start in positions for target in positions if start != target]
    # The split depends on both numbers. If it depended on their distance only, some distances
    # would never occur in training.
    split_pairs = [
        (start, target)
        for start, target in pairs
        if ((start + 2 * target) % 4 == 0) == (split == "val")
    ]
    max_tasks = settings.val_tasks if split == "val" else settings.train_tasks
    return [
        {
            "task_id": f"number_line/{start}-{target}",
            "data_source": "number_line",
            "start": start,
            "target": target,
        }
        for start, target in split_pairs[:max_tasks]
    ]


def make_prompts(settings: LineSettings) -> NumberLinePrompts | CompactPrompts:
    if settings.prompt == "compact":
        return CompactPrompts(shorten_observation)
    return NumberLinePrompts(settings)


def parse_move(text: str) -> tuple[str, bool]:
    """Return the last action in ``<action>`` tags, and True.

    Without tags, return the last 40 characters of ``text``, and False.
    """
    actions = ACTION_TAG_PATTERN.findall(text)
    return (actions[-1].strip().lower(), True) if actions else (text.strip().lower()[-40:], False)


PACKAGE = EnvPackage(
    name="number_line",
    settings=LineSettings,
    make=NumberLineEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=parse_move,
    expert=EXPERT,
)
