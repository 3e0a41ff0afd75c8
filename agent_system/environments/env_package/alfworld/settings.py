"""Settings of ``env.alfworld``, and the six task types."""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, ClassVar, Literal, get_args

from pydantic import BeforeValidator, ValidationInfo, field_validator

from agent_system.environments.settings import PromptSettings
from verl.config.settings import PositiveInt, Seed

TaskType = Literal["pick", "light", "clean", "heat", "cool", "two"]
TASK_TYPES = {
    "pick": "pick_and_place_simple",
    "light": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
SHORT_TASK_TYPES = {official: short for short, official in TASK_TYPES.items()}
OFFICIAL_FOLDER = "json_2.1.1"
SPLITS_BY_EVAL_DATASET = {
    "eval_in_distribution": "valid_seen",
    "eval_out_of_distribution": "valid_unseen",
}


@dataclass(frozen=True, slots=True)
class TaskGoal:
    """Goal of a game: task type (short name), and classes of object, target receptacle and lamp.

    In the task type ``light`` an object must be looked at under a lamp: its receptacle is "". In
    the other task types the lamp is "".
    """

    task_type: str
    object_class: str
    receptacle_class: str
    lamp_class: str


def find_official_folder() -> Path | None:
    """Return ``$ALFWORLD_DATA/json_2.1.1``, made by ``alfworld-download``; None if missing."""
    data_root = os.environ.get("ALFWORLD_DATA")
    games_folder = Path(data_root).expanduser() / OFFICIAL_FOLDER if data_root else None
    return games_folder if games_folder is not None and (games_folder / "train").is_dir() else None


def _shorten_task_types(task_types_value: object) -> object:
    """Replace official task types (``pick_and_place_simple``) by short names (``pick``)."""
    task_type_names = [task_types_value] if isinstance(task_types_value, str) else task_types_value
    if isinstance(task_type_names, list | tuple):
        return tuple(
            SHORT_TASK_TYPES.get(task_type_name, task_type_name)
            for task_type_name in task_type_names
        )
    return task_types_value


class AlfworldSettings(PromptSettings):
    """Settings of ``env.alfworld``: task types, source of the games, prompts.

    ``receptacles``, ``objects``, ``train_games``, ``val_games`` and ``seed`` affect generated games
    only. ``val_split`` and ``eval_dataset`` affect official games only.
    """

    variant_aliases: ClassVar[tuple[str, ...]] = ("AlfredTWEnv",)
    task_types: Annotated[tuple[TaskType, ...], BeforeValidator(_shorten_task_types)] = ("pick",)
    """household tasks, by short (pick) or official name (pick_and_place_simple)"""
    source: Literal["auto", "generated", "official"] = "auto"
    """generated: rooms made from the wheel's floor plans; official: the games under $ALFWORLD_DATA;
    auto: official if installed, else generated"""
    receptacles: tuple[int, int] = (3, 5)
    """fewest and most receptacles of a generated room"""
    objects: tuple[int, int] = (4, 8)
    """fewest and most objects of a generated room"""
    train_games: PositiveInt = 2000
    """generated games to train on"""
    val_games: PositiveInt = 256
    """generated games held out: other floor plans, other seeds"""
    # The base class allows null. Here null is an error, because game generation needs a seed.
    seed: Seed = 0  # pyright: ignore[reportIncompatibleVariableOverride]  frozen
    """seed of game generation: the same games in every run"""
    data_dir: str = "data/alfworld"
    """folder of generated games, named by a hash of the settings, and of the planner's translations
    of all games"""
    thoughts: Literal["announced", "carried"] = "announced"
    """thoughts of demonstrations. announced: the situation, what was tried, and the plan, action
    included; carried: the facts that the action needs, derived from the prompt
    (env.history=window)"""
    val_split: Literal["valid_seen", "valid_unseen"] | None = None
    """official games to validate on; null: the split of eval_dataset"""
    eval_dataset: Literal["eval_in_distribution", "eval_out_of_distribution"] = (
        "eval_in_distribution"
    )
    """official games to validate on, by the name that job scripts use"""

    @field_validator("task_types")
    @classmethod
    def _require_task_type(cls, task_types: tuple[TaskType, ...]) -> tuple[TaskType, ...]:
        if not task_types:
            raise ValueError(
                f"no task type; allowed: any of {', '.join(get_args(TaskType))}; fix: name one"
            )
        return task_types

    @field_validator("receptacles", "objects")
    @classmethod
    def _check_range(cls, bounds: tuple[int, int], info: ValidationInfo) -> tuple[int, int]:
        min_count = 2 if info.field_name == "receptacles" else 0
        if not min_count <= bounds[0] <= bounds[1]:
            allowed = f"[fewest, most], {min_count} <= fewest <= most"
            fix = f"env.alfworld.{info.field_name}=[3,5]"
            raise ValueError(f"not a range; allowed: {allowed}; fix: {fix}")
        return bounds

    @property
    def official_split(self) -> str:
        """Folder name of the official games to validate on."""
        return self.val_split or SPLITS_BY_EVAL_DATASET[self.eval_dataset]

    @property
    def uses_generated_games(self) -> bool:
        """True if the games are generated.

        With ``source=auto`` they are generated if the official games are not in ``$ALFWORLD_DATA``.
        """
        if self.source == "auto":
            return find_official_folder() is None
        return self.source == "generated"

    def describe_substitute_data(self, env_name: str) -> str:
        if not self.uses_generated_games or (self.source == "generated" and "/" not in env_name):
            return ""
        reason = (
            "no games in ALFWORLD_DATA"
            if self.source == "auto"
            else "env.alfworld.source=generated"
        )
        return f"rooms generated here, in place of ALFWorld's games ({reason})"

    def count_configured_tasks(self, split: str) -> int | None:
        if not self.uses_generated_games:
            return None
        return self.val_games if split == "val" else self.train_games
