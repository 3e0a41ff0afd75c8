"""Text version of FrozenLake: gymnasium's rules on generated maps."""

import random
from functools import lru_cache
from typing import Any

from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv, is_valid

from agent_system.environments.chat_prompts import ChatPrompts, CompactPrompts
from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.frozen_lake.expert import EXPERT
from agent_system.environments.env_package.frozen_lake.prompts import (
    MOVES,
    append_map_description,
    draw_map,
    shorten_observation,
)
from agent_system.environments.env_package.frozen_lake.settings import LakeSettings
from agent_system.environments.package import EnvPackage
from verl.utils.seeds import derive_seed

NAME = "frozen_lake"
RULES = """\
You cross a frozen lake, one cell per move: left, down, right or up. P is you, \
. is ice, O is a hole, G is the goal.
Reach the goal. Whoever enters a hole has lost. {ice}"""
ICE_RULES = {
    True: (
        "The ice is slippery: only one move in three goes where you want, "
        "the others go to one side of it."
    ),
    False: "The ice is not slippery: you move where you want.",
}
VAL_DIVISOR = 5  # one map in five belongs to the validation split
# Stop drawing after this many draws without a new map. Small lakes have few different maps.
MAX_DRAWS_WITHOUT_NEW_MAP = 300


class FrozenLakeTextEnv(Env):
    """Environment with reward 1.0 on the goal, else 0.0. The goal and holes end an episode.

    The caller limits the number of turns. An unknown action changes nothing and is not valid.
    Without slippery ice, this also applies to moves that would leave the lake.
    """

    placement = "inline"

    def __init__(self, settings: LakeSettings) -> None:
        self.settings = settings
        self._gym_env: Any = None  # environment of the current map
        self._map_rows: tuple[str, ...] = ()

    def reset(self, task: Task, seed: int) -> Observation:
        """Start on ``task["map"]``. ``seed`` determines the directions of slipping."""
        if self._map_rows != tuple(task["map"]):
            self._map_rows = tuple(task["map"])
            # Reuse the environment for equal maps: gymnasium builds a table of all transitions.
            self._gym_env = FrozenLakeEnv(desc=task["map"], is_slippery=self.settings.slippery)
        self._gym_env.reset(seed=seed)
        return self._make_observation("")

    def step(self, action: str) -> Step:
        action = action.strip().lower()
        if action not in self._list_possible_moves():
            observation = self._make_observation("That is not possible here.\n")
            return observation, 0.0, False, {"won": False, "is_action_valid": False}
        _, reward, done, _, _ = self._gym_env.step(list(MOVES).index(action))
        is_success = bool(reward > 0)
        message = (
            "You reached the goal.\n" if is_success else "You fell into a hole.\n" if done else ""
        )
        info = {"won": is_success, "is_action_valid": True}
        return self._make_observation(message), float(reward), bool(done), info

    def _get_agent_cell(self) -> tuple[int, int]:
        return divmod(int(self._gym_env.s), len(self._map_rows))

    def _list_possible_moves(self) -> list[str]:
        # On slippery ice all moves are possible. The agent may move sideways, so it may change
        # its cell even if the move itself would leave the lake.
        if self.settings.slippery:
            return list(MOVES)
        row, column = self._get_agent_cell()
        cell_indices = range(len(self._map_rows))
        return [
            move
            for move, (row_offset, column_offset) in MOVES.items()
            if row + row_offset in cell_indices and column + column_offset in cell_indices
        ]

    def _make_observation(self, message: str) -> Observation:
        row, column = self._get_agent_cell()
        drawn_map = draw_map(self._map_rows, (row, column))
        anchor = f"{'/'.join(self._map_rows)} {row},{column}"
        info = {"admissible_actions": self._list_possible_moves()}
        return Observation(f"{message}{drawn_map}", anchor=anchor, info=info)


def make_prompts(settings: LakeSettings) -> ChatPrompts | CompactPrompts:
    if settings.prompt == "compact":
        return CompactPrompts(shorten_observation, append_map_description, keep_first=True)
    return ChatPrompts(RULES.format(ice=ICE_RULES[settings.slippery]), example="down")


def list_tasks(settings: LakeSettings, split: str) -> list[Task]:
    """Return one task per distinct map. Small lakes have fewer maps than the settings request."""
    maps = _generate_maps(settings)[split]  # pyright: ignore[reportArgumentType]  settings are hashable
    return [
        {"task_id": f"{NAME}/{'-'.join(map_rows)}", "data_source": NAME, "map": list(map_rows)}
        for map_rows in maps
    ]


@lru_cache(maxsize=4)
def _generate_maps(settings: LakeSettings) -> dict[str, list[tuple[str, ...]]]:
    max_maps_by_split = {"train": settings.train_maps, "val": settings.val_maps}
    maps_by_split: dict[str, dict[tuple[str, ...], None]] = {"train": {}, "val": {}}
    map_number = last_new_map_number = 0
    while map_number < last_new_map_number + MAX_DRAWS_WITHOUT_NEW_MAP and any(
        len(maps_by_split[split]) < max_maps_by_split[split] for split in max_maps_by_split
    ):
        map_rows = _generate_map(
            settings, random.Random(derive_seed(NAME, settings.map_seed, map_number))
        )
        # Choose the split by a hash of the map: different map numbers may give the same map.
        split = "train" if derive_seed(NAME, *map_rows) % VAL_DIVISOR else "val"
        map_number += 1
        if (
            len(maps_by_split[split]) < max_maps_by_split[split]
            and map_rows not in maps_by_split[split]
        ):
            maps_by_split[split][map_rows] = None
            last_new_map_number = map_number
    return {split: list(maps) for split, maps in maps_by_split.items()}


def _generate_map(settings: LakeSettings, rng: random.Random) -> tuple[str, ...]:
    side_length = settings.size
    # Draw again if no path leads to the goal. With the bounds of ``frozen`` this is rare.
    while True:
        rows_of_symbols = [
            ["F" if rng.random() < settings.frozen else "H" for _ in range(side_length)]
            for _ in range(side_length)
        ]
        rows_of_symbols[0][0] = "S"
        rows_of_symbols[-1][-1] = "G"
        if is_valid(rows_of_symbols, side_length):
            return tuple(map("".join, rows_of_symbols))


PACKAGE = EnvPackage(
    name=NAME,
    settings=LakeSettings,
    make=FrozenLakeTextEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    expert=EXPERT,
)
