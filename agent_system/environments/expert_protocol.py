"""Protocol of experts, which generate demonstrations of an environment."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agent_system.environments.env import Observation, Task
from agent_system.environments.settings import EnvSettings

S = TypeVar("S", bound=EnvSettings)


@dataclass(frozen=True, slots=True)
class Noise:
    """Imperfection of an expert on purpose: shares of its actions, together less than 1.

    ``slack``: actions that are possible but bring the task no further, so that reinforcement
    learning finds something to remove. ``slips``: actions that cannot work, without which an
    imitator never learns how to go on after one.
    """

    slack: float = 0.0
    slips: float = 0.0


@dataclass(frozen=True, slots=True)
class Thought:
    """Thought and the action that follows from it."""

    text: str
    action: str


@dataclass(frozen=True, slots=True)
class Decision:
    """An expert's action and what can be thought about it: each part without a full stop.

    ``thoughts`` has the thoughts of levels that the expert writes itself, in place of those made of
    ``situation``, ``tried`` and ``plan``. They may lead to another action.
    """

    action: str
    situation: str = ""  # what is the case and matters for the action
    tried: str = ""  # what was done before, and what came of it
    plan: str = ""  # the next actions; the first of them is ``action``
    slack: bool = False  # possible, but brings the task no further
    slip: bool = False  # cannot work
    thoughts: Mapping[int, Thought] = field(default_factory=dict)
    needed_level: int | None = None  # the lowest level that suffices; None: not known
    right: tuple[str, ...] = ()  # all actions that are right here; none: ``action`` alone

    def accepts(self, action: str) -> bool:
        """Return True if ``action`` is right."""
        return action in (self.right or (self.action,))


class ExpertPlayer(Protocol):
    """An expert in the middle of one episode."""

    def act(self) -> Decision:
        """The next action."""
        ...

    def observe(self, action: str, observation: Observation) -> None:
        """Take in what ``action`` brought about; not called once the episode is over."""
        ...


@dataclass(frozen=True, slots=True)
class EpisodeStart(Generic[S]):
    """Information that an expert has when an episode begins."""

    settings: S
    task: Task
    first: Observation
    rng: random.Random  # all that is left to chance is drawn from it
    noise: Noise = field(default_factory=Noise)


def no_symbols(settings: EnvSettings) -> Sequence[str]:
    """Return no symbols: a tokenizer needs none."""
    del settings
    return ()


def says_no_level(settings: EnvSettings) -> bool:
    """Return False: decisions name no ``needed_level``."""
    del settings
    return False


def knows_all(settings: EnvSettings) -> bool:
    """Return True: every task has a known solution."""
    del settings
    return True


@dataclass(frozen=True)
class Expert(Generic[S]):
    """Expert of an environment, which generates demonstrations.

    ``tasks(settings, count)`` are what is demonstrated: ``count`` tasks, or fewer where there are
    no more, and never validation tasks. ``key(settings)`` is JSON-able and holds all that changes
    an episode: settings and versions. It becomes part of the name of a file of demonstrations.
    """

    start: Callable[[EpisodeStart[S]], ExpertPlayer]
    # The thinking levels it has thoughts for.
    levels: tuple[int, ...] = (1, 2, 3, 4)
    tasks: Callable[[S, int], list[Task]] | None = None  # None: training tasks
    episodes_per_task: int = 1
    # Raise it when the same settings would give other episodes: it is part of the file's name.
    version: int = 1
    key: Callable[[S], list[Any]] | None = None  # None: version and all settings
    # What tasks can name though no demonstration says it, each word with the space before it.
    words: Callable[[], Sequence[str]] = tuple
    # Texts that a new tokenizer is to know as one token though they hold signs, spaces included.
    symbols: Callable[[S], Sequence[str]] = no_symbols
    # Lost episodes are demonstrated as well: it errs on purpose, as the settings say.
    keeps_lost: bool = False
    # Whether its decisions name their ``needed_level``.
    tells_needed_level: Callable[[S], bool] = says_no_level
    # Whether it knows how the tasks of these settings are solved.
    knows: Callable[[S], bool] = knows_all
