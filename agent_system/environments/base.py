"""The environment protocol: what an environment is, what it returns, and what its package declares.

An environment is synchronous or asynchronous text in, observation out. It knows nothing of tokens
or policies.
"""

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from agent_system.environments.settings import EnvSettings
from verl.config.settings import read_or_raise

S = TypeVar("S", bound=EnvSettings)

# JSON-able; always holds "task_id" (str, unique over splits) and "data_source" (str).
Task = dict[str, Any]


@dataclass(slots=True)
class Observation:
    """What the agent sees after ``reset`` or ``step``.

    ``anchor`` is a canonical text of the state for step-level grouping (GiGPO); ``None`` means
    ``text`` is used. ``info`` may hold ``won``, ``is_action_valid``, ``admissible_actions``,
    ``situation`` and ``needed_level``; the last two are for measuring, and no prompt shows them.
    ``opening`` are messages in front of the first observation, in place of the prompts' system
    message: a task's own system message, an earlier exchange.
    """

    text: str
    image: Any = None
    anchor: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    opening: list[dict[str, str]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """The text that says which state this is: ``anchor``, or ``text`` where there is none."""
        return self.text if self.anchor is None else self.anchor

    @property
    def situation(self) -> str:
        """What kind of state this is, coarse enough to come back often: what thinking levels are
        related to. ``state`` where the environment names no kinds.
        """
        return self.info.get("situation", self.state)

    @property
    def needed_level(self) -> int | None:
        """The lowest thinking level that suffices here; None where the environment cannot tell."""
        return self.info.get("needed_level")


Step = tuple[Observation, float, bool, dict[str, Any]]  # observation, reward, done, info


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
        ...

    def step(self, action: str) -> Step:
        """Play one projected action; return observation, reward, done, info (``won``,
        ``is_action_valid``).
        """
        ...

    def close(self) -> None:
        """Free what the environment holds."""
        ...


class Prompts(Protocol):
    """How an environment speaks to the policy.

    ``levels`` asks for the four thinking levels of RLVCR. Where ``settings.level_prompts`` replaces
    descriptions of theirs, prompts say ``shows_level_prompts = True``.
    """

    # False: the package has no level prompt, and RLVCR refuses it.
    asks_for_levels: bool

    def system(self, levels: bool) -> str | None:
        """The system message, or None where the chat has none."""
        ...

    def first(self, observation: Observation, levels: bool) -> str:
        """The first user message of an episode (``append`` history)."""
        ...

    def turn(self, observation: Observation) -> str:
        """Every later user message (``append`` history)."""
        ...

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
        ...


def shows_level_prompts(prompts: Prompts) -> bool:
    """Whether ``settings.level_prompts`` replaces its descriptions; no where it does not say."""
    return bool(getattr(prompts, "shows_level_prompts", False))


S = TypeVar("S", bound=EnvSettings)


def no_images(settings: EnvSettings) -> tuple[str, Any, Any] | None:
    """The observations are text, whatever the settings say."""
    del settings  # they change nothing here
    return None


def no_variants() -> Sequence[str]:
    """There is one environment of this name."""
    return ()


@dataclass(frozen=True, slots=True)
class Noise:
    """How imperfect an expert is on purpose: shares of its actions, together less than 1.

    ``slack``: actions that are possible but bring the task no further, so that reinforcement
    learning finds something to remove. ``slips``: actions that cannot work, without which an
    imitator never learns how to go on after one.
    """

    slack: float = 0.0
    slips: float = 0.0


@dataclass(frozen=True, slots=True)
class Thought:
    """What is thought before an action, and the action that follows from it."""

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
        """Whether ``action`` is right."""
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
    """What an expert may know when an episode begins."""

    settings: S
    task: Task
    first: Observation
    rng: random.Random  # all that is left to chance is drawn from it
    noise: Noise = field(default_factory=Noise)


def no_symbols(settings: EnvSettings) -> Sequence[str]:
    """Words without signs are all there is to say."""
    del settings  # they change nothing here
    return ()


def says_no_level(settings: EnvSettings) -> bool:
    """Nobody knows how deep to think."""
    del settings  # they change nothing here
    return False


def knows_all(settings: EnvSettings) -> bool:
    """Tell that every task has a known solution."""
    del settings  # they change nothing here
    return True


@dataclass(frozen=True)
class Expert(Generic[S]):
    """Who can play an environment, for demonstrations.

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


def prompts_for(prompts: Prompts, first: Observation) -> Prompts:
    """Those of the environment that the episode beginning with ``first`` is played in: prompts of a
    mixture have ``of(first)``.
    """
    choose = getattr(prompts, "of", None)
    return prompts if choose is None else choose(first)


@dataclass(frozen=True)
class Mixture(Generic[S]):
    """What a package of several environments says besides.

    Every task names its part under ``part``, a key of ``weights(settings)``: of the sum of all
    weights, a part's is its share of what is played. ``package_of(task)`` is the package that the
    task is from, ``stop(settings)`` takes the place of ``EnvPackage.stop``.
    """

    weights: Callable[[S], Mapping[str, int]]
    package_of: Callable[[Task], "EnvPackage[Any]"]
    stop: Callable[[S], tuple[str, ...]]


@dataclass(frozen=True, slots=True)
class TaskText:
    """Of tasks that say themselves what is shown first: ``shows(task)``, and the task that shows
    ``text`` in its place, ``retold(task, text)``.
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
