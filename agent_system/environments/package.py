"""``EnvPackage``: description of an environment, with its functions and settings class."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import NoneType
from typing import Any, Generic, NoReturn, TypeVar

from agent_system.environments.chat_prompts import project_action
from agent_system.environments.env import Env, Observation, Prompts, Task
from agent_system.environments.expert_protocol import Expert
from agent_system.environments.settings import EnvSettings
from verl.config.settings import read_section_or_raise

S = TypeVar("S", bound=EnvSettings)
CALLABLE_FIELDS = ("make", "tasks", "prompts", "project", "images", "variants")


@dataclass(frozen=True)
class Mixture(Generic[S]):
    """Additional fields of a package that mixes several environments.

    Attributes:
        weights: ``weights(settings)`` returns the weight of each part (mixed environment). A part
            gets ``weight / sum(weights)`` of the trajectories. ``task["part"]`` names the part.
        package_of: ``package_of(task)`` returns the package of the part that ``task`` belongs to.
        stop: ``stop(settings)`` returns the stop strings, instead of ``EnvPackage.stop``.
    """

    weights: Callable[[S], Mapping[str, int]]
    package_of: Callable[[Task], "EnvPackage[Any]"]
    stop: Callable[[S], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TaskText:
    """Functions that read and replace the first observation of a task that contains it."""

    first_observation: Callable[[Task], Observation]
    with_text: Callable[[Task, str], Task]


@dataclass(frozen=True)
class EnvPackage(Generic[S]):
    """Description of an environment: functions that make it, its tasks, prompts and parser.

    Attributes:
        name: Name of the config section ``env.<name>``.
        settings: Class of the section.
        make: ``make(settings)`` returns a new environment. Called in the worker process.
        tasks: ``tasks(settings, split)`` returns the tasks of ``train`` or ``val``: disjoint lists
            in a stable order.
        prompts: ``prompts(settings)`` returns the ``Prompts``.
        project: ``project(text)`` returns the action in a model text, and True if the text is well
            formed. Never raises. Default: the text in ``<action>`` tags.
        stop: Strings that end the sampling of a turn.
        images: ``images(settings)`` returns None if observations are text with these settings.
            Otherwise it returns (config key, value, text value). The key with this value makes
            observations images; with the text value they are text.
        executes_cut_turns: True if a turn that reached the token limit is passed to ``step`` before
            it ends the episode. False: it ends the episode without an env step.
        runs_agent: True if one env step runs a whole agent, which calls the policy through the
            endpoint.
        task_text: Functions that read and replace the first observation of a task. None: tasks do
            not contain it, so it is known only after ``reset``.
        expert: Scripted policy whose episodes ``main_sft`` and the cold start imitate.
        variants: Returns all names that may follow the slash of ``env.env_name=NAME/VARIANT``, in a
            stable order. It may import the library of the environment.
        mixture: Additional fields if the tasks come from several packages.
        format_action: Returns the text in which a model writes an action, so that ``project`` reads
            it back. None: ``<action>...</action>``.
        unlisted: Returns variants that can be used but that ``python -m agent_system.environments
            list`` omits, each with the reason.
        remarks: Returns remarks by variant, which that command prints after the name. The variant
            "" is the package itself.
        without_oracle: Variants for which the expert does not know a solution.

    Raises ``TypeError`` for a field of another type.
    """

    name: str
    settings: type[S]
    make: Callable[[S], Env]
    tasks: Callable[[S, str], list[Task]]
    prompts: Callable[[S], Prompts]
    project: Callable[[str], tuple[str, bool]] = project_action
    # Stop after the action: the model would otherwise continue with an invented observation.
    stop: tuple[str, ...] = ("</action>",)
    # (config key, value for images, value for texts), or None if observations are texts
    images: Callable[[S], tuple[str, Any, Any] | None] = lambda _settings: None
    executes_cut_turns: bool = False  # cut: the turn reached its token limit
    runs_agent: bool = False
    task_text: TaskText | None = None
    expert: Expert[S] | None = None
    variants: Callable[[], Sequence[str]] = tuple
    mixture: Mixture[S] | None = None
    format_action: Callable[[str], str] | None = None
    unlisted: Callable[[], Mapping[str, str]] = dict  # variant -> reason to omit it from lists
    remarks: Callable[[], Mapping[str, str]] = dict  # variant -> remark printed in lists
    without_oracle: tuple[str, ...] = ()  # variants for which the expert knows no solution

    def __post_init__(self) -> None:
        is_settings_class = isinstance(self.settings, type) and issubclass(
            self.settings, EnvSettings
        )
        if not is_settings_class:
            self._refuse_field("settings", "a subclass of EnvSettings", "settings=EnvSettings")
        for field_name in CALLABLE_FIELDS:
            if not callable(getattr(self, field_name)):
                fix = f"write a function or class, without calling it ({field_name}=NAME)"
                self._refuse_field(field_name, "a function or a class", fix)
        # A text would be read as a tuple of letters, each of which would end a turn.
        if not isinstance(self.stop, (tuple, list)) or not all(
            isinstance(text, str) and text for text in self.stop
        ):
            self._refuse_field("stop", "a tuple of texts", 'stop=("</action>",)')
        if not isinstance(self.expert, (Expert, NoneType)):
            self._refuse_field("expert", "an Expert, or None", "expert=Expert(CLASS)")

    def _refuse_field(self, field_name: str, allowed: str, fix: str) -> NoReturn:
        raise TypeError(
            f"{field_name}={getattr(self, field_name)!r} of the EnvPackage {self.name!r}; "
            f"allowed: {allowed}; fix: {fix}"
        )

    def package_for_task(self, task: Task) -> "EnvPackage[Any]":
        """Return the package of the environment in which ``task`` runs.

        It is this package, or one of the mixed packages if this package is a mixture.
        """
        return self if self.mixture is None else self.mixture.package_of(task)

    def stop_strings(self, settings: S) -> tuple[str, ...]:
        """Return the strings that end the sampling of a turn."""
        return self.stop if self.mixture is None else self.mixture.stop(settings)

    def part_weights(self, settings: S) -> Mapping[str, int]:
        """Return the weight of each environment of a mixture; empty for a single environment."""
        return {} if self.mixture is None else self.mixture.weights(settings)

    def read_settings(self, section: Mapping[str, Any] | None = None) -> S:
        """Return the settings in ``section``. Raises ``ConfigError``, which names every error."""
        return read_section_or_raise(self.settings, section, f"env.{self.name}")
