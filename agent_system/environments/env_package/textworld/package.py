"""TextWorld: find, move, unlock and cook in generated houses. Games are made on this machine.

Training and validation games have different content: the store drops games that occur in both, and
``simple`` and ``cooking`` have other foods in validation.
"""

import re
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, project_action
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.textworld.settings import TextWorldSettings
from agent_system.environments.env_package.textworld.store import GameStore
from agent_system.environments.package import EnvPackage

NAME = "textworld"
# By kind of game: the settings that change it. Only these are part of the hash that names the
# stored games. With other settings in the hash, the same games would be made again.
GAME_SETTINGS = {
    "coin_collector": ("level",),
    "treasure_hunter": ("level",),
    "simple": ("rewards", "goal"),
    "cooking": ("recipe", "take", "go", "open", "cook", "cut", "drop"),
}
RULES = """\
You play a text adventure. Each turn you see what happened and which commands are possible. \
Reach the goal in as few turns as you can. Copy your command exactly from the list of \
possible actions."""
# Commands to the interpreter of the game file, which are refused. They would write files, ask
# questions or shorten descriptions.
_INTERPRETER = """quit q restart restore save undo script transcript noscript unscript recording
replay verbose long brief normal superbrief short notify"""
OUT_OF_GAME = frozenset(_INTERPRETER.split())
UNKNOWN_COMMAND_REPLY = "That's not a verb I recognise."
# Other characters are refused: after a backslash or a null character the interpreter waits forever
# for another key.
_PLAIN = re.compile(r"[\w ,.;:!?'\"&()-]*")
_WORD = re.compile(r"[\w-]+")
# Status line that the game prints below its answer: score, moves, location.
_PROMPT_LINE = re.compile(r"\n>\s.*\Z", re.DOTALL)
_FAREWELL = re.compile(r"\s*Would you like to RESTART.*\Z", re.DOTALL)
_GAPS = re.compile(r"\n\s*\n+")


def open_store(settings: TextWorldSettings) -> GameStore:
    """Return the store with the games of ``settings``."""
    game_settings = {key: getattr(settings, key) for key in GAME_SETTINGS[settings.game]}
    spec = {"game": settings.game, "game_seed": settings.game_seed, "settings": game_settings}
    # Validation first: the generator drops games of earlier splits from later ones.
    return GameStore(
        settings.data_dir, spec, {"val": settings.val_games, "train": settings.train_games}
    )


class TextWorldEnv:
    """Environment whose reward is the change of the score, divided by the maximum score."""

    placement = "process"  # the interpreter is C code, and the logic of games is slow Python

    def __init__(self, settings: TextWorldSettings) -> None:
        import textworld

        self._textworld = textworld
        self._store = open_store(settings)
        text_fields = ("feedback", "description", "inventory", "objective", "admissible_commands")
        number_fields = ("won", "lost", "score", "max_score")
        self._infos = textworld.EnvInfos(**dict.fromkeys(text_fields + number_fields, True))
        self._engine: Any = None
        self._state: Any = None
        self._loaded_game: str | None = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        del seed  # the task determines the episode
        # Load a game once: the members of a group often use the same game one after the other.
        if self._loaded_game != task["game"]:
            path = str(self._store.compiled_path(task["game"]))
            # Reset the name first: after a failed load the old game must not count as loaded.
            self._loaded_game = None
            if self._engine is None:
                self._engine = self._textworld.start(path, self._infos)
            else:
                self._engine.load(path)
            self._loaded_game = task["game"]
        self._state = self._engine.reset()
        return self._make_observation(f"{self._state.objective}\n{self._state.description}")

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Apply ``action``. The episode is done when the game ends.

        An action is valid if it was admissible. A command to the interpreter is not passed to the
        game. It only uses up a turn.
        """
        old_state = self._state
        if action not in old_state.admissible_commands and not is_in_game(action):
            observation = self._make_observation(UNKNOWN_COMMAND_REPLY)
            observation.info["is_action_valid"] = False
            return observation, 0.0, False, observation.info
        self._state, _, done = self._engine.step(action)
        # A game without points has a maximum score of 0.
        reward = (self._state.score - old_state.score) / max(1, self._state.max_score)
        observation = self._make_observation(self._state.feedback)
        # Compare with the commands that were admissible before the move.
        observation.info["is_action_valid"] = action in old_state.admissible_commands
        return observation, reward, bool(done), observation.info

    def gold_path(self, task: Task) -> list[str]:
        return self._store.gold_path(task["game"])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _make_observation(self, text: str) -> Observation:
        state = self._state
        anchor = _clean_text(f"{state.description}\n{state.inventory}\n{state.score}")
        info = {
            "won": bool(state.won),
            "admissible_actions": list(state.admissible_commands),
            "score": state.score,
        }
        return Observation(_clean_text(text), anchor=anchor, info=info)


def is_in_game(action: str) -> bool:
    """Return True if ``action`` is plain text without a command to the interpreter."""
    words = _WORD.findall(action.lower())
    has_interpreter_command = any(word in OUT_OF_GAME or word.startswith("tw-") for word in words)
    return not has_interpreter_command and _PLAIN.fullmatch(action) is not None


def _clean_text(text: str) -> str:
    return _GAPS.sub("\n", _FAREWELL.sub("", _PROMPT_LINE.sub("", text))).strip()


def list_tasks(settings: TextWorldSettings, split: str) -> list[Task]:
    """Return the games of ``split``.

    Games that are not on disk are made first, which takes about half a second of CPU each.
    """
    source = f"{NAME}/{settings.game}"
    names = open_store(settings).game_hashes("val" if split == "val" else "train")
    return [{"task_id": f"{source}/{name}", "data_source": source, "game": name} for name in names]


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextWorldSettings,
    make=TextWorldEnv,
    tasks=list_tasks,
    prompts=lambda settings: ChatPrompts(
        RULES, "open wooden door", list_actions=settings.list_actions, keep_first=True
    ),
    project=project_action,
    variants=TextWorldSettings.list_variants,
)
