"""TextWorldExpress: household and reasoning games in text, a thousand steps a second on one core.

One JVM serves all environments of a process (``agent_system/environments/jvm.py``), except those of
the game ``sorting``: instances of it in one JVM undo each other's games (measured with version
1.1.0), so each has its own. A task is a game and a number of the package's own train, dev and test
folds. These have different seeds, but the same games come up again, within a fold and in several:
``tasks`` tells games apart by what is in them, keeps each once, and trains on none that the
validation fold holds.
"""

import contextlib
import functools
import hashlib
import json
from collections import Counter
from typing import Any

from agent_system.environments import jvm
from agent_system.environments.chat_prompts import ChatPrompts, project
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.textworld_express.settings import (
    TextWorldExpressSettings,
)
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts

NAME = "textworld_express"
NOT_ISOLATED = ("sorting",)
# As the library numbers the games of its folds; a test compares them.
FOLDS = {"train": range(0, 1000), "dev": range(10_000, 11_000), "test": range(20_000, 21_000)}
# Games that ask for one thing by its name: with two of that name only one is right, and nothing
# says which.
NEEDS_NAMES = ("peckingorder",)
BACK = {"north": "south", "south": "north", "east": "west", "west": "east"}
RULES = """\
You play a text game. Each turn you see what happened and which actions are possible. Reach \
the goal in as few turns as you can. Copy your action exactly from the list of possible actions."""


class TextWorldExpressEnv:
    """One game at a time. Reward is the change of the score, which is 1.0 when the game is won."""

    # One JVM answers all, one call at a time; `placement: process` gives each worker its own.
    placement = "locked"

    def __init__(self, settings: TextWorldExpressSettings) -> None:
        from textworld_express.constants import JAR_PATH

        options = tuple(settings.java_options.split())
        shared = settings.game not in NOT_ISOLATED
        self._jvm = jvm.attach(NAME, JAR_PATH, settings.heap_mb, options, shared=shared)
        self._server: Any = self._jvm.new("textworldexpress.runtime.PythonInterface")
        self._loaded: tuple[str, str] | None = None
        self._score = 0.0
        self._possible: list[str] = []

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``, which says everything: ``seed`` changes nothing."""
        del seed  # the task says it all
        state = self._start(task)
        self._score = 0.0
        return self._observe(
            state, f"{self._server.getTaskDescription()}\n{state['observation'].strip()}"
        )

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play ``action``; done when the game is won or lost.

        An action is valid when it was admissible.
        """
        # Upper case matters in "1mL of oil".
        spelled = {possible.lower(): possible for possible in self._possible}
        valid = action.lower() in spelled
        state = json.loads(self._server.stepJSON(spelled.get(action.lower(), action)))
        reward = state["score"] - self._score
        self._score = state["score"]
        won = bool(state["tasksuccess"])
        observation = self._observe(state, state["observation"].strip())
        observation.info |= {"won": won, "is_action_valid": valid, "score": self._score}
        return observation, reward, won or bool(state["taskfailure"]), observation.info

    def gold_path(self, task: Task) -> list[str]:
        """Actions that win ``task``; ends the episode that is under way."""
        self._start(task, gold=True)
        return list(self._server.getGoldActionSequence())

    def interrupt(self) -> None:
        """End a call that hangs, together with the JVM: neighbours on it fail at their next call
        and get another.
        """
        self._jvm.kill()

    def content(self, task: Task, rooms: bool = False) -> str:
        """Hash (16 hexadecimal digits) of how ``task`` starts and, with ``rooms``, of a walk
        through all its rooms.

        The same in every JVM, which gold paths are not. Ends the episode that is under way.
        """
        state = self._start(task)
        seen: dict[str, Any] = {
            "task": self._server.getTaskDescription(),
            "possible": sorted(state["validActions"]),
        }
        seen |= {key: state[key] for key in ("observation", "look", "inventory")}
        if rooms:
            self._walk(state, seen)
        return hashlib.blake2b(json.dumps(seen, sort_keys=True).encode(), digest_size=8).hexdigest()

    def is_ambiguous(self, task: Task) -> bool:
        """Whether two things that can be acted on at the start of ``task`` bear the same name. Ends
        the episode that is under way.
        """
        possible = self._start(task)["validActions"]
        return len(set(possible)) < len(possible)

    def _walk(self, state: dict[str, Any], seen: dict[str, Any], back: str = "") -> list[str]:
        """Note in ``seen`` what this room and all behind it look like, doors open; the moves that
        lead back here.
        """
        # Doors are opened first: the walk is to see all rooms, and this one as it looks with open
        # doors.
        doors = [
            f"open door to {way}" for way in BACK if f"open door to {way}" in state["validActions"]
        ]
        state = self._play(doors) if doors else state
        seen[_room(state)] = state["look"]
        home: list[str] = []  # not made unless there is somewhere else to go
        for way in BACK:
            if way != back and f"move {way}" in state["validActions"]:
                there = self._play([*home, f"move {way}"])
                home = [] if _room(there) in seen else self._walk(there, seen, BACK[way])
                home.append(f"move {BACK[way]}")
        return home

    def _play(self, actions: list[str]) -> dict[str, Any]:
        return [json.loads(self._server.stepJSON(action)) for action in actions][-1]

    def close(self) -> None:
        """Give the game and the JVM back."""
        if self._server is not None:
            self._jvm.free(self._server)
            jvm.release(self._jvm)
            self._server = None

    def _start(self, task: Task, gold: bool = False) -> dict[str, Any]:
        game = (task["game"], task["params"])
        # The library loads a game for its params, and only the number changes from task to task.
        if game != self._loaded:
            complaint = self._server.load(*game)
            if complaint:
                raise ValueError(
                    f"env.{NAME}: game {game[0]!r} with params {game[1]!r}: {complaint}"
                )
            self._loaded = game
        return json.loads(self._server.generateNewGameJSON(task["number"], task["fold"], gold))

    def _observe(self, state: dict[str, Any], text: str) -> Observation:
        # The engine's order differs from run to run, and what bears the same name comes twice.
        self._possible = sorted(set(state["validActions"]))
        anchor = f"{state['look']}\n{state['inventory']}\n{state['score']:g}".strip()
        return Observation(
            text, anchor=anchor, info={"won": False, "admissible_actions": self._possible}
        )


