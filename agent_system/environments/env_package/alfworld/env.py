"""ALFWorld as an environment: one engine, one game at a time."""

import random
from typing import Any

from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.alfworld.carried import NEEDED, CarriedPlayer
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import (
    load_game,
    translations_folder,
)

CHANGING = frozenset(
    {"atlocation", "holds", "opened", "isclean", "ishot", "iscool", "istoggled", "issliced"}
)
MOVED = frozenset({"inreceptacle"})


class AlfworldEnv:
    """Text household tasks. Reward is 1.0 on the step that wins, else 0.0; the caller limits the
    number of steps.

    ``info`` holds ``won``, ``is_action_valid`` (the command was admissible; others read "Nothing
    happens.") and ``admissible_actions``. ``anchor`` states what can change in the room (place,
    hand, open doors, moved objects), so that two histories that lead to the same state share it.
    With ``thoughts=carried`` it also holds the ``situation`` (the kind of action that is due) and
    the ``needed_level``.
    """

    placement = "process"  # the engine redirects standard output and is wrong in threads

    def __init__(self, settings: AlfworldSettings) -> None:
        # A second of imports, which only the worker process needs.
        from agent_system.environments.env_package.alfworld.engine import Engine

        self.settings = settings
        self._engine = Engine(translations_folder(settings))
        self._loaded: str | None = None
        self._start: frozenset[str] = frozenset()
        # Reads what the policy reads.
        self._reader: CarriedPlayer | None = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``.

        The engine draws nothing, so ``seed`` has no effect: same task, same start.
        """
        del seed  # the task says it all
        if self._loaded != task["task_id"]:
            # A failing load leaves no game that a later reset could take for the right one.
            self._loaded = None
            self._engine.load(load_game(self.settings, task))
            self._loaded = task["task_id"]
        turn = self._engine.reset()
        self._start = frozenset(self._engine.facts(MOVED))
        if self.settings.thoughts == "carried":
            self._reader = CarriedPlayer(turn.text, random.Random(0))
        return self._labelled(self._observation(turn))

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play ``action`` and return observation, reward, done (won) and the observation's info."""
        turn = self._engine.step(action)
        observation = self._observation(turn)
        if self._reader is not None:
            self._reader.observe(action, observation)
        observation = self._labelled(observation)
        return observation, float(turn.won), turn.won, observation.info

    def _observation(self, turn) -> Observation:
        # Where an object lies at the start is in the task; what was moved since is what tells
        # states apart.
        moved = [fact for fact in self._engine.facts(MOVED) if fact not in self._start]
        anchor = "; ".join(self._engine.facts(CHANGING) + moved)
        info = {
            "won": turn.won,
            "is_action_valid": turn.valid,
            "admissible_actions": list(turn.commands),
        }
        return Observation(turn.text, anchor=anchor, info=info)

    def _labelled(self, observation: Observation) -> Observation:
        if self._reader is not None:
            kind = self._reader.due().kind
            observation.info |= {"situation": kind, "needed_level": NEEDED[kind]}
        return observation

    def close(self) -> None:
        """Hand the engine back; the environment is not used again."""
        self._engine.close()
