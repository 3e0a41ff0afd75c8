"""The ``env.alfworld`` section as a typed value, and the names of the six task types."""

import dataclasses
import difflib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_system.environments.sections import SHARED, known_values

TASK_TYPES = {
    "pick": "pick_and_place_simple",
    "light": "look_at_obj_in_light",
    "clean": "pick_clean_then_place_in_recep",
    "heat": "pick_heat_then_place_in_recep",
    "cool": "pick_cool_then_place_in_recep",
    "two": "pick_two_obj_and_place",
}
SHORT_NAMES = {official: short for short, official in TASK_TYPES.items()}
SOURCES = ("auto", "generated", "official")
PROMPTS = ("compact", "full")
ELSEWHERE = frozenset(
    {"eval_dataset", "level_prompts"}
)  # of the configuration (val_split is made of it), of prompts
VAL_SPLITS = ("valid_seen", "valid_unseen")


@dataclass(frozen=True)
class AlfworldSettings:
    """What ``env.alfworld`` configures. ``receptacles`` and ``objects`` are inclusive ranges ``(lo,
    hi)``.

    ``source``: ``generated`` plays rooms generated from the wheel's floor plans, ``official`` the
    games under ``$ALFWORLD_DATA``, ``auto`` the official ones where they are installed.
    ``receptacles``, ``objects``, ``train_games``, ``val_games`` and ``seed`` shape generated games;
    ``val_split`` chooses among official ones. ``max_steps`` bounds the episodes of demonstrations
    (the collector has its own ``env.max_steps``).
    """

    task_types: tuple[str, ...] = ("pick",)
    receptacles: tuple[int, int] = (3, 5)
    objects: tuple[int, int] = (4, 8)
    train_games: int = 2000
    val_games: int = 256
    data_dir: str = "data/alfworld"
    seed: int = 0
    max_steps: int = 15
    prompt: str = "compact"
    source: str = "auto"
    val_split: str = "valid_unseen"

    @classmethod
    def from_section(cls, section: Mapping[str, Any] | None) -> "AlfworldSettings":
        """Read a section. Task types may be given by short (``pick``) or official name.

        Raises ``ValueError`` naming key, value and what is allowed.
        """
        names = [field.name for field in dataclasses.fields(cls)]
        values = known_values(names, section, "alfworld", SHARED | ELSEWHERE)
        for key in ("task_types", "receptacles", "objects"):
            if key in values:
                given = [values[key]] if isinstance(values[key], str) else values[key]
                values[key] = tuple(given)
        if "task_types" in values:
            values["task_types"] = tuple(short_name(name) for name in values["task_types"])
        settings = cls(**values)
        settings.check()
        return settings

    def check(self) -> None:
        """Raise ``ValueError`` for a value that cannot work."""
        for key, least in (("receptacles", 2), ("objects", 0)):
            bounds = getattr(self, key)
            if len(bounds) != 2 or not least <= bounds[0] <= bounds[1]:
                raise ValueError(
                    f"env.alfworld.{key}={list(bounds)}: need [lo, hi] with {least} <= lo <= hi"
                )
        for key, allowed in (("source", SOURCES), ("prompt", PROMPTS), ("val_split", VAL_SPLITS)):
            if getattr(self, key) not in allowed:
                raise ValueError(
                    f"env.alfworld.{key}={getattr(self, key)!r}: allowed are {', '.join(allowed)}"
                )
        if not self.task_types:
            raise ValueError(
                f"env.alfworld.task_types is empty: choose from {', '.join(TASK_TYPES)}"
            )
        if self.train_games < 1 or self.val_games < 1:
            raise ValueError("env.alfworld.train_games and val_games must be at least 1")


def short_name(task_type: str) -> str:
    """``pick_and_place_simple`` -> ``pick``; short names pass.

    Raises ``ValueError`` for an unknown name.
    """
    short = SHORT_NAMES.get(task_type, task_type)
    if short not in TASK_TYPES:
        nearest = difflib.get_close_matches(short, [*TASK_TYPES, *SHORT_NAMES], n=1)
        hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
        raise ValueError(
            f"env.alfworld.task_types: no task type {task_type!r}{hint} Allowed: {', '.join(TASK_TYPES)}"
        )
    return short
