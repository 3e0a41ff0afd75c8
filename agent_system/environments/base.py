"""The environment protocol: what an environment is, what it returns, and what its package declares.

An environment is synchronous or asynchronous text in, observation out. It knows nothing of tokens
or policies.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agent_system.environments.settings import EnvSettings
from verl.utils.settings import read_or_raise

# JSON-able; always holds "task_id" (str, unique over splits) and "data_source" (str).
Task = dict[str, Any]


@dataclass(slots=True)
class Observation:
    """What the agent sees after ``reset`` or ``step``.

    ``anchor`` is a canonical text of the state for step-level grouping (GiGPO); ``None`` means
    ``text`` is used. ``info`` may hold ``won``, ``is_action_valid`` and ``admissible_actions``.
    """

    text: str
    image: Any = None
    anchor: str | None = None
    info: dict[str, Any] = field(default_factory=dict)

    @property
    def state(self) -> str:
        """The text that says which state this is: ``anchor``, or ``text`` where there is none."""
        return self.text if self.anchor is None else self.anchor


class Env(Protocol):
    """One environment instance; reused for many episodes through ``reset``.

    ``placement`` says where it may run: ``inline`` (cheap, in the caller), ``thread``, ``locked``
    (thread, one call at a time for the whole class) or ``process`` (a pool worker). ``reset`` and
    ``step`` may be coroutines. Where it runs in a thread it may offer ``interrupt()``, called from
    another one when a call of it hangs, to make that call return.
    """

    placement: str

    def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode that ``task`` and ``seed`` determine completely."""

    def step(self, action: str) -> tuple[Observation, float, bool, dict[str, Any]]:
        """Play one projected action; return observation, reward, done, info (``won``,
        ``is_action_valid``).
        """

    def close(self) -> None:
        """Free what the environment holds."""


class Prompts(Protocol):
    """How an environment speaks to the policy.

    ``levels`` asks for the four thinking levels of RLVCR.
    """

    asks_for_levels: bool  # False: the package has no level prompt and RLVCR refuses it
    shows_level_prompts: bool  # settings.level_prompts replaces its descriptions; left out: False

    def system(self, levels: bool) -> str | None:
        """The system message, or None where the chat has none."""

    def first(self, observation: Observation, levels: bool) -> str:
        """The first user message of an episode (``append`` history)."""

    def turn(self, observation: Observation) -> str:
        """Every later user message (``append`` history)."""

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """The whole user message of a step (``window`` history); ``history`` holds (observation,
        action) texts.
        """


S = TypeVar("S", bound=EnvSettings)


def no_images(settings: EnvSettings) -> tuple[str, Any, Any] | None:
    """The observations are text, whatever the settings say."""
    return None


@dataclass(frozen=True)
class EnvPackage(Generic[S]):
    """Everything the agent system needs to know about one kind of environment.

    ``make`` is called in the worker process. ``tasks(settings, split)`` gives the tasks of
    ``train`` or ``val``: disjoint lists in a stable order. ``project`` turns model text into (action,
    well-formed?) and never raises. ``stop``: strings that end the sampling of a turn. ``images``
    names the key that makes observations images, its value, and the value that gives text; None
    where the observations of those settings are text.
    """

    name: str
    settings: type[S]
    make: Callable[[S], Env]
    tasks: Callable[[S, str], list[Task]]
    prompts: Callable[[S], Prompts]
    project: Callable[[str], tuple[str, bool]]
    stop: tuple[str, ...] = ("</action>",)
    images: Callable[[S], tuple[str, Any, Any] | None] = no_images

    def read(self, section: Mapping[str, Any] | None = None) -> S:
        """The settings that ``section`` writes. Raises ``ConfigError`` naming every mistake."""
        return read_or_raise(self.settings, section, f"env.{self.name}")
