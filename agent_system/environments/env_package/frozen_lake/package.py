"""FrozenLake: gymnasium's rules on generated maps, in text."""

import random
from functools import lru_cache
from typing import Any

from gymnasium.envs.toy_text import frozen_lake as rules

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts, project
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.frozen_lake.expert import EXPERT
from agent_system.environments.env_package.frozen_lake.prompts import begin, shorten
from agent_system.environments.env_package.frozen_lake.settings import LakeSettings
from agent_system.environments.package import EnvPackage
from verl.utils.seeds import derive_seed

NAME = "frozen_lake"
MOVES = {
    "left": (rules.LEFT, 0, -1),
    "down": (rules.DOWN, 1, 0),
    "right": (rules.RIGHT, 0, 1),
    "up": (rules.UP, -1, 0),
}
RULES = """\
You cross a frozen lake, one cell per move: left, down, right or up. P is you, \
. is ice, O is a hole, G is the goal.
Reach the goal. Whoever enters a hole has lost. {ice}"""
ICE = {
    True: (
        "The ice is slippery: only one move in three goes where you want, "
        "the others go to one side of it."
    ),
    False: "The ice is not slippery: you move where you want.",
}
# The start is ice like any other once one has left it, and is drawn so.
DRAWN = str.maketrans("SFH", "..O")
VAL_SHARE = 5  # one map in five may be held out
# Draws without a new map before giving up: small lakes have few different ones.
PATIENCE = 300


class FrozenLake:
    """Reward 1.0 on the goal, else 0.0; done on the goal and in a hole. The caller limits the
    number of steps.

    What is not a move changes nothing and is not valid. On ice that is not slippery neither is a
    move off the lake.
    """

    placement = "inline"

    def __init__(self, settings: LakeSettings) -> None:
        self.settings = settings
        self._lake: Any = None  # gymnasium's, once a map is known
        self._map: tuple[str, ...] = ()

    def reset(self, task: Task, seed: int) -> Observation:
        """Stand on the start of ``task["map"]``; ``seed`` decides where the ice takes whoever
        slips.
        """
        if self._map != tuple(task["map"]):
            self._map = tuple(task["map"])
            # Made for a new map only: gymnasium builds a table of all transitions from it.
            self._lake = rules.FrozenLakeEnv(desc=task["map"], is_slippery=self.settings.slippery)
        self._lake.reset(seed=seed)
        return self._look("")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Move; see the class for rewards and ends."""
        action = action.strip().lower()
        if action not in self._possible():
            observation = self._look("That is not possible here.\n")
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        _, reward, done, _, _ = self._lake.step(MOVES[action][0])
        won = bool(reward > 0)
        said = "You reached the goal.\n" if won else "You fell into a hole.\n" if done else ""
        return self._look(said), float(reward), bool(done), {"won": won, "is_action_valid": True}

    def close(self) -> None:
        """Nothing to free: nothing was drawn."""

    def _place(self) -> tuple[int, int]:
        return divmod(int(self._lake.s), len(self._map))

    def _possible(self) -> list[str]:
        row, column = self._place()
        size = len(self._map)
        inside = {
            m
            for m, (_, down, right) in MOVES.items()
            if 0 <= row + down < size and 0 <= column + right < size
        }
        # On slippery ice a move off the lake may slip to one of its sides, so it is worth trying.
        return [move for move in MOVES if self.settings.slippery or move in inside]

    def _look(self, said: str) -> Observation:
        row, column = self._place()
        cells = [list(line.translate(DRAWN)) for line in self._map]
        cells[row][column] = "P"
        drawn = "\n".join(" ".join(line) for line in cells)
        anchor = f"{'/'.join(self._map)} {row},{column}"
        return Observation(
            f"{said}{drawn}", anchor=anchor, info={"admissible_actions": self._possible()}
        )


def prompts(settings: LakeSettings) -> ChatPrompts | CompactPrompts:
    """The rules of this kind of ice, or the lake alone."""
    if settings.prompt == "compact":
        return CompactPrompts(shorten, begin, keep_first=True)
    return ChatPrompts(RULES.format(ice=ICE[settings.slippery]), example="down")


def tasks(settings: LakeSettings, split: str) -> list[Task]:
    """Different maps, each with a way to the goal; fewer than asked for where the lake is too small
    for more.
    """
    maps = _maps(settings)[split]  # pyright: ignore[reportArgumentType]  settings hash
    return [
        {"task_id": f"{NAME}/{'-'.join(rows)}", "data_source": NAME, "map": list(rows)}
        for rows in maps
    ]


@lru_cache(maxsize=4)
def _maps(settings: LakeSettings) -> dict[str, list[tuple[str, ...]]]:
    wanted = {"train": settings.train_maps, "val": settings.val_maps}
    found: dict[str, dict[tuple[str, ...], None]] = {"train": {}, "val": {}}
    number = last_new = 0
    while number < last_new + PATIENCE and any(
        len(found[split]) < wanted[split] for split in wanted
    ):
        rows = _draw(settings, random.Random(derive_seed(NAME, settings.map_seed, number)))
        # By the map itself, not by its number: the same map comes up under many numbers.
        split = "train" if derive_seed(NAME, *rows) % VAL_SHARE else "val"
        number += 1
        if len(found[split]) < wanted[split] and rows not in found[split]:
            found[split][rows] = None
            last_new = number
    return {split: list(maps) for split, maps in found.items()}


def _draw(settings: LakeSettings, draw: random.Random) -> tuple[str, ...]:
    size = settings.size
    # A board without a way to the goal is thrown away; the bounds of ``frozen`` keep that rare
    # enough.
    while True:
        board = [
            ["F" if draw.random() < settings.frozen else "H" for _ in range(size)]
            for _ in range(size)
        ]
        board[0][0] = "S"
        board[-1][-1] = "G"
        if rules.is_valid(board, size):
            return tuple(map("".join, board))


PACKAGE = EnvPackage(
    name=NAME,
    settings=LakeSettings,
    make=FrozenLake,
    tasks=tasks,
    prompts=prompts,
    project=project,
    expert=EXPERT,
)
