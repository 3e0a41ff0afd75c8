"""ScienceWorld: boil water, build circuits, grow plants, and other experiments of primary school,
in text.

The environment talks to the simulator itself: the package's own ``step`` lists all valid actions
every time, hundreds to thousands of them, which costs several times what the step does. One JVM per
worker process serves its environments (``agent_system/environments/jvm.py``). A task is one
variation of one kind of experiment, split into train, dev and test as the simulator splits them:
the first half, a quarter, the rest.
"""

import json
from typing import Any

from agent_system.environments import jvm
from agent_system.environments.chat_prompts import ChatPrompts, project
from agent_system.environments.env import Observation, Task
from agent_system.environments.env_package.scienceworld.settings import ScienceWorldSettings
from agent_system.environments.env_package.scienceworld.variations import (
    VARIATIONS,
    split_variations,
)
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts
from agent_system.reward_manager.scores import is_full

NAME = "scienceworld"
# The reply to what the simulator cannot read begins like this; it has no other mark of it.
UNKNOWN = "No known action matches that input."
# The simulator's own command would plan the whole solution again, which takes up to 30 s.
REPLAY = "reset task"
# The simulator keeps what a container holds in hash sets of objects that have no hash of their own:
# the JVM draws one for each, and a look lists them in another order every time. With one hash for
# all objects a set keeps the order in which it was filled.
STEADY = (
    "-XX:+IgnoreUnrecognizedVMOptions",
    "-XX:+UnlockExperimentalVMOptions",
    "-XX:hashCode=2",
)
RULES = """\
You do an experiment in a house described in text. Actions (replace OBJ by something you know \
of): look around, look at OBJ, look in OBJ, inventory, go to OBJ, open OBJ, close OBJ, pick up \
OBJ, put down OBJ, move OBJ to OBJ, focus on OBJ, use OBJ on OBJ, activate OBJ, deactivate OBJ, \
pour OBJ in OBJ, dunk OBJ in OBJ, mix OBJ, read OBJ, eat OBJ, flush OBJ, connect OBJ to OBJ, \
disconnect OBJ, teleport to OBJ (where that is allowed), wait (ten moments), wait1 (one moment), \
task (read it again).
Focus only on what the task asks for: to focus on something else fails the task."""


class ScienceWorldEnv:
    """One experiment at a time. Reward is the change of the score, in hundredths of its 100 points.

    Doing what fails a task takes back all that was gained, so that the return of an episode is its
    final score, 0 to 1.
    """

    # A step is a lot of Java: workers in parallel, and a hung JVM dies with its worker.
    placement = "process"

    def __init__(self, settings: ScienceWorldSettings) -> None:
        from scienceworld.constants import JAR_PATH

        self.settings = settings
        options = (*STEADY, *self.settings.java_options.split())
        self._jvm = jvm.attach(NAME, JAR_PATH, self.settings.heap_mb, options)
        self._server: Any = self._jvm.new("scienceworld.runtime.pythonapi.PythonInterface")
        self._score = 0.0

    def reset(self, task: Task, seed: int = 0) -> Observation:
        """Start ``task``, which says everything: ``seed`` changes nothing."""
        del seed  # the task says it all
        self._load(task)
        self._score = 0.0
        return self._observe(
            f"{self._server.getTaskDescription()}\n{self._server.freeActionLook()}"
        )

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play ``action``; done when the task is completed or failed.

        Valid is what the simulator understands.
        """
        text = UNKNOWN if action == REPLAY else self._server.step(action)
        points = self._server.getScore()
        # Below 0 means failed. Cut at 0, so that a failure takes back what was gained and no more.
        score = min(max(points, 0.0), 1.0)
        reward = score - self._score
        self._score = score
        done = points < 0 or bool(self._server.getCompleted())
        observation = self._observe(text)
        valid = not text.startswith(UNKNOWN)
        observation.info |= {
            "won": is_full(score),
            "is_action_valid": valid,
            "score": round(100 * score),
        }
        return observation, reward, done, observation.info

    def gold_path(self, task: Task) -> list[str]:
        """Actions that win ``task``; ends the episode that is under way.

        Planning them takes up to a minute.
        """
        self._load(task, gold=True)
        return list(self._server.getGoldActionSequence())

    def close(self) -> None:
        """Give the simulator and the JVM back."""
        if self._server is not None:
            # The simulator is an object of the JVM, which lives on there until it is freed.
            self._jvm.free(self._server)
            jvm.release(self._jvm)
            self._server = None

    def _load(self, task: Task, gold: bool = False) -> None:
        self._server.load(task["name"], task["variation"], self.settings.simplification, gold)

    def _observe(self, text: str) -> Observation:
        # Both looks are free: they take no step of the simulated time.
        seen = self._server.freeActionLook()
        held = self._server.freeActionInventory()
        # The score is part of the state: the same room and hands may be before or after a step that
        # pays once.
        anchor = f"{seen}\n{held}\n{self._score:.2f}"
        info: dict[str, Any] = {"won": False}
        if self.settings.list_actions:
            valid = json.loads(self._server.getValidActionObjectCombinationsJSON())["validActions"]
            info["admissible_actions"] = sorted({entry["action"] for entry in valid} - {REPLAY})
        return Observation(text.strip(), anchor=anchor, info=info)


def tasks(settings: ScienceWorldSettings, split: str) -> list[Task]:
    """The variations of the asked experiments that belong to ``split``. Raises ``JavaMissing``."""

    import scienceworld  # noqa: F401  (a missing package is found before anything starts)

    jvm.find_java(NAME)
    part = settings.val_split if split == "val" else "train"
    return [
        {
            "task_id": f"{NAME}/{name}/{number}",
            "data_source": f"{NAME}/{name}",
            "name": name,
            "variation": number,
        }
        for name in settings.task_names or VARIATIONS
        for number in split_variations(name, part)
    ]


def prompts(settings: ScienceWorldSettings) -> Prompts:
    """Rules and kinds of actions, observations and, where ``list_actions`` asks for them, the valid
    actions.
    """
    list_actions = settings.list_actions
    return ChatPrompts(RULES, "open door to kitchen", list_actions=list_actions, keep_first=True)


PACKAGE = EnvPackage(
    name=NAME,
    settings=ScienceWorldSettings,
    make=ScienceWorldEnv,
    tasks=tasks,
    prompts=prompts,
    project=project,
)
