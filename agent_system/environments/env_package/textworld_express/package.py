"""TextWorldExpress: household and reasoning games in text, 1000 steps per second on one core.

One JVM serves all environments of a process (``agent_system/environments/jvm.py``). The game
``sorting`` is an exception: its instances in one JVM disturb each other (measured with version
1.1.0), so each has a separate JVM.

A task is a game and a number in the train, dev or test fold of the library. Folds have different
seeds, but the same game can occur several times, within a fold and in several folds. Games are
therefore compared by content: each is kept once, and training drops those of the validation fold.
"""

import contextlib
import functools
import hashlib
import json
from collections import Counter
from typing import Any

from agent_system.environments import jvm
from agent_system.environments.chat_prompts import ChatPrompts, project_action
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.textworld_express.settings import (
    TextWorldExpressSettings,
)
from agent_system.environments.package import EnvPackage

NAME = "textworld_express"
UNSHARED_GAMES = ("sorting",)
# Numbers of the games in the library's folds. A test compares them with the library.
FOLDS = {"train": range(0, 1000), "dev": range(10_000, 11_000), "test": range(20_000, 21_000)}
# Games whose goal names one object. If two objects have that name, the goal is ambiguous.
NAMED_GOAL_GAMES = ("peckingorder",)
OPPOSITE_DIRECTIONS = {"north": "south", "south": "north", "east": "west", "west": "east"}
RULES = """\
You play a text game. Each turn you see what happened and which actions are possible. Reach \
the goal in as few turns as you can. Copy your action exactly from the list of possible actions."""


