"""TextWorldExpress: household and reasoning games in text, 1000 turns per second on one core.

All environments of a process share one JVM (``agent_system/environments/jvm.py``). For the game
``sorting``, each environment has its own JVM, because its instances disturb each other (measured
with version 1.1.0).

A task is the name of a game and a number from the train, dev or test fold of the library. Numbers
are seeds, but different seeds can give the same game. Games are therefore compared by content.
Equal games are used only once, and games of the validation fold are not used for training.
"""

import contextlib
import functools
import json
from collections import Counter
from typing import Any

from agent_system.environments import jvm
from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.textworld_express.settings import (
    TextWorldExpressSettings,
)
from agent_system.environments.package import EnvPackage
from agent_system.environments.tasks import hash_json
from verl.config.settings.errors import UserError

NAME = "textworld_express"
GAMES_WITH_SEPARATE_JVM = ("sorting",)
# Numbers (seeds) of the games in each fold of the library. A test compares them with the library.
GAME_NUMBERS_BY_FOLD = {
    "train": range(0, 1000),
    "dev": range(10_000, 11_000),
    "test": range(20_000, 21_000),
}
# Games whose goal names one object. The goal is ambiguous if two objects have this name.
GAMES_WITH_NAMED_GOAL = ("peckingorder",)
OPPOSITE_DIRECTIONS = {"north": "south", "south": "north", "east": "west", "west": "east"}
RULES = """\
You play a text game. Each turn you see what happened and which actions are possible. Reach \
the goal in as few turns as you can. Copy your action exactly from the list of possible actions."""


class TextWorldExpressEnv:
    """Environment whose reward is the change of the score. A solved game has a score of 1.0."""

    # A JVM runs one call at a time. With ``placement: process`` each worker has its own JVM.
    placement = "locked"

    def __init__(self, settings: TextWorldExpressSettings) -> None:
        from textworld_express.constants import JAR_PATH

        jvm_options = tuple(settings.java_options.split())
        is_shared = settings.game not in GAMES_WITH_SEPARATE_JVM
        self._jvm = jvm.acquire_jvm(NAME, JAR_PATH, settings.heap_mb, jvm_options, shared=is_shared)
        self._server: Any = self._jvm.create_object("textworldexpress.runtime.PythonInterface")
        self._loaded_game_and_params: tuple[str, str] | None = None
        self._score = 0.0
        self._possible_actions: list[str] = []

    def reset(self, task: Task, seed: int = 0) -> Observation:
        state = self._start_game(task)
        self._score = 0.0
        return self._make_observation(
            state, f"{self._server.getTaskDescription()}\n{state['observation'].strip()}"
        )

    def step(self, action: str) -> Step:
        # Actions arrive in lower case. Restore upper-case letters, as in "take 1mL of oil".
        actions_by_lower_case = {
            possible_action.lower(): possible_action for possible_action in self._possible_actions
        }
        is_valid = action.lower() in actions_by_lower_case
        state = json.loads(self._server.stepJSON(actions_by_lower_case.get(action.lower(), action)))
        reward = state["score"] - self._score
        self._score = state["score"]
        won = bool(state["tasksuccess"])
        observation = self._make_observation(state, state["observation"].strip())
        observation.info |= {"won": won, "is_action_valid": is_valid, "score": self._score}
        return observation, reward, won or bool(state["taskfailure"]), observation.info

    def gold_path(self, task: Task) -> list[str]:
        """Return actions that solve ``task``. This ends the current episode."""
        self._start_game(task, computes_gold_path=True)
        return list(self._server.getGoldActionSequence())

    def interrupt(self) -> None:
        """Kill the JVM to end a call that hangs.

        Other environments on this JVM fail at their next call and then get a new JVM.
        """
        self._jvm.kill()

    def compute_content_hash(self, task: Task, includes_rooms: bool = False) -> str:
        """Return a hash (16 hexadecimal digits) of the start of ``task``.

        With ``includes_rooms`` it also covers the descriptions of all rooms. The hash is the same
        in every JVM, unlike gold paths. This method ends the current episode.
        """
        state = self._start_game(task)
        content: dict[str, Any] = {
            "task": self._server.getTaskDescription(),
            "possible": sorted(state["validActions"]),
        }
        content |= {key: state[key] for key in ("observation", "look", "inventory")}
        if includes_rooms:
            self._visit_rooms(state, content)
        return hash_json(content)

    def has_ambiguous_actions(self, task: Task) -> bool:
        """Return True if two possible actions at the start of ``task`` have the same text.

        The check starts ``task``, so the current episode is lost.
        """
        possible_actions = self._start_game(task)["validActions"]
        return len(set(possible_actions)) < len(possible_actions)

    def _visit_rooms(
        self, state: dict[str, Any], descriptions_by_room: dict[str, Any], direction_back: str = ""
    ) -> list[str]:
        """Visit this room and all rooms that can be reached from it, except in ``direction_back``.

        Store the descriptions of the rooms in ``descriptions_by_room``. Return the moves that lead
        from the last visited room back to this room.
        """
        # Open all doors first, so that all rooms can be reached and descriptions are comparable.
        door_actions = [f"open door to {direction}" for direction in OPPOSITE_DIRECTIONS]
        door_actions = [action for action in door_actions if action in state["validActions"]]
        state = self._apply_actions(door_actions) if door_actions else state
        descriptions_by_room[_read_room_name(state)] = state["look"]
        moves_back: list[str] = []  # moves from the agent's location back to this room
        for direction in OPPOSITE_DIRECTIONS:
            if direction != direction_back and f"move {direction}" in state["validActions"]:
                next_state = self._apply_actions([*moves_back, f"move {direction}"])
                moves_back = []
                if _read_room_name(next_state) not in descriptions_by_room:
                    moves_back = self._visit_rooms(
                        next_state, descriptions_by_room, OPPOSITE_DIRECTIONS[direction]
                    )
                moves_back.append(f"move {OPPOSITE_DIRECTIONS[direction]}")
        return moves_back

    def _apply_actions(self, actions: list[str]) -> dict[str, Any]:
        return [json.loads(self._server.stepJSON(action)) for action in actions][-1]

    def close(self) -> None:
        if self._server is not None:
            self._jvm.release_object(self._server)
            jvm.release_jvm(self._jvm)
            self._server = None

    def _start_game(self, task: Task, computes_gold_path: bool = False) -> dict[str, Any]:
        game_and_params = (task["game"], task["params"])
        # Tasks of the same game and params differ only in number and fold: no new load is needed.
        if game_and_params != self._loaded_game_and_params:
            load_error = self._server.load(*game_and_params)
            if load_error:
                message = (
                    f"game {game_and_params[0]!r} with params {game_and_params[1]!r}: {load_error}"
                )
                raise UserError(f"env.{NAME}: {message}", "out_of_range")
            self._loaded_game_and_params = game_and_params
        return json.loads(
            self._server.generateNewGameJSON(task["number"], task["fold"], computes_gold_path)
        )

    def _make_observation(self, state: dict[str, Any], text: str) -> Observation:
        # Sort the actions, because their order is random. Remove duplicates, which occur
        # if several objects have the same name.
        self._possible_actions = sorted(set(state["validActions"]))
        state_key = f"{state['look']}\n{state['inventory']}\n{state['score']:g}".strip()
        return Observation(
            text,
            anchor=state_key,
            info={"won": False, "admissible_actions": self._possible_actions},
        )


