"""How an environment of Gymnasium is told in words: one record for each family of environments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_system.environments.env_package.gymnasium.settings import Win


class GymnasiumWorld(Protocol):
    """What is used of Gymnasium's environments."""

    action_space: Any
    observation_space: Any

    @property
    def unwrapped(self) -> Any: ...
    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...
    def step(self, action: int, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...
    def close(self) -> None: ...


# Observation, info and environment -> the text of the observation.
Describe = Callable[[Any, Mapping[str, Any], GymnasiumWorld], str]


def _no_state(world: GymnasiumWorld) -> str:
    del world  # the text of the observation is the state
    return ""


@dataclass(frozen=True)
class Telling:
    """``describe`` says what is seen, ``actions`` are the names of the actions by number, ``rules``
    what the system message says. ``state`` adds to the text what it does not show of the state.
    """

    describe: Describe
    actions: Sequence[str]
    rules: str
    won_by: Win = "reward"
    state: Callable[[GymnasiumWorld], str] = _no_state
