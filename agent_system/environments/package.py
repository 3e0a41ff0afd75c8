"""``EnvPackage``: everything that the agent system needs to know about one kind of environment."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from agent_system.environments.env import Env, Observation, Task
from agent_system.environments.expert_protocol import Expert
from agent_system.environments.prompts import Prompts
from agent_system.environments.settings import EnvSettings
from verl.config.settings import read_or_raise

S = TypeVar("S", bound=EnvSettings)


def no_images(settings: EnvSettings) -> tuple[str, Any, Any] | None:
    """Return None: observations are text."""
    del settings
    return None


def no_variants() -> Sequence[str]:
    """Return no variants: one environment has this name."""
    return ()


@dataclass(frozen=True)
class Mixture(Generic[S]):
    """Further fields of a package that mixes several environments.

    Every task names its part under ``part``, a key of ``weights(settings)``: of the sum of all
    weights, a part's is its share of what is played. ``package_of(task)`` is the package that the
    task is from, ``stop(settings)`` takes the place of ``EnvPackage.stop``.
    """

    weights: Callable[[S], Mapping[str, int]]
    package_of: Callable[[Task], "EnvPackage[Any]"]
    stop: Callable[[S], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TaskText:
    """Functions for tasks that contain their first observation: ``shows(task)`` returns it,
    ``retold(task, text)`` returns the task with ``text`` in its place.
    """

    shows: Callable[[Task], Observation]
    retold: Callable[[Task, str], Task]


@dataclass(frozen=True)
class EnvPackage(Generic[S]):
    """Everything the agent system needs to know about one kind of environment.

    ``make`` is called in the worker process. ``tasks(settings, split)`` gives the tasks of
    ``train`` or ``val``: disjoint lists in a stable order. ``project`` turns model text into
    (action, well-formed?) and never raises. ``stop``: strings that end the sampling of a turn.
    ``images`` names the key that makes observations images, its value, and the value that gives
    text; None where the observations of those settings are text. Who has an ``expert`` can be
    imitated, by ``main_sft`` and the cold start. ``variants`` are the names that may follow the
    slash of ``env.env_name=NAME/VARIANT``, all of them and each playable as it is, in a stable
    order; it may import the library behind the package. ``mixture`` is there where the tasks are
    those of several packages. ``format_action`` gives the text in which a model writes an action,
    so that ``project`` reads it back; None: between ``<action>`` and ``</action>``. ``unlisted``
    are further variants that can be played, and the reason why they are not listed; ``remarks`` are
    what the list says of listed ones.
    """

    name: str
    settings: type[S]
    make: Callable[[S], Env]
    tasks: Callable[[S, str], list[Task]]
    prompts: Callable[[S], Prompts]
    project: Callable[[str], tuple[str, bool]]
    # What follows an action would be invented: the environment has not answered yet.
    stop: tuple[str, ...] = ("</action>",)
    images: Callable[[S], tuple[str, Any, Any] | None] = no_images
    # What was cut by length is no action; of a turn that is the whole episode it is the answer.
    plays_cut_turns: bool = False
    # A step is a whole play: its action says where an agent finds the policy (``endpoint``).
    brings_agent: bool = False
    # None: what is shown first is known when the environment is reset.
    task_text: TaskText | None = None
    expert: Expert[S] | None = None
    variants: Callable[[], Sequence[str]] = no_variants
    mixture: Mixture[S] | None = None
    format_action: Callable[[str], str] | None = None
    unlisted: Callable[[], Mapping[str, str]] = dict
    remarks: Callable[[], Mapping[str, str]] = dict
    # Variants whose tasks nobody knows how to solve, though others have an expert.
    without_oracle: tuple[str, ...] = ()

    def for_task(self, task: Task) -> "EnvPackage[Any]":
        """The package that ``task`` is from: this one, or its part."""
        return self if self.mixture is None else self.mixture.package_of(task)

    def stops(self, settings: S) -> tuple[str, ...]:
        """Strings that end the sampling of a turn."""
        return self.stop if self.mixture is None else self.mixture.stop(settings)

    def weights(self, settings: S) -> Mapping[str, int]:
        """How often each part is played; empty where there is one."""
        return {} if self.mixture is None else self.mixture.weights(settings)

    def read(self, section: Mapping[str, Any] | None = None) -> S:
        """The settings that ``section`` writes. Raises ``ConfigError`` naming every mistake."""
        return read_or_raise(self.settings, section, f"env.{self.name}")
