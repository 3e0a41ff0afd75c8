"""Protocol of prompts: the messages that show observations to the policy."""

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

from agent_system.environments.env import Observation

PastTurns = Sequence[tuple[str, str]]  # observation text and action of each turn, oldest first


class Prompts(Protocol):
    """Messages that an environment shows to the policy.

    With the argument ``levels`` they ask for the four thinking levels of RLVCR. Prompts set
    ``shows_level_prompts = True`` if they show the user's descriptions of these levels
    (``settings.level_prompts``).
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

        ``first`` is the first observation of the episode and ``observation`` the current one.
        ``history`` contains the (observation, action) texts of the last turns.
        """
        ...


@runtime_checkable
class TemplateToolPrompts(Prompts, Protocol):
    """Prompts whose system message describes tools, which a chat template can render instead."""

    def list_tools(self) -> list[dict[str, Any]]:
        """Return the tools as OpenAI's JSON schemas."""
        ...

    def system_without_tools(self) -> str:
        """Return the system message for a prompt in which the template renders the tools."""
        ...

    def format_call(self, name: str, arguments: dict[str, Any]) -> str:
        """Return a call in the format that the environment reads."""
        ...


def shows_level_prompts(prompts: Prompts) -> bool:
    """Return True if ``prompts`` show the user's descriptions of the thinking levels.

    These are the texts in ``settings.level_prompts``.
    """
    return bool(getattr(prompts, "shows_level_prompts", False))


def select_prompts(prompts: Prompts, first: Observation) -> Prompts:
    """Return the prompts for the episode whose first observation is ``first``.

    The result is ``prompts``, except in a mixture of environments. There it is
    ``prompts.select_by_observation(first)``: the prompts of the environment that made ``first``.
    """
    select_method = getattr(prompts, "select_by_observation", None)
    return prompts if select_method is None else select_method(first)
