"""TextWorld: find, carry, unlock and cook in generated houses; games are made on this machine.

Section keys are those of ``Settings``. Train and validation games have different content: the store
drops what occurs twice, and ``simple`` and ``cooking`` take other foods for validation.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from agent_system.environments.base import EnvPackage, Observation, Prompts, Task
from agent_system.environments.chat_prompts import ChatPrompts, project
from agent_system.environments.env_package.textworld.store import GameStore
from agent_system.environments.sections import read_section, setting

NAME = "textworld"
COOKING = ("recipe", "take", "go", "open", "cook", "cut", "drop")
SETTINGS_OF = {
    "coin_collector": ("level",),
    "treasure_hunter": ("level",),
    "simple": ("rewards", "goal"),
    "cooking": COOKING,
}
RULES = """\
You play a text adventure. Each turn you see what happened and which commands are possible. Reach the goal in as few \
turns as you can. Copy your command exactly from the list of possible actions."""
_PROMPT_LINE = re.compile(
    r"\n>\s.*\Z", re.DOTALL
)  # what the game prints below its answer: score, moves, place
_FAREWELL = re.compile(r"\s*Would you like to RESTART.*\Z", re.DOTALL)
_GAPS = re.compile(r"\n\s*\n+")


@dataclass(frozen=True)
class Settings:
    """``level`` is the difficulty of ``coin_collector`` (at most 300) and ``treasure_hunter`` (at
    most 30).

    ``rewards`` and ``goal`` shape ``simple``; the keys from ``recipe`` to ``drop`` shape
    ``cooking``: ingredients, ingredients to fetch, places, and what has to be done. ``game_seed``
    draws the games, the same ones in every run.
    """

    game: str = setting("treasure_hunter", choices=tuple(SETTINGS_OF))
    level: int = setting(5, low=1, high=300)
    rewards: str = setting("dense", choices=("dense", "balanced", "sparse"))
    goal: str = setting("detailed", choices=("detailed", "brief", "none"))
    recipe: int = setting(1, low=1, high=5)
    take: int = setting(1, low=0, high=5)
    go: int = setting(1, choices=(1, 6, 9, 12))
    open: bool = setting(True)
    cook: bool = setting(False)
    cut: bool = setting(False)
    drop: bool = setting(False)
    train_games: int = setting(100, low=1)
    val_games: int = setting(24, low=1)
    game_seed: int = setting(0, low=0)
    data_dir: str = setting("data/textworld")
    list_actions: bool = setting(True)


def store_of(settings: Settings) -> GameStore:
    """Where the games of ``settings`` are. Raises ``ValueError`` for what cannot be made."""
    if settings.game == "treasure_hunter" and settings.level > 30:
        raise ValueError(
            f"env.{NAME}.level={settings.level}: treasure_hunter has the levels 1 to 30"
        )
    if settings.game == "cooking" and settings.take > settings.recipe:
        raise ValueError(
            f"env.{NAME}.take={settings.take}: at most env.{NAME}.recipe={settings.recipe} ingredients"
        )
    own = {key: getattr(settings, key) for key in SETTINGS_OF[settings.game]}
    spec = {"game": settings.game, "game_seed": settings.game_seed, "settings": own}
    return GameStore(
        settings.data_dir, spec, {"val": settings.val_games, "train": settings.train_games}
    )


class TextWorldEnv:
    """One game at a time.

    Reward is the change of the score, in shares of the highest score the game has.
    """

    placement = "process"  # the interpreter is C code, and the game's logic is slow Python

    def __init__(self, section: Mapping[str, Any]) -> None:
        import textworld

        self._textworld = textworld
        self._store = store_of(read_section(Settings, section, NAME))
        wanted = ("feedback", "description", "inventory", "objective", "admissible_commands")
        numbers = ("won", "lost", "score", "max_score")
        self._infos = textworld.EnvInfos(**dict.fromkeys(wanted + numbers, True))
        self._engine: Any = None
        self._state: Any = None
        self._loaded: str | None = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``, which says everything: ``seed`` changes nothing."""
        if self._loaded != task["game"]:
            path = str(self._store.compiled(task["game"]))
            self._loaded = None
            if self._engine is None:
                self._engine = self._textworld.start(path, self._infos)
            else:
                self._engine.load(path)
            self._loaded = task["game"]
        self._state = self._engine.reset()
        return self._observe(f"{self._state.objective}\n{self._state.description}")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play ``action``; done when the game is won or lost.

        An action is valid when it was admissible.
        """
        before = self._state
        self._state, _, done = self._engine.step(action)
        reward = (self._state.score - before.score) / max(1, self._state.max_score)
        observation = self._observe(self._state.feedback)
        observation.info["is_action_valid"] = action in before.admissible_commands
        return observation, reward, bool(done), observation.info

    def gold_path(self, task: Task) -> list[str]:
        """Commands that win ``task``."""
        return self._store.gold_path(task["game"])

    def close(self) -> None:
        """End the interpreter."""
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _observe(self, text: str) -> Observation:
        state = self._state
        anchor = _tidy(f"{state.description}\n{state.inventory}\n{state.score}")
        info = {
            "won": bool(state.won),
            "admissible_actions": list(state.admissible_commands),
            "score": state.score,
        }
        return Observation(_tidy(text), anchor=anchor, info=info)


def _tidy(text: str) -> str:
    return _GAPS.sub("\n", _FAREWELL.sub("", _PROMPT_LINE.sub("", text))).strip()


def tasks(section: Mapping[str, Any], split: str) -> list[Task]:
    """The games of ``split``; they are made first where they are not on disk, at about half a
    second of CPU each.
    """
    settings = read_section(Settings, section, NAME)
    source = f"{NAME}/{settings.game}"
    names = store_of(settings).hashes("val" if split == "val" else "train")
    return [{"task_id": f"{source}/{name}", "data_source": source, "game": name} for name in names]


def prompts(section: Mapping[str, Any]) -> Prompts:
    """Rules, observations and, unless ``list_actions`` is false, the possible commands."""
    list_actions = read_section(Settings, section, NAME).list_actions
    return ChatPrompts(RULES, "open wooden door", list_actions=list_actions, keep_first=True)


PACKAGE = EnvPackage(NAME, TextWorldEnv, tasks, prompts, project)
