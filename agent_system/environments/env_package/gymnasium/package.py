"""Text version of every Gymnasium environment with discrete actions.

A task is a start state, which the seed of Gymnasium's ``reset`` determines. After the start, all
randomness depends on the environment seed. Rows of a group have the same environment seed, so equal
actions lead to equal observations.
"""

import contextlib
import io
from itertools import compress
from typing import Any

import numpy as np

from agent_system.environments.chat_prompts import ChatPrompts
from agent_system.environments.env import Observation, Prompts, Step, Task
from agent_system.environments.env_package.gymnasium import gym_envs
from agent_system.environments.env_package.gymnasium.settings import GymnasiumSettings
from agent_system.environments.package import EnvPackage
from agent_system.environments.tasks import SEED_MASK, get_task_number_range
from verl.utils.seeds import derive_seed


class GymnasiumEnv:
    """Gymnasium environment with text actions and observations.

    ``settings.reward`` selects the reward: 1.0 for success, else 0.0 (``won``), or Gymnasium's
    reward of each step (``gym``). ``info["score"]`` is the sum of Gymnasium's rewards in the
    episode. An unknown action changes nothing and is not valid.
    """

    placement = "process"  # third-party code may render, wait or crash

    def __init__(self, settings: GymnasiumSettings) -> None:
        self.settings = settings
        self.gym_env = gym_envs.make_gym_env(settings)
        self.description = gym_envs.make_text_description(settings)
        self.action_numbers = {
            name.lower(): number for number, name in enumerate(self.description.actions)
        }
        self.score = 0.0
        self.turn_count = 0
        self._observation: Any = None
        self._info: dict[str, Any] = {}

    def reset(self, task: Task, seed: int) -> Observation:
        """Start ``task``. ``seed`` determines all randomness after the start state."""
        self.score = 0.0
        self.turn_count = 0
        # Some environments print to standard output while they generate a level.
        with contextlib.redirect_stdout(io.StringIO()):
            self._observation, self._info = self.gym_env.reset(seed=task["reset_seed"])
        self.gym_env.unwrapped.np_random = np.random.default_rng(seed)
        return self._make_observation("")

    def step(self, action: str) -> Step:
        """Apply the action with the name ``action``.

        If the success condition is ``survival``, the episode is also done after ``max_steps``
        turns.
        """
        action_number = self.action_numbers.get(action.strip().lower())
        if action_number is None:
            message = f"There is no such action. Actions: {', '.join(self.description.actions)}.\n"
            info = {"won": False, "is_action_valid": False}
            return self._make_observation(message), 0.0, False, info
        self._observation, gym_reward, is_terminated, is_truncated, self._info = self.gym_env.step(
            action_number
        )
        self.turn_count += 1
        self.score += float(gym_reward)
        needs_survival = self.description.success_condition == "survival"
        is_limit_reached = is_truncated or (
            needs_survival and self.turn_count >= (self.settings.max_steps or 0) > 0
        )
        done = bool(is_terminated or is_limit_reached)
        if needs_survival:
            is_success = done and not is_terminated
        else:
            is_success = bool(is_terminated) and (
                self.description.success_condition == "end" or float(gym_reward) > 0
            )
        reward = float(gym_reward) if self.settings.reward == "gym" else float(is_success)
        info = {"won": is_success, "is_action_valid": True, "score": self.score}
        return self._make_observation(""), reward, done, info

    def close(self) -> None:
        self.gym_env.close()

    def _make_observation(self, message: str) -> Observation:
        text = self.description.describe(self._observation, self._info, self.gym_env)
        anchor = f"{text}\n{self.description.state(self.gym_env)}".strip()
        return Observation(
            f"{message}{text}",
            anchor=anchor,
            info={"admissible_actions": self._list_allowed_actions()},
        )

    def _list_allowed_actions(self) -> list[str]:
        """Return the actions that Gymnasium's action mask allows; without a mask, all."""
        action_mask = self._info.get("action_mask")
        action_names = self.description.actions
        if action_mask is None or len(action_mask) != len(action_names):
            return list(action_names)
        return list(compress(action_names, action_mask))


def list_tasks(settings: GymnasiumSettings, split: str) -> list[Task]:
    """Return one task per reset seed, which determines the start state.

    Validation and training have different seeds. If the environment has a single start state, it is
    the start of all tasks in both splits.
    """
    data_source = f"{gym_envs.NAME}/{settings.env_id}"
    return [
        {
            "task_id": f"{data_source}/{task_number}",
            "data_source": data_source,
            "reset_seed": derive_seed(gym_envs.NAME, settings.task_seed, task_number) & SEED_MASK,
        }
        for task_number in get_task_number_range(split, settings.train_tasks, settings.val_tasks)
    ]


def make_prompts(settings: GymnasiumSettings) -> Prompts:
    description = gym_envs.make_text_description(settings)
    rules = f"{description.rules}\nActions: {', '.join(description.actions)}."
    return ChatPrompts(rules, description.actions[0], list_actions=settings.list_actions)


PACKAGE = EnvPackage(
    name=gym_envs.NAME,
    settings=GymnasiumSettings,
    make=GymnasiumEnv,
    tasks=list_tasks,
    prompts=make_prompts,
    variants=gym_envs.list_env_ids,
)
