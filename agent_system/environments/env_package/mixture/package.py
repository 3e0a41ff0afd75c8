"""Mixture: the tasks of several packages, each with its prompts, projection and settings.

Tasks alternate between the parts in proportion to their weights, independent of the numbers of
tasks. Success is reported per data source.
"""

from collections.abc import Sequence
from typing import Any

from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.mixture.settings import MixtureSettings
from agent_system.environments.env_registry import get_package
from agent_system.environments.experts.episode import await_if_needed
from agent_system.environments.package import EnvPackage, Mixture
from agent_system.environments.prompts import Prompts, shows_level_prompts
from agent_system.environments.settings import EnvSettings
from agent_system.environments.tasks import interleave_mixture_tasks

NAME = "mixture"


def part_settings(settings: MixtureSettings, part: str) -> EnvSettings:
    """Return the settings of ``part``. Raises ``ConfigError``."""
    return get_package(part).read_settings(settings.kwargs.get(part))


class MixtureEnv:
    """Environment that delegates to the environment that the task belongs to (its part).

    The environments of the parts are made on first use.
    """

    placement = "process"  # also for parts with another placement

    def __init__(self, settings: MixtureSettings) -> None:
        self.settings = settings
        self._environments: dict[str, Env] = {}
        self._part = ""

    def reset(self, task: Task, seed: int) -> Observation:
        self._part = task["part"]
        if self._part not in self._environments:
            settings = part_settings(self.settings, self._part)
            self._environments[self._part] = get_package(self._part).make(settings)
        return self._add_part(
            await_if_needed(self._environments[self._part].reset(task["task"], seed))
        )

    def step(self, action: str) -> Step:
        observation, reward, done, info = await_if_needed(
            self._environments[self._part].step(action)
        )
        return self._add_part(observation), reward, done, info

    def close(self) -> None:
        for env in self._environments.values():
            env.close()

    def _add_part(self, observation: Observation) -> Observation:
        # ``MixturePrompts`` selects the prompts by this key.
        observation.info = {**observation.info, "part": self._part}
        return observation


class MixturePrompts:
    """Prompts that delegate to the prompts of an observation's part."""

    def __init__(self, settings: MixtureSettings) -> None:
        texts = {"level_prompts": settings.level_prompts} if settings.level_prompts else {}
        self._parts = {
            part: get_package(part).prompts(part_settings(settings, part).model_copy(update=texts))
            for part in settings.part_weights
        }
        # The prompts of a mixture can ask for levels only if those of all parts can.
        self.asks_for_levels = all(prompts.asks_for_levels for prompts in self._parts.values())
        self.shows_level_prompts = all(map(shows_level_prompts, self._parts.values()))

    def of(self, observation: Observation) -> Prompts:
        """Return the prompts of the part that ``observation`` is from."""
        return self._parts[observation.info["part"]]

    def system(self, levels: bool) -> str | None:
        """Return None: each part has its own system message (see ``of``)."""
        del levels
        return None

    def first(self, observation: Observation, levels: bool) -> str:
        return self.of(observation).first(observation, levels)

    def turn(self, observation: Observation) -> str:
        return self.of(observation).turn(observation)

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        return self.of(first).window(first, history, observation, levels)


def list_tasks(settings: MixtureSettings, split: str) -> list[Task]:
    """Return the tasks of all parts, interleaved so that the first tasks are from every part."""
    tasks_by_part: dict[str, list[Task]] = {
        part: [
            {
                "task_id": f"{NAME}/{part}/{task['task_id']}",
                "data_source": task["data_source"],
                "part": part,
                "task": task,
            }
            for task in get_package(part).tasks(part_settings(settings, part), split)
        ]
        for part in settings.part_weights
    }
    return interleave_mixture_tasks(tasks_by_part, settings.part_weights)


def image_setting(settings: MixtureSettings) -> tuple[str, Any, Any] | None:
    """Return the first part whose observations are images, or None."""
    for part in settings.part_weights:
        if get_package(part).images(part_settings(settings, part)) is not None:
            return "parts", part, "parts whose observations are text"
    return None


def _stop_strings(settings: MixtureSettings) -> tuple[str, ...]:
    """Return the stop strings of all parts. The sampler has one list for all tasks."""
    stop_strings = [stop for part in settings.part_weights for stop in get_package(part).stop]
    return tuple(dict.fromkeys(stop_strings))


PACKAGE = EnvPackage(
    name=NAME,
    settings=MixtureSettings,
    make=MixtureEnv,
    tasks=list_tasks,
    prompts=MixturePrompts,
    project=lambda text: (text, True),  # the task's part projects it (``package_for_task``)
    images=image_setting,
    mixture=Mixture(
        weights=lambda settings: settings.part_weights,
        package_of=lambda task: get_package(task["part"]),
        stop=_stop_strings,
    ),
)
