"""A mixture: the tasks of several packages, each with its own prompts, projection and settings.

Parts are played by turns, as often as their weights say, whatever their numbers of tasks; success
is reported for each data source.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from agent_system.environments.env import Env, Observation, Step, Task
from agent_system.environments.env_package.mixture.settings import MixtureSettings
from agent_system.environments.env_registry import get_package
from agent_system.environments.experts.episode import now
from agent_system.environments.package import EnvPackage, Mixture
from agent_system.environments.prompts import Prompts, shows_level_prompts
from agent_system.environments.settings import EnvSettings
from agent_system.environments.tasks import interleaved

NAME = "mixture"


def part_settings(settings: MixtureSettings, part: str) -> EnvSettings:
    """The settings of ``part``. Raises ``ConfigError``."""
    return get_package(part).read(settings.kwargs.get(part))


class MixtureEnv:
    """The environment of whichever part a task is from; each is made when it is first needed."""

    placement = "process"  # whatever the parts are, they run there

    def __init__(self, settings: MixtureSettings) -> None:
        self.settings = settings
        self._made: dict[str, Env] = {}
        self._part = ""

    def reset(self, task: Task, seed: int) -> Observation:
        """Start the task of its part."""
        self._part = task["part"]
        if self._part not in self._made:
            settings = part_settings(self.settings, self._part)
            self._made[self._part] = get_package(self._part).make(settings)
        return self._named(now(self._made[self._part].reset(task["task"], seed)))

    def step(self, action: str) -> Step:
        """Play ``action`` in the environment of the task."""
        observation, reward, done, info = now(self._made[self._part].step(action))
        return self._named(observation), reward, done, info

    def close(self) -> None:
        """Close the environments of all parts."""
        for env in self._made.values():
            env.close()

    def _named(self, observation: Observation) -> Observation:
        # The prompts go by it.
        observation.info = {**observation.info, "part": self._part}
        return observation


class MixturePrompts:
    """Those of the part that an observation is from."""

    def __init__(self, settings: MixtureSettings) -> None:
        self._parts = {part: self._prompts_of(settings, part) for part in settings.weights}
        # What one part lacks, the mixture lacks.
        self.asks_for_levels = all(prompts.asks_for_levels for prompts in self._parts.values())
        self.shows_level_prompts = all(map(shows_level_prompts, self._parts.values()))

    def of(self, observation: Observation) -> Prompts:
        """The prompts of the part that ``observation`` is from."""
        return self._parts[observation.info["part"]]

    def system(self, levels: bool) -> str | None:
        """None: each part has its own (``of``)."""
        del levels  # each part is asked for its own
        return None

    def first(self, observation: Observation, levels: bool) -> str:
        """That of the part."""
        return self.of(observation).first(observation, levels)

    def turn(self, observation: Observation) -> str:
        """That of the part."""
        return self.of(observation).turn(observation)

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """That of the part."""
        return self.of(first).window(first, history, observation, levels)

    @staticmethod
    def _prompts_of(settings: MixtureSettings, part: str) -> Prompts:
        own = part_settings(settings, part)
        if settings.level_prompts:
            own = own.model_copy(update={"level_prompts": settings.level_prompts})
        return get_package(part).prompts(own)


def tasks(settings: MixtureSettings, split: str) -> list[Task]:
    """The tasks of all parts, by turns, so that the first ones are from every part."""
    parts = {part: _tasks_of(settings, part, split) for part in settings.weights}
    return interleaved(parts, settings.weights)


def _tasks_of(settings: MixtureSettings, part: str, split: str) -> list[Task]:
    return [
        {
            "task_id": f"{NAME}/{part}/{task['task_id']}",
            "data_source": task["data_source"],
            "part": part,
            "task": task,
        }
        for task in get_package(part).tasks(part_settings(settings, part), split)
    ]


def images(settings: MixtureSettings) -> tuple[str, Any, Any] | None:
    """The first part whose observations are images."""
    for part in settings.weights:
        if get_package(part).images(part_settings(settings, part)) is not None:
            return "parts", part, "parts whose observations are text"
    return None


def _stop(settings: MixtureSettings) -> tuple[str, ...]:
    """Those of all parts: which part a turn is in is not known where it is sampled."""
    found = [stop for part in settings.weights for stop in get_package(part).stop]
    return tuple(dict.fromkeys(found))


def _project(text: str) -> tuple[str, bool]:
    """Nothing is projected here: the part of a task does it (``EnvPackage.for_task``)."""
    return text, True


def _weights(settings: MixtureSettings) -> Mapping[str, int]:
    return settings.weights


PACKAGE = EnvPackage(
    name=NAME,
    settings=MixtureSettings,
    make=MixtureEnv,
    tasks=tasks,
    prompts=MixturePrompts,
    project=_project,
    images=images,
    mixture=Mixture(
        weights=_weights, package_of=lambda task: get_package(task["part"]), stop=_stop
    ),
)
