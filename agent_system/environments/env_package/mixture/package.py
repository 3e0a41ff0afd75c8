"""Mixture of several environments in one run.

Each environment of the mixture is called a part. A part has its own tasks, prompts, action parser
and settings. Tasks of the parts alternate in proportion to the weights, independent of how many
tasks a part has. Success is reported per data source.
"""

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from agent_system.environments.env import (
    Env,
    Observation,
    PastTurns,
    Prompts,
    Step,
    Task,
    shows_level_prompts,
)
from agent_system.environments.env_package.mixture.settings import MixtureSettings
from agent_system.environments.env_registry import get_package
from agent_system.environments.event_loop import await_if_needed, is_loop_running
from agent_system.environments.package import EnvPackage, Mixture
from agent_system.environments.tasks import interleave_mixture_tasks

NAME = "mixture"


class MixtureEnv:
    """Mixture of environments. It passes all calls to the environment of the current task."""

    placement = "process"  # of every mixture, whatever the placements of its environments are

    def __init__(self, settings: MixtureSettings) -> None:
        self.settings = settings
        self._envs_by_part: dict[str, Env] = {}
        self._part_name = ""

    def reset(self, task: Task, seed: int) -> Observation:
        self._part_name = task["part"]
        if self._part_name not in self._envs_by_part:
            settings = self.settings.read_part_settings(self._part_name)
            self._envs_by_part[self._part_name] = get_package(self._part_name).make(settings)
        observation = self._envs_by_part[self._part_name].reset(task["task"], seed)
        return _apply_to_result(self._add_part_name, observation)

    def step(self, action: str) -> Step:
        step_result = self._envs_by_part[self._part_name].step(action)
        return _apply_to_result(
            lambda step_result: (self._add_part_name(step_result[0]), *step_result[1:]), step_result
        )

    def close(self) -> None:
        # The stack closes the other environments too if one of them raises an error.
        with contextlib.ExitStack() as stack:
            for env in self._envs_by_part.values():
                stack.callback(env.close)

    def _add_part_name(self, observation: Observation) -> Observation:
        # ``MixturePrompts`` reads this key to select the prompts.
        observation.info = {**observation.info, "part": self._part_name}
        return observation


def _apply_to_result(function: Callable[[Any], Any], result: object) -> Any:
    """Return ``function(result)``, where ``result`` is a return value of an environment.

    An asynchronous environment returns a coroutine, which is awaited first. If an event loop runs
    in this thread (``placement=inline``), return a coroutine, which the caller awaits.
    """
    if not inspect.isawaitable(result) or not is_loop_running():
        return function(await_if_needed(result))

    async def await_and_apply_to_result() -> Any:
        return function(await result)

    return await_and_apply_to_result()


class MixturePrompts:
    """Prompts of a mixture of environments.

    Each call is passed to the prompts of the environment that made the observation.
    """

    def __init__(self, settings: MixtureSettings) -> None:
        changed_settings = (
            {"level_prompts": settings.level_prompts} if settings.level_prompts else {}
        )
        self._prompts_by_part = {
            part: get_package(part).prompts(
                settings.read_part_settings(part).model_copy(update=changed_settings)
            )
            for part in settings.part_weights
        }
        self.asks_for_levels = all(
            prompts.asks_for_levels for prompts in self._prompts_by_part.values()
        )
        self.shows_level_prompts = all(map(shows_level_prompts, self._prompts_by_part.values()))

    def select_part_prompts(self, observation: Observation) -> Prompts:
        return self._prompts_by_part[observation.info["part"]]

    def system(self, levels: bool) -> str | None:
        """Return None: each environment of the mixture has its own system message."""
        return None

    def first(self, observation: Observation, levels: bool) -> str:
        return self.select_part_prompts(observation).first(observation, levels)

    def turn(self, observation: Observation) -> str:
        return self.select_part_prompts(observation).turn(observation)

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        return self.select_part_prompts(first).window(first, history, observation, levels)


def list_tasks(settings: MixtureSettings, split: str) -> list[Task]:
    """Return the tasks of all parts, interleaved in proportion to the weights."""
    tasks_by_part: dict[str, list[Task]] = {
        part: [
            {
                "task_id": f"{NAME}/{part}/{task['task_id']}",
                "data_source": task["data_source"],
                "part": part,
                "task": task,
            }
            for task in get_package(part).tasks(settings.read_part_settings(part), split)
        ]
        for part in settings.part_weights
    }
    return interleave_mixture_tasks(tasks_by_part, settings.part_weights)


def find_image_setting(settings: MixtureSettings) -> tuple[str, Any, Any] | None:
    """Return the setting that makes some observations images, or None if all are text.

    It is ("parts", first part with images, allowed values), for an error message.
    """
    for part in settings.part_weights:
        if get_package(part).images(settings.read_part_settings(part)) is not None:
            return "parts", part, "parts whose observations are text"
    return None


PACKAGE = EnvPackage(
    name=NAME,
    settings=MixtureSettings,
    make=MixtureEnv,
    tasks=list_tasks,
    prompts=MixturePrompts,
    project=lambda text: (text, True),  # ``package_for_task`` selects the projection of the part
    images=find_image_setting,
    mixture=Mixture(
        weights=lambda settings: settings.part_weights,
        package_of=lambda task: get_package(task["part"]),
        stop=lambda settings: tuple(
            dict.fromkeys(stop for part in settings.part_weights for stop in get_package(part).stop)
        ),
    ),
)
