"""Protocol of prompts: the messages that show observations to the policy."""

from collections.abc import Sequence
from typing import Protocol

from agent_system.environments.env import Observation


class Prompts(Protocol):
    """Messages that an environment shows to the policy.

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


def prompts_for(prompts: Prompts, first: Observation) -> Prompts:
    """Prompts of the environment whose episode begins with ``first``: those of a mixture have
    ``of(first)``.
    """
    choose = getattr(prompts, "of", None)
    return prompts if choose is None else choose(first)
