"""Protocol of experts, which make demonstrations of an environment."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agent_system.environments.env import Observation, Task
from agent_system.environments.settings import EnvSettings

S = TypeVar("S", bound=EnvSettings)


@dataclass(frozen=True, slots=True)
class Noise:
    """Shares of an expert's actions that are wrong on purpose; their sum is less than 1.

    Attributes:
        useless_share: Valid actions that do not advance the task. Reinforcement learning can
            remove them.
        invalid_share: Actions that the environment rejects. They show the policy how to continue
            after an invalid action.
    """

    useless_share: float = 0.0
    invalid_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Thought:
    """Text of a thought and the action that follows from it."""

    text: str
    action: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Action of an expert, and the parts of the thoughts about it, each without a full stop.

    ``thoughts`` contains thoughts that the expert writes itself, by level. They replace those that
    are composed of ``situation``, ``tried`` and ``plan``, and may lead to another action.
    """

    action: str
    situation: str = ""  # facts that matter for the action
    tried: str = ""  # the previous action and its result
    plan: str = ""  # the next actions; the first one is ``action``
    is_useless: bool = False  # valid, but does not advance the task
    is_invalid: bool = False  # rejected by the environment
    thoughts: Mapping[int, Thought] = field(default_factory=dict)
    needed_level: int | None = None  # the lowest level that suffices; None: unknown
    right_actions: tuple[str, ...] = ()  # all right actions in this state; empty: ``action`` only

    def is_right(self, action: str) -> bool:
        """Return True if ``action`` is right."""
        return action in (self.right_actions or (self.action,))


class ExpertPolicy(Protocol):
    """State of an expert in one episode."""

    def act(self) -> Decision:
        """Return the next action with its thoughts."""
        ...

    def observe(self, action: str, observation: Observation) -> None:
        """Receive the observation after ``action``. Not called after the end of the episode."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeStart(Generic[S]):
    """Information that an expert receives at the start of an episode."""

    settings: S
    task: Task
    first: Observation
    rng: random.Random  # source of all random choices
    noise: Noise = field(default_factory=Noise)


def no_symbols(settings: EnvSettings) -> Sequence[str]:
    """Return no symbols. Default of ``Expert.symbols``."""
    del settings
    return ()


def names_no_level(settings: EnvSettings) -> bool:
    """Return False, the default of ``Expert.names_needed_level``, for any settings."""
    del settings
    return False


def knows_all_solutions(settings: EnvSettings) -> bool:
    """Return True, the default of ``Expert.knows_solution``, for any settings."""
    del settings
    return True


@dataclass(frozen=True)
class Expert(Generic[S]):
    """Expert of an environment, which makes demonstrations.

    Attributes:
        start: Returns the expert of one episode.
        levels: Thinking levels for which it has thoughts.
        tasks: ``tasks(settings, count)`` returns at most ``count`` tasks to demonstrate, never
            validation tasks. None: training tasks.
        episodes_per_task: Demonstrated episodes per task.
        version: Part of the name of the demonstration file. Raise it if the same settings give
            other episodes.
        key: ``key(settings)`` returns all that changes an episode, as JSON values. It becomes part
            of the name of the demonstration file. None: version and all settings.
        words: Words, each with a leading space, that tasks may contain and demonstrations may not.
        symbols: Texts with punctuation or spaces that a new tokenizer encodes as one token.
        keeps_unsuccessful: Write episodes without success too. For experts that err on purpose.
        names_needed_level: True if decisions name their ``needed_level`` with these settings.
        knows_solution: True if the expert solves the tasks of these settings.
    """

    start: Callable[[EpisodeStart[S]], ExpertPolicy]
    levels: tuple[int, ...] = (1, 2, 3, 4)
    tasks: Callable[[S, int], list[Task]] | None = None
    episodes_per_task: int = 1
    version: int = 1
    key: Callable[[S], list[Any]] | None = None
    words: Callable[[], Sequence[str]] = tuple
    symbols: Callable[[S], Sequence[str]] = no_symbols
    keeps_unsuccessful: bool = False
    names_needed_level: Callable[[S], bool] = names_no_level
    knows_solution: Callable[[S], bool] = knows_all_solutions