class TextWorldExpressEnv:
    """Environment whose reward is the change of the score. A solved game has a score of 1.0."""

    # One JVM serves one call at a time. With ``placement: process`` each worker has its JVM.
    placement = "locked"

    def __init__(self, settings: TextWorldExpressSettings) -> None:
        from textworld_express.constants import JAR_PATH

        options = tuple(settings.java_options.split())
        is_shared = settings.game not in UNSHARED_GAMES
        self._jvm = jvm.acquire_jvm(NAME, JAR_PATH, settings.heap_mb, options, shared=is_shared)
        self._server: Any = self._jvm.create_object("textworldexpress.runtime.PythonInterface")
        self._loaded: tuple[str, str] | None = None
        self._score = 0.0
        self._possible: list[str] = []

    def reset(self, task: Task, seed: int = 0) -> Observation:
        del seed  # the task determines the episode
        state = self._start_game(task)
        self._score = 0.0
        return self._make_observation(
            state, f"{self._server.getTaskDescription()}\n{state['observation'].strip()}"
        )

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Apply ``action``. The episode is done when the game ends.

        An action is valid if it was admissible.
        """
        # Restore upper-case letters, which the game needs in actions such as "take 1mL of oil".
        spelled = {possible.lower(): possible for possible in self._possible}
        is_valid = action.lower() in spelled
        state = json.loads(self._server.stepJSON(spelled.get(action.lower(), action)))
        reward = state["score"] - self._score
        self._score = state["score"]
        won = bool(state["tasksuccess"])
        observation = self._make_observation(state, state["observation"].strip())
        observation.info |= {"won": won, "is_action_valid": is_valid, "score": self._score}
        return observation, reward, won or bool(state["taskfailure"]), observation.info

    def gold_path(self, task: Task) -> list[str]:
        """Return actions that solve ``task``. Ends the current episode."""
        self._start_game(task, gold=True)
        return list(self._server.getGoldActionSequence())

    def interrupt(self) -> None:
        """Kill the JVM to end a call that hangs.

        Other environments on this JVM fail at their next call and then get a new JVM.
        """
        self._jvm.kill()

    def content_hash(self, task: Task, rooms: bool = False) -> str:
        """Return a hash (16 hexadecimal digits) of the start of ``task``.

        With ``rooms`` it includes the descriptions of all rooms. The hash is equal in every JVM,
        unlike gold paths. Ends the current episode.
        """
        state = self._start_game(task)
        content: dict[str, Any] = {
            "task": self._server.getTaskDescription(),
            "possible": sorted(state["validActions"]),
        }
        content |= {key: state[key] for key in ("observation", "look", "inventory")}
        if rooms:
            self._visit_rooms(state, content)
        text = json.dumps(content, sort_keys=True)
        return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()

    def is_ambiguous(self, task: Task) -> bool:
        """Return True if two possible actions at the start of ``task`` have the same text.

        Ends the current episode.
        """
        possible = self._start_game(task)["validActions"]
        return len(set(possible)) < len(possible)

    def _visit_rooms(
        self, state: dict[str, Any], seen: dict[str, Any], back: str = ""
    ) -> list[str]:
        """Store the descriptions of this room and of all rooms behind it in ``seen``.

        Return the moves that lead back to this room.
        """
        # Open all doors first, so that every room is reached and described with open doors.
        doors = [f"open door to {way}" for way in OPPOSITE_DIRECTIONS]
        doors = [action for action in doors if action in state["validActions"]]
        state = self._apply_actions(doors) if doors else state
        seen[_room_name(state)] = state["look"]
        moves_back: list[str] = []  # moves back to this room, done before the next direction
        for way in OPPOSITE_DIRECTIONS:
            if way != back and f"move {way}" in state["validActions"]:
                next_state = self._apply_actions([*moves_back, f"move {way}"])
                moves_back = []
                if _room_name(next_state) not in seen:
                    moves_back = self._visit_rooms(next_state, seen, OPPOSITE_DIRECTIONS[way])
                moves_back.append(f"move {OPPOSITE_DIRECTIONS[way]}")
        return moves_back

    def _apply_actions(self, actions: list[str]) -> dict[str, Any]:
        return [json.loads(self._server.stepJSON(action)) for action in actions][-1]

    def close(self) -> None:
        if self._server is not None:
            self._jvm.release_object(self._server)
            jvm.release_jvm(self._jvm)
            self._server = None

    def _start_game(self, task: Task, gold: bool = False) -> dict[str, Any]:
        game = (task["game"], task["params"])
        # Load a game once per combination of name and params. Tasks differ only in the number.
        if game != self._loaded:
            complaint = self._server.load(*game)
            if complaint:
                why = f"game {game[0]!r} with params {game[1]!r}: {complaint}"
                raise ValueError(f"env.{NAME}: {why}")
            self._loaded = game
        return json.loads(self._server.generateNewGameJSON(task["number"], task["fold"], gold))

    def _make_observation(self, state: dict[str, Any], text: str) -> Observation:
        # The order of the engine is random, and actions on objects of one name occur twice.
        self._possible = sorted(set(state["validActions"]))
        anchor = f"{state['look']}\n{state['inventory']}\n{state['score']:g}".strip()
        return Observation(
            text, anchor=anchor, info={"won": False, "admissible_actions": self._possible}
        )


def _room_name(state: dict[str, Any]) -> str:
    return state["look"].partition(".")[0]  # "You are in the kitchen"


def list_tasks(settings: TextWorldExpressSettings, split: str) -> list[Task]:
    """Return the distinct games of ``split``. Training drops the games of the validation fold.

    Raises ``JavaMissing``, and ``ValueError`` if the game does not know ``params``.
    """
    import textworld_express  # noqa: F401  (report a missing package before anything starts)

    jvm.find_java(NAME)
    tasks_by_split = _distinct_tasks(settings)  # pyright: ignore[reportArgumentType]  EnvSettings hash
    return [dict(task) for task in tasks_by_split["val" if split == "val" else "train"]]


@functools.cache
def _distinct_tasks(settings: TextWorldExpressSettings) -> dict[str, list[Task]]:
    """Return the distinct tasks of both splits.

    Games with equal starts are compared by the descriptions of all rooms. To read these, an agent
    walks through all rooms, which takes 1 to 10 ms per game.
    """
    source = f"{NAME}/{settings.game}"
    common_fields = {"data_source": source, "game": settings.game, "params": settings.params}
    folds = {"val": settings.val_split, "train": "train"}
    candidate_tasks = [
        {**common_fields, "fold": fold, "number": game_number}
        for fold in folds.values()
        for game_number in FOLDS[fold]
    ]
    with contextlib.closing(TextWorldExpressEnv(settings)) as env:
        if settings.game in NAMED_GOAL_GAMES:
            candidate_tasks = [task for task in candidate_tasks if not env.is_ambiguous(task)]
        start_hashes = [env.content_hash(task) for task in candidate_tasks]
        # Games with equal starts can differ in other rooms.
        start_counts = Counter(start_hashes)
        names = [
            env.content_hash(t, rooms=True) if start_counts[s] > 1 else s
            for t, s in zip(candidate_tasks, start_hashes, strict=True)
        ]
    distinct: dict[str, Task] = {}
    # The validation fold is first, so its games are dropped from training.
    for task, name in zip(candidate_tasks, names, strict=True):
        distinct.setdefault(name, {"task_id": f"{source}/{name}", **task})
    return {
        split: [task for task in distinct.values() if task["fold"] == fold]
        for split, fold in folds.items()
    }


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextWorldExpressSettings,
    make=TextWorldExpressEnv,
    tasks=list_tasks,
    prompts=lambda settings: ChatPrompts(
        RULES, "open fridge", list_actions=settings.list_actions, keep_first=True
    ),
    project=project_action,
    variants=TextWorldExpressSettings.list_variants,
)
