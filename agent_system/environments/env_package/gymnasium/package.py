"""Text version of every Gymnasium environment with discrete actions.

A task is a start state, given by the seed of Gymnasium's ``reset``. All later randomness depends on
the environment seed. Members of a group have the same seed, so equal actions give them equal
observations. An episode is restored by repeating its actions.
"""

import contextlib
import io
from typing import Any

from agent_system.environments.chat_prompts import ChatPrompts, project_action
from agent_system.environments.env import Observation, Step, Task
from agent_system.environments.env_package.gymnasium import worlds
from agent_system.environments.env_package.gymnasium.settings import GymnasiumSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.prompts import Prompts
from agent_system.environments.tasks import SEED_MASK, get_task_number_range
from verl.utils.seeds import derive_seed


class GymnasiumEnv:
    """Environment with a reward of 1.0 for success, else 0.0, or with Gymnasium's reward.

    ``info["score"]`` is the sum of Gymnasium's rewards in the episode. An action that has no known
    name changes nothing and is not valid.
    """

    placement = "process"  # third-party code may render, wait or crash

    def __init__(self, settings: GymnasiumSettings) -> None:
        import numpy

        self._generator = numpy.random.default_rng
        self.settings = settings
        self.world = worlds.make_world(settings)
        self.description = worlds.make_description(settings)
        self.action_numbers = {
            name.lower(): number for number, name in enumerate(self.description.actions)
        }
        self.score = 0.0
        self.steps = 0
        self._observation: Any = None
        self._info: dict[str, Any] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """Start ``task``. ``seed`` determines all randomness after the start state."""
        self.score = 0.0
        self.steps = 0
        # Some environments print to standard output while they generate a level.
        with contextlib.redirect_stdout(io.StringIO()):
            self._observation, self._info = self.world.reset(seed=task["reset_seed"])
        self.world.unwrapped.np_random = self._generator(seed)
        return self._make_observation("")

    def step(self, action: str) -> Step:
        """Apply the action of this name.

        The episode is done when Gymnasium terminates or truncates it, or after ``max_steps`` turns
        if surviving them is the goal.
        """
        action_number = self.action_numbers.get(action.strip().lower())
        if action_number is None:
            message = f"There is no such action. Actions: {', '.join(self.description.actions)}.\n"
            info = {"won": False, "is_action_valid": False}
            return self._make_observation(message), 0.0, False, info
        self._observation, gym_reward, is_terminated, is_truncated, self._info = self.world.step(
            action_number
        )
        self.steps += 1
        self.score += float(gym_reward)
        needs_survival = self.description.success_condition == "survival"
        has_survived = is_truncated or (
            needs_survival and self.steps >= (self.settings.max_steps or 0) > 0
        )
        done = bool(is_terminated or has_survived)
        if needs_survival:
            won = done and not is_terminated
        else:
            won = bool(is_terminated) and (
                self.description.success_condition == "end" or float(gym_reward) > 0
            )
        reward = float(gym_reward) if self.settings.reward == "gym" else float(won)
        info = {"won": won, "is_action_valid": True, "score": self.score}
        return self._make_observation(""), reward, done, info

    def close(self) -> None:
        self.world.close()

    def _make_observation(self, message: str) -> Observation:
        text = self.description.describe(self._observation, self._info, self.world)
        anchor = f"{text}\n{self.description.state(self.world)}".strip()
        return Observation(
            f"{message}{text}", anchor=anchor, info={"admissible_actions": self._allowed_actions()}
        )

    def _allowed_actions(self) -> list[str]:
        """Return the actions that Gymnasium's action mask allows, or all without a mask."""
        mask = self._info.get("action_mask")
        actions = self.description.actions
        if mask is None or len(mask) != len(actions):
            return list(actions)
        return [name for name, allowed in zip(actions, mask, strict=True) if allowed]


def list_tasks(settings: GymnasiumSettings, split: str) -> list[Task]:
    """Return start states by number. Validation has the first numbers, training those after them.

    If an environment has a single start state, tasks of both splits start in it. Only their seeds
    differ.
    """
    source = f"{worlds.NAME}/{settings.env_id}"
    return [
        {
            "task_id": f"{source}/{task_number}",
            "data_source": source,
            "reset_seed": derive_seed(worlds.NAME, settings.task_seed, task_number) & SEED_MASK,
        }
        for task_number in get_task_number_range(split, settings.train_tasks, settings.val_tasks)
    ]


def make_prompts(settings: GymnasiumSettings) -> Prompts:
    """Return prompts with the rules and the names of the actions."""
    description = worlds.make_description(settings)
    rules = f"{description.rules}\nActions: {', '.join(description.actions)}."
    return ChatPrompts(rules, description.actions[0], list_actions=settings.list_actions)


PACKAGE = EnvPackage(
    name=worlds.NAME,
    settings=GymnasiumSettings,
    make=GymnasiumEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    project=project_action,
    variants=worlds.known_ids,
)
