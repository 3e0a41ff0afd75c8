"""Protocol of prompts: the messages that show observations to the policy."""

from collections.abc import Sequence
from typing import Protocol

from agent_system.environments.env import Observation


class Prompts(Protocol):
    """Messages that an environment shows to the policy.

    With the argument ``levels`` they ask for the four thinking levels of RLVCR. Prompts that use
    ``settings.level_prompts`` set ``shows_level_prompts = True``.
    """

    # False: the prompts cannot ask for levels, and RLVCR refuses the package.
    asks_for_levels: bool

    def system(self, levels: bool) -> str | None:
        """Return the system message, or None."""
        ...

    def first(self, observation: Observation, levels: bool) -> str:
        """Return the first user message of an episode (``append`` history)."""
        ...

    def turn(self, observation: Observation) -> str:
        """Return a later user message (``append`` history)."""
        ...

    def window(
        self,
        first: Observation,
        history: Sequence[tuple[str, str]],
        observation: Observation,
        levels: bool,
    ) -> str:
        """Return the user message of a turn (``window`` history).

        ``history`` contains the (observation, action) texts of the last turns.
        """
        ...


def shows_level_prompts(prompts: Prompts) -> bool:
    """Return True if ``settings.level_prompts`` replaces the descriptions in ``prompts``."""
    return bool(getattr(prompts, "shows_level_prompts", False))


def select_prompts(prompts: Prompts, first: Observation) -> Prompts:
    """Return the prompts of the environment whose episode begins with ``first``.

    Prompts of a mixture have the method ``of(first)``, which selects them.
    """
    select = getattr(prompts, "of", None)
    return prompts if select is None else select(first)