def _room(state: dict[str, Any]) -> str:
    return state["look"].partition(".")[0]  # "You are in the kitchen"


def tasks(settings: TextWorldExpressSettings, split: str) -> list[Task]:
    """The different games of the fold of ``split``, without those of the validation fold where it
    is the train fold.

    Raises ``JavaMissing``, and ``ValueError`` for ``params`` that the game does not know: both
    before anything starts.
    """

    import textworld_express  # noqa: F401  (a missing package is found before anything starts)

    jvm.find_java(NAME)
    made = _different_games(settings)  # pyright: ignore[reportArgumentType]  EnvSettings hash
    return [dict(task) for task in made["val" if split == "val" else "train"]]


@functools.cache
def _different_games(settings: TextWorldExpressSettings) -> dict[str, list[Task]]:
    """The tasks of both splits; rooms are walked only in games that start like others, which takes
    1 to 10 ms each.
    """
    source = f"{NAME}/{settings.game}"
    common = {"data_source": source, "game": settings.game, "params": settings.params}
    folds = {"val": settings.val_split, "train": "train"}
    drawn = [
        {**common, "fold": fold, "number": number}
        for fold in folds.values()
        for number in FOLDS[fold]
    ]
    with contextlib.closing(TextWorldExpressEnv(settings)) as env:
        if settings.game in NEEDS_NAMES:
            drawn = [task for task in drawn if not env.is_ambiguous(task)]
        starts = [env.content(task) for task in drawn]
        # Games that start alike are not always the same: what differs may lie behind a door.
        alike = Counter(starts)
        names = [
            env.content(t, rooms=True) if alike[s] > 1 else s
            for t, s in zip(drawn, starts, strict=True)
        ]
    different: dict[str, Task] = {}
    # The validation fold comes first: what it holds is not for training.
    for task, name in zip(drawn, names, strict=True):
        different.setdefault(name, {"task_id": f"{source}/{name}", **task})
    return {
        split: [task for task in different.values() if task["fold"] == fold]
        for split, fold in folds.items()
    }


def prompts(settings: TextWorldExpressSettings) -> Prompts:
    """Rules, observations and, unless ``list_actions`` is false, the possible actions."""
    list_actions = settings.list_actions
    return ChatPrompts(RULES, "open fridge", list_actions=list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=TextWorldExpressSettings,
    make=TextWorldExpressEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
    variants=TextWorldExpressSettings.choices,
)
