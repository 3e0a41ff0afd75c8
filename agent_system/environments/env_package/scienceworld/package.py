"""ScienceWorld: boil water, build circuits, grow plants and other experiments, in text.

The environment calls the simulator directly. It does not use ``step`` of the library, which is
slow because it lists up to thousands of valid actions in each turn. All environments of a worker
process share one JVM (``agent_system/environments/jvm.py``). A task is one variation of one kind
of experiment. The splits are those of the simulator: half for train, a quarter for dev, the rest
for test.
"""

import json
from typing import Any

from agent_system.environments import jvm
from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.scienceworld.settings import (
    VARIATION_COUNTS,
    ScienceWorldSettings,
    get_variations,
)
from agent_system.environments.package import EnvPackage
from agent_system.reward_manager.scores import is_full_score

NAME = "scienceworld"
# First words of the simulator's reply to an unknown action. There is no other sign of this error.
UNKNOWN_ACTION_REPLY = "No known action matches that input."
# The environment refuses this command: it resets the score, and the same points would be rewarded
# again.
REFUSED_COMMAND = "reset task"
IGNORED_WORDS = ("a", "an", "the")  # words of an action that the simulator ignores
# Observations list objects in the order of Java hash sets. By default the hashes are random,
# and so is the order. With the same hash for all objects, a set keeps its insertion order.
STABLE_ORDER_JVM_OPTIONS = (
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
    """Environment whose reward is the change of the score (0 to 1, for 0 to 100 points).

    The return of an episode is therefore its final score. If the task fails, the score becomes 0,
    and the last reward is negative.
    """

    # Steps are slow, so several worker processes run in parallel. A JVM that hangs is killed
    # together with its worker process.
    placement = "process"

    def __init__(self, settings: ScienceWorldSettings) -> None:
        from scienceworld.constants import JAR_PATH

        self.settings = settings
        jvm_options = (*STABLE_ORDER_JVM_OPTIONS, *self.settings.java_options.split())
        self._jvm = jvm.acquire_jvm(NAME, JAR_PATH, self.settings.heap_mb, jvm_options)
        self._simulator: Any = self._jvm.create_object(
            "scienceworld.runtime.pythonapi.PythonInterface"
        )
        self._score = 0.0

    def reset(self, task: Task, seed: int = 0) -> Observation:
        self._load_task(task)
        self._score = 0.0
        return self._make_observation(
            f"{self._simulator.getTaskDescription()}\n{self._simulator.freeActionLook()}"
        )

    def step(self, action: str) -> Step:
        text = UNKNOWN_ACTION_REPLY if _is_reset_command(action) else self._simulator.step(action)
        simulator_score = self._simulator.getScore()
        score = min(max(simulator_score, 0.0), 1.0)
        reward = score - self._score
        self._score = score
        done = simulator_score < 0 or bool(self._simulator.getCompleted())
        observation = self._make_observation(text)
        is_valid = not text.startswith(UNKNOWN_ACTION_REPLY)
        observation.info |= {
            "won": is_full_score(score),
            "is_action_valid": is_valid,
            "score": round(100 * score),
        }
        return observation, reward, done, observation.info

    def gold_path(self, task: Task) -> list[str]:
        """Return actions that solve ``task``. This takes up to a minute and ends the episode."""
        self._load_task(task, computes_gold_path=True)
        return list(self._simulator.getGoldActionSequence())

    def close(self) -> None:
        if self._simulator is not None:
            # Release the simulator. Otherwise the JVM would keep it in memory.
            self._jvm.release_object(self._simulator)
            jvm.release_jvm(self._jvm)
            self._simulator = None

    def _load_task(self, task: Task, computes_gold_path: bool = False) -> None:
        self._simulator.load(
            task["name"], task["variation"], self.settings.simplification, computes_gold_path
        )

    def _make_observation(self, text: str) -> Observation:
        # Reading the surroundings and the inventory takes no turn in the simulation.
        surroundings = self._simulator.freeActionLook()
        inventory = self._simulator.freeActionInventory()
        # The score is part of the state: some steps change only the score, and are rewarded only
        # once.
        state_key = f"{surroundings}\n{inventory}\n{self._score:.2f}"
        info: dict[str, Any] = {"won": False}
        if self.settings.list_actions:
            action_combinations = json.loads(self._simulator.getValidActionObjectCombinationsJSON())
            valid_actions = {
                combination["action"] for combination in action_combinations["validActions"]
            }
            info["admissible_actions"] = sorted(valid_actions - {REFUSED_COMMAND})
        return Observation(text.strip(), anchor=state_key, info=info)


def _is_reset_command(action: str) -> bool:
    # The simulator also ignores letter case, white space and articles.
    words = [word for word in action.lower().split() if word not in IGNORED_WORDS]
    return words == REFUSED_COMMAND.split()


def list_tasks(settings: ScienceWorldSettings, split: str) -> list[Task]:
    """Return one task per variation of the chosen experiments. Raises ``JavaMissingError``."""
    import scienceworld  # noqa: F401  (report a missing library at startup)

    jvm.find_java(NAME)
    simulator_split = settings.val_split if split == "val" else "train"
    return [
        {
            "task_id": f"{NAME}/{experiment}/{variation}",
            "data_source": f"{NAME}/{experiment}",
            "name": experiment,
            "variation": variation,
        }
        for experiment in settings.task_names or VARIATION_COUNTS
        for variation in get_variations(experiment, simulator_split)
    ]


PACKAGE = EnvPackage(
    name=NAME,
    settings=ScienceWorldSettings,
    make=ScienceWorldEnv,
    tasks=list_tasks,
    prompts=lambda settings: ChatPrompts(
        RULES, "open door to kitchen", list_actions=settings.list_actions, keep_first=True
    ),
)