def _read_room_name(state: dict[str, Any]) -> str:
    return state["look"].partition(".")[0]  # such as "You are in the kitchen"


def list_tasks(settings: TextWorldExpressSettings, split: str) -> list[Task]:
    """Return one task per distinct game of ``split``.

    Raises ``JavaMissingError`` without Java, and ``ValueError`` for unknown ``params``.
    """
    import textworld_express  # noqa: F401  (report a missing library at startup)

    jvm.find_java(NAME)
    tasks_by_split = _list_distinct_tasks(settings)  # pyright: ignore[reportArgumentType]  EnvSettings hash
    return [dict(task) for task in tasks_by_split[split]]


@functools.cache
def _list_distinct_tasks(settings: TextWorldExpressSettings) -> dict[str, list[Task]]:
    """Return the distinct tasks of both splits.

    Games with equal starts can differ in rooms that are not visible at the start. An agent visits
    all rooms to compare them, which takes 1 to 10 ms per game.
    """
    data_source = f"{NAME}/{settings.game}"
    common_task_fields = {
        "data_source": data_source,
        "game": settings.game,
        "params": settings.params,
    }
    folds_by_split = {"val": settings.val_split, "train": "train"}
    candidate_tasks = [
        {**common_task_fields, "fold": fold, "number": game_number}
        for fold in folds_by_split.values()
        for game_number in GAME_NUMBERS_BY_FOLD[fold]
    ]
    with contextlib.closing(TextWorldExpressEnv(settings)) as env:
        if settings.game in GAMES_WITH_NAMED_GOAL:
            candidate_tasks = [
                task for task in candidate_tasks if not env.has_ambiguous_actions(task)
            ]
        start_hashes = [env.compute_content_hash(task) for task in candidate_tasks]
        start_counts = Counter(start_hashes)
        content_hashes = [
            env.compute_content_hash(candidate_task, includes_rooms=True)
            if start_counts[start_hash] > 1
            else start_hash
            for candidate_task, start_hash in zip(candidate_tasks, start_hashes, strict=True)
        ]
    tasks_by_hash: dict[str, Task] = {}
    # The validation fold comes first. Games that occur in both folds are dropped from training.
    for task, content_hash in zip(candidate_tasks, content_hashes, strict=True):
        tasks_by_hash.setdefault(content_hash, {"task_id": f"{data_source}/{content_hash}", **task})
    return {
        split: [task for task in tasks_by_hash.values() if task["fold"] == fold]
        for split, fold in folds_by_split.items()
    }


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextWorldExpressSettings,
    make=TextWorldExpressEnv,
    tasks=list_tasks,
    prompts=lambda settings: ChatPrompts(
        RULES, "open fridge", list_actions=settings.list_actions, keep_first=True
    ),
    variants=TextWorldExpressSettings.list_variants,
)
