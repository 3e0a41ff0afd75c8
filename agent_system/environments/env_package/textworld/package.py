"""TextWorld: find, move, unlock and cook in generated houses. Games are made on this machine.

Training and validation games differ: validation games never occur in training, and the kinds
``simple`` and ``cooking`` have other foods in validation.
"""

import re
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.textworld.settings import TextWorldSettings
from agent_system.environments.env_package.textworld.store import GameStore
from agent_system.environments.package import EnvPackage

NAME = "textworld"
# Maps each kind of game to the settings that change its games. The hash of the settings contains
# only these. Otherwise the same games would be made several times.
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
# Commands of the interpreter, not of the game. The environment refuses them, because they write
# files, ask questions or shorten descriptions.
_COMMAND_LIST = """quit q restart restore save undo script transcript noscript unscript recording
replay verbose long brief normal superbrief short notify"""
INTERPRETER_COMMANDS = frozenset(_COMMAND_LIST.split())
UNKNOWN_COMMAND_REPLY = "That's not a verb I recognise."
# Actions with other characters are refused. A backslash or null character would make the
# interpreter wait forever for another key.
_PLAIN_TEXT_PATTERN = re.compile(r"[\w ,.;:!?'\"&()-]*")
_WORD_PATTERN = re.compile(r"[\w-]+")
# Status line (score, moves, location) that the game prints below an answer.
_STATUS_LINE_PATTERN = re.compile(r"\n>\s.*\Z", re.DOTALL)
_FAREWELL_PATTERN = re.compile(r"\s*Would you like to RESTART.*\Z", re.DOTALL)
_EMPTY_LINES_PATTERN = re.compile(r"\n\s*\n+")


def open_game_store(settings: TextWorldSettings) -> GameStore:
    game_settings = {key: getattr(settings, key) for key in GAME_SETTINGS[settings.game]}
    spec = {"game": settings.game, "game_seed": settings.game_seed, "settings": game_settings}
    # Validation comes first, so that games that occur in both splits are dropped from training.
    return GameStore(
        settings.data_dir, spec, {"val": settings.val_games, "train": settings.train_games}
    )


class TextWorldEnv:
    """Environment whose reward is the change of the score, divided by the maximum score."""

    placement = "process"  # the interpreter is C code, and the logic of games is slow Python

    def __init__(self, settings: TextWorldSettings) -> None:
        import textworld

        self._textworld_module = textworld
        self._store = open_game_store(settings)
        text_fields = ("feedback", "description", "inventory", "objective", "admissible_commands")
        number_fields = ("won", "lost", "score", "max_score")
        self._requested_infos = textworld.EnvInfos(
            **dict.fromkeys(text_fields + number_fields, True)
        )
        self._engine: Any = None
        self._state: Any = None
        self._loaded_game: str | None = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        # Keep the loaded game, because rows of a group often use the same game one after the other.
        if self._loaded_game != task["game"]:
            compiled_path = str(self._store.get_compiled_path(task["game"]))
            # Clear the name first: if loading fails, no game is loaded.
            self._loaded_game = None
            if self._engine is None:
                self._engine = self._textworld_module.start(compiled_path, self._requested_infos)
            else:
                self._engine.load(compiled_path)
            self._loaded_game = task["game"]
        self._state = self._engine.reset()
        return self._make_observation(f"{self._state.objective}\n{self._state.description}")

    def step(self, action: str) -> Step:
        """Apply ``action``, which is valid if it was admissible.

        An interpreter command, such as ``save``, is not passed to the game and only uses up a turn.
        """
        previous_state = self._state
        if action not in previous_state.admissible_commands and not is_game_command(action):
            observation = self._make_observation(UNKNOWN_COMMAND_REPLY)
            observation.info["is_action_valid"] = False
            return observation, 0.0, False, observation.info
        self._state, _, done = self._engine.step(action)
        # A game without points has a maximum score of 0.
        reward = (self._state.score - previous_state.score) / max(1, self._state.max_score)
        observation = self._make_observation(self._state.feedback)
        observation.info["is_action_valid"] = action in previous_state.admissible_commands
        return observation, reward, bool(done), observation.info

    def gold_path(self, task: Task) -> list[str]:
        return self._store.gold_path(task["game"])

    def close(self) -> None:
        if self._engine is not None:
            self._engine.close()
            self._engine = None

    def _make_observation(self, text: str) -> Observation:
        state = self._state
        state_key = _clean_text(f"{state.description}\n{state.inventory}\n{state.score}")
        info = {
            "won": bool(state.won),
            "admissible_actions": list(state.admissible_commands),
            "score": state.score,
        }
        return Observation(_clean_text(text), anchor=state_key, info=info)


def is_game_command(action: str) -> bool:
    """Return True if ``action`` is plain text without interpreter commands such as ``save``."""
    words = _WORD_PATTERN.findall(action.lower())
    has_interpreter_command = any(
        word in INTERPRETER_COMMANDS or word.startswith("tw-") for word in words
    )
    return not has_interpreter_command and _PLAIN_TEXT_PATTERN.fullmatch(action) is not None


def _clean_text(text: str) -> str:
    return _EMPTY_LINES_PATTERN.sub(
        "\n", _FAREWELL_PATTERN.sub("", _STATUS_LINE_PATTERN.sub("", text))
    ).strip()


def list_tasks(settings: TextWorldSettings, split: str) -> list[Task]:
    """Return one task per game of ``split``.

    Missing games are made first, which takes about half a second of CPU time per game.
    """
    data_source = f"{NAME}/{settings.game}"
    game_hashes = open_game_store(settings).list_game_hashes(split)
    return [
        {"task_id": f"{data_source}/{game_hash}", "data_source": data_source, "game": game_hash}
        for game_hash in game_hashes
    ]


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextWorldSettings,
    make=TextWorldEnv,
    tasks=list_tasks,
    prompts=lambda settings: ChatPrompts(
        RULES, "open wooden door", list_actions=settings.list_actions, keep_first=True
    ),
    variants=TextWorldSettings.list_variants,
)
