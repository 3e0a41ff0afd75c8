"""ALFWorld environment: one engine that runs one game at a time."""

import random
from typing import TYPE_CHECKING

from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.alfworld.derived_thoughts import (
    NEEDED_LEVELS,
    DerivedThoughtsExpert,
)
from agent_system.environments.env_package.alfworld.settings import AlfworldSettings
from agent_system.environments.env_package.alfworld.store import get_translations_folder, load_game

if TYPE_CHECKING:
    from agent_system.environments.env_package.alfworld.engine import EngineOutput

CHANGING_PREDICATES = frozenset(
    {"atlocation", "holds", "opened", "isclean", "ishot", "iscool", "istoggled", "issliced"}
)
LOCATION_PREDICATES = frozenset({"inreceptacle"})


class AlfworldEnv:
    """Text household tasks. The reward is 1.0 on the turn that solves the task, else 0.0.

    The caller limits the number of turns. A command is valid if it was admissible. The answer to
    any other command is "Nothing happens.".

    ``anchor`` lists the facts that can change, such as the agent's location, the held object and
    moved objects. Equal states have equal anchors, even after different actions.

    With ``env.alfworld.thoughts=carried``, ``info`` also holds ``situation``, the kind of the right
    action, such as ``search``. ``needed_level`` is the lowest thinking level that suffices for it.
    """

    placement = "process"  # not thread-safe: the engine redirects standard output

    def __init__(self, settings: AlfworldSettings) -> None:
        # Imported here because it takes about a second and only the worker process needs it.
        from agent_system.environments.env_package.alfworld.engine import Engine

        self.settings = settings
        self._engine = Engine(get_translations_folder(settings))
        self._loaded_task_id: str | None = None
        self._start_facts: frozenset[str] = frozenset()
        # Expert that does not act. It labels states with ``situation`` and ``needed_level``.
        self._state_labeler: DerivedThoughtsExpert | None = None

    def reset(self, task: Task, seed: int = 0) -> Observation:
        if self._loaded_task_id != task["task_id"]:
            # Clear the id first: if loading fails, a later reset must not use the previous game.
            self._loaded_task_id = None
            self._engine.load(load_game(self.settings, task))
            self._loaded_task_id = task["task_id"]
        output = self._engine.reset()
        self._start_facts = frozenset(self._engine.list_facts(LOCATION_PREDICATES))
        if self.settings.thoughts == "carried":
            self._state_labeler = DerivedThoughtsExpert(output.text, random.Random(0))
        return self._add_situation_and_level(self._make_observation(output))

    def step(self, action: str) -> Step:
        output = self._engine.step(action)
        observation = self._make_observation(output)
        if self._state_labeler is not None:
            self._state_labeler.observe(action, observation)
        observation = self._add_situation_and_level(observation)
        return observation, float(output.won), output.won, observation.info

    def _make_observation(self, output: "EngineOutput") -> Observation:
        # All episodes of a task have the same start positions, so list only the moved objects.
        location_facts = self._engine.list_facts(LOCATION_PREDICATES)
        moved_facts = [fact for fact in location_facts if fact not in self._start_facts]
        anchor = "; ".join(self._engine.list_facts(CHANGING_PREDICATES) + moved_facts)
        info = {
            "won": output.won,
            "is_action_valid": output.is_valid,
            "admissible_actions": list(output.admissible_commands),
        }
        return Observation(output.text, anchor=anchor, info=info)

    def _add_situation_and_level(self, observation: Observation) -> Observation:
        if self._state_labeler is not None:
            situation = self._state_labeler.find_right_actions().situation
            observation.info |= {"situation": situation, "needed_level": NEEDED_LEVELS[situation]}
        return observation

    def close(self) -> None:
        """Release the engine's library for reuse by the next environment."""
        self._engine.close()
