"""Protocols of an environment (text action in, observation out) and of its prompts.

An environment knows neither tokens nor policies. It is synchronous or asynchronous. Prompts are the
messages that show observations to the policy.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, runtime_checkable

from verl.utils.limits import TimeLimitError

# Contains JSON values. "task_id" (str, unique over splits) and "data_source" (str) are required.
Task = dict[str, Any]


# Key of ``Observation.info``: results of tool calls in order, each with ``name`` and ``content``.
TOOL_RESULTS = "tool_results"


@dataclass(slots=True)
class Observation:
    """Observation of the agent after ``reset`` or ``step``.

    Attributes:
        text: Text of the observation.
        image: Image of the observation, or None.
        anchor: Canonical text of the state for step-level grouping (GiGPO). None: ``text``.
        info: May contain ``won``, ``is_action_valid``, ``admissible_actions``, ``situation``,
            ``needed_level`` and ``tool_results``. ``situation`` and ``needed_level`` are for
            metrics; prompts do not show them.
        opening: Messages before the first observation, instead of the system message of the
            prompts. Example: the system message of the task, or earlier turns of a dialogue.
    """

    text: str
    image: Any = None
    anchor: str | None = None
    info: dict[str, Any] = field(default_factory=dict)
    opening: list[dict[str, str]] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Text that identifies the state: ``anchor`` if it is set, else ``text``."""
        return self.text if self.anchor is None else self.anchor

    @property
    def situation(self) -> str:
        """Category of the state, by which metrics of thinking levels are grouped.

        It is ``info["situation"]``, else ``state``.
        """
        situation = self.info.get("situation")
        return self.state if situation is None else situation

    @property
    def needed_level(self) -> int | None:
        """Lowest thinking level whose thought can state all facts that the right action needs.

        None if the environment does not report it.
        """
        return self.info.get("needed_level")


Step = tuple[Observation, float, bool, dict[str, Any]]  # observation, reward, done, info


class Env(Protocol):
    """One environment. An instance runs many episodes, one after another, through ``reset``.

    A complete environment::

        class GuessNumber:
            placement = "inline"

            def reset(self, task, seed):
                self.number, self.turns = task["number"], 0
                return Observation("Guess a number from 1 to 9.")

            def step(self, action):
                self.turns += 1
                success = action == str(self.number)
                hint = "larger" if action < str(self.number) else "smaller"
                done = success or self.turns == 5
                info = {"won": success, "is_action_valid": action.isdigit()}
                return Observation(f"It is {hint}."), float(success), done, info

            def close(self):
                pass

    ``placement`` names the process or thread in which the environment runs:

    - ``inline``: in the process and thread of the caller, for cheap environments.
    - ``thread``: in a thread of the caller's process.
    - ``locked``: in one thread that all its instances share, one call at a time.
    - ``process``: in a worker process of the pool.

    ``reset`` and ``step`` may be coroutines. An environment in a thread may have ``interrupt()``.
    Another thread calls it to end a call that exceeds its deadline.
    """

    placement: str

    def reset(self, task: Task, seed: int) -> Observation:
        """Start the episode. ``task`` and ``seed`` determine it completely."""
        ...

    def step(self, action: str) -> Step:
        """Apply one action, as ``EnvPackage.project`` extracted it from the model text.

        Return observation, reward, done and info (``won``, ``is_action_valid``). In the last step,
        ``info`` may contain ``answer``, the string that ``maj@k`` compares, and ``reward_parts``, a
        dict of named rewards.
        """
        ...

    def close(self) -> None:
        """Free the resources of the environment. By default there are none, and nothing is done."""


FailureKind = Literal["dead", "timeout", "error", "garbage"]


class EnvFailure(Exception):
    """Failed call of an environment. Its trajectory is aborted, and the run continues.

    ``kind`` is one of:

    - ``dead``: the worker process died, or was killed because another environment in it hung.
    - ``timeout``: the call exceeded its deadline, or a time limit in it, such as that of a grader.
    - ``error``: the environment raised.
    - ``garbage``: the return value violates the protocol.
    """

    def __init__(self, kind: FailureKind, detail: str) -> None:
        super().__init__(kind, detail)
        self.kind = kind
        self.detail = detail

    def __str__(self) -> str:
        return f"environment {self.kind}: {self.detail}"


def get_failure_kind(error: BaseException) -> FailureKind:
    """Return the kind of failure of a call of an environment that raised ``error``."""
    return "timeout" if isinstance(error, TimeLimitError) else "error"


class WorkerStartError(RuntimeError):
    """Environment worker that could not be started. This error ends the run.

    ``missing_module`` is the Python module whose absence is the cause, or None.
    """

    def __init__(self, detail: str, missing_module: str | None = None) -> None:
        super().__init__(detail)
        self.missing_module = missing_module


# ---- prompts -------------------------------------------------------------------------------------

PastTurns = Sequence[tuple[str, str]]  # observation text and action of each turn, oldest first


class Prompts(Protocol):
    """Messages that an environment shows to the policy.

    With the argument ``levels`` they ask for the four thinking levels of RLVCR. Prompts set
    ``shows_level_prompts = True`` if they show ``settings.level_prompts``.
    """

    # False: the prompts cannot ask for thinking levels, so RLVCR refuses the environment.
    asks_for_levels: bool

    def system(self, levels: bool) -> str | None:
        """Return the system message, or None."""
        ...

    def first(self, observation: Observation, levels: bool) -> str:
        """Return the first user message of an episode with ``env.history=append`` or ``chat``."""
        ...

    def turn(self, observation: Observation) -> str:
        """Return the user message of a later turn with ``env.history=append`` or ``chat``."""
        ...

    def window(
        self, first: Observation, history: PastTurns, observation: Observation, levels: bool
    ) -> str:
        """Return the only user message of a turn with ``env.history=window``.

        ``first`` is the first observation of the episode. ``history`` contains the (observation,
        action) texts of the last turns.
        """
        ...


@runtime_checkable
class TemplateToolPrompts(Prompts, Protocol):
    """Prompts whose system message describes tools, which a chat template can render instead."""

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI's JSON schemas."""
        ...

    def build_system_without_tools(self) -> str:
        """Return the system message for a prompt in which the template renders the tools."""
        ...

    def format_call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call in the format that the environment reads."""
        ...


def shows_level_prompts(prompts: Prompts) -> bool:
    """Return True if ``prompts`` show the user's descriptions of the thinking levels."""
    return bool(getattr(prompts, "shows_level_prompts", False))


def select_prompts(prompts: Prompts, first_observation: Observation) -> Prompts:
    """Return ``prompts``, or in a mixture those of the environment of ``first_observation``."""
    select_method = getattr(prompts, "select_part_prompts", None)
    return prompts if select_method is None else select_method(first_observation)
