"""TextWorld: find, carry, unlock and cook in generated houses; games are made on this machine.

Train and validation games have different content: the store drops what occurs twice, and ``simple``
and ``cooking`` take other foods for validation.
"""

import re
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, project
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.textworld.settings import TextWorldSettings
from agent_system.environments.env_package.textworld.store import GameStore
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts

NAME = "textworld"
COOKING = ("recipe", "take", "go", "open", "cook", "cut", "drop")
# What shapes a kind of game. Other keys are left out of the store's name, so that they do not make
# the same games again.
SETTINGS_OF = {
    "coin_collector": ("level",),
    "treasure_hunter": ("level",),
    "simple": ("rewards", "goal"),
    "cooking": COOKING,
}
RULES = """\
You play a text adventure. Each turn you see what happened and which commands are possible. \
Reach the goal in as few turns as you can. Copy your command exactly from the list of \
possible actions."""
# What the interpreter itself obeys: it would write files, ask back, or describe less from then on.
_INTERPRETER = """quit q restart restore save undo script transcript noscript unscript recording
replay verbose long brief normal superbrief short notify"""
OUT_OF_GAME = frozenset(_INTERPRETER.split())
NOT_UNDERSTOOD = "That's not a verb I recognise."
# A backslash is a key of the interpreter, which waits for another one for ever; so does it after a
# null character.
_PLAIN = re.compile(r"[\w ,.;:!?'\"&()-]*")
_WORD = re.compile(r"[\w-]+")
# What the game prints below its answer: score, moves, place.
_PROMPT_LINE = re.compile(r"\n>\s.*\Z", re.DOTALL)
_FAREWELL = re.compile(r"\s*Would you like to RESTART.*\Z", re.DOTALL)
_GAPS = re.compile(r"\n\s*\n+")


def store_of(settings: TextWorldSettings) -> GameStore:
    """Where the games of ``settings`` are."""
    own = {key: getattr(settings, key) for key in SETTINGS_OF[settings.game]}
    spec = {"game": settings.game, "game_seed": settings.game_seed, "settings": own}
    # Validation first: the generator gives later splits only what earlier ones do not hold.
    return GameStore(
        settings.data_dir, spec, {"val": settings.val_games, "train": settings.train_games}
    )


class TextWorldEnv:
    """One game at a time.

    Reward is the change of the score, in shares of the highest score the game has.
    """

    placement = "process"  # the interpreter is C code, and the game's logic is slow Python

    def __init__(self, settings: TextWorldSettings) -> None:
        import textworld

        self._textworld = textworld
        self._store = store_of(settings)
        wanted = ("feedback", "description", "inventory", "objective", "admissible_commands")
        numbers = ("won", "lost", "score", "max_score")
        self._infos = textworld.EnvInfos(**dict.fromkeys(wanted + numbers, True))
        self._engine: Any = None
        self._state: Any = None
        self._loaded: str | None = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``, which says everything: ``seed`` changes nothing."""
        del seed  # the task says it all
        # The members of a group often play the same game one after the other: it is loaded once.
        if self._loaded != task["game"]:
            path = str(self._store.compiled(task["game"]))
            # Nothing is loaded while loading is under way: a failure must not leave the old name.
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

        An action is valid when it was admissible. What speaks to the interpreter instead of the
        game is not understood, and costs a move of the episode alone.
        """
        before = self._state
        if action not in before.admissible_commands and not is_in_game(action):
            observation = self._observe(NOT_UNDERSTOOD)
            observation.info["is_action_valid"] = False
            return observation, 0.0, False, observation.info
        self._state, _, done = self._engine.step(action)
        # A game without points has a highest score of 0.
        reward = (self._state.score - before.score) / max(1, self._state.max_score)
        observation = self._observe(self._state.feedback)
        # Admissible before the move, for what is admissible after it says nothing about it.
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


def is_in_game(action: str) -> bool:
    """Whether ``action`` is plain text without a command to the interpreter."""
    words = _WORD.findall(action.lower())
    spoken_to = any(word in OUT_OF_GAME or word.startswith("tw-") for word in words)
    return not spoken_to and _PLAIN.fullmatch(action) is not None


def _tidy(text: str) -> str:
    return _GAPS.sub("\n", _FAREWELL.sub("", _PROMPT_LINE.sub("", text))).strip()


def tasks(settings: TextWorldSettings, split: str) -> list[Task]:
    """The games of ``split``; they are made first where they are not on disk, at about half a
    second of CPU each.
    """
    source = f"{NAME}/{settings.game}"
    names = store_of(settings).hashes("val" if split == "val" else "train")
    return [{"task_id": f"{source}/{name}", "data_source": source, "game": name} for name in names]


def prompts(settings: TextWorldSettings) -> Prompts:
    """Rules, observations and, unless ``list_actions`` is false, the possible commands."""
    list_actions = settings.list_actions
    return ChatPrompts(RULES, "open wooden door", list_actions=list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextWorldSettings,
    make=TextWorldEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    variants=TextWorldSettings.choices,
)
