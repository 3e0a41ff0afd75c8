"""Protocol of experts: scripted policies whose episodes are demonstrations for imitation."""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agent_system.environments.env import Observation, Task
from agent_system.environments.settings import EnvSettings

S = TypeVar("S", bound=EnvSettings)


@dataclass(frozen=True, slots=True)
class Noise:
    """Probabilities that noise replaces an expert's action; their sum is less than 1.

    ``useless_share``: a valid action that does not advance the task. ``invalid_share``: an action
    that the environment rejects, from which the policy learns how to continue.
    """

    useless_share: float = 0.0
    invalid_share: float = 0.0


@dataclass(frozen=True, slots=True)
class Thought:
    """Thought that an expert wrote for one turn, and the action that follows from it."""

    text: str
    action: str


@dataclass(frozen=True, slots=True)
class Decision:
    """Action of an expert in one turn, and the texts from which the turn's thought is composed.

    A thought is composed of ``situation`` (facts), ``tried`` (previous action and its result) and
    ``plan`` (next actions), without final full stops. ``thoughts`` maps a thinking level to a
    complete ``Thought``, which replaces the composed thought and ``action`` for that level.
    """

    action: str
    situation: str = ""  # facts that matter for the action
    tried: str = ""  # the previous action and its result
    plan: str = ""  # the next actions; the first one is ``action``
    is_useless: bool = False  # valid, but does not advance the task
    is_invalid: bool = False  # rejected by the environment
    thoughts: Mapping[int, Thought] = field(default_factory=dict)
    # Lowest thinking level whose thought states all facts that the action needs. None: unknown.
    needed_level: int | None = None
    # All actions that the expert accepts as correct in this state. Empty: ``action`` only.
    right_actions: tuple[str, ...] = ()

    def is_right(self, action: str) -> bool:
        return action in (self.right_actions or (self.action,))


class ExpertPolicy(Protocol):
    """Expert in one episode: it returns actions and receives observations."""

    def act(self) -> Decision: ...

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


@dataclass(frozen=True)
class Expert(Generic[S]):
    """Expert of an environment, which makes demonstrations.

    Attributes:
        start: ``start(episode)`` returns the ``ExpertPolicy`` of one episode.
        levels: Thinking levels for which it can write a thought.
        tasks: ``tasks(settings, count)`` returns at most ``count`` tasks to demonstrate, never
            validation tasks. None: training tasks.
        episodes_per_task: Demonstrated episodes per task.
        version: Part of the name of the demonstration file. Increase it when the expert's code
            changes its episodes for equal settings.
        key: ``key(settings)`` returns all values that change an episode, as JSON values. Their hash
            is part of the name of the demonstration file. None: version and all settings.
        words: Words that occur in tasks but perhaps in no demonstration, each with a leading space.
            A new tokenizer encodes each as one token.
        symbols: Texts with punctuation or spaces that a new tokenizer encodes as one token each.
        keeps_unsuccessful: True if failed episodes are demonstrated too, for experts that make
            mistakes on purpose.
        names_needed_level: ``names_needed_level(settings)`` is True if decisions set
            ``needed_level``, the lowest thinking level that suffices in the state.
        knows_solution: ``knows_solution(settings)`` is True if the expert solves every task.
    """

    start: Callable[[EpisodeStart[S]], ExpertPolicy]
    levels: tuple[int, ...] = (1, 2, 3, 4)
    tasks: Callable[[S, int], list[Task]] | None = None
    episodes_per_task: int = 1
    version: int = 1
    key: Callable[[S], list[Any]] | None = None
    words: Callable[[], Sequence[str]] = tuple
    symbols: Callable[[S], Sequence[str]] = lambda _settings: ()
    keeps_unsuccessful: bool = False
    names_needed_level: Callable[[S], bool] = lambda _settings: False
    knows_solution: Callable[[S], bool] = lambda _settings: True
