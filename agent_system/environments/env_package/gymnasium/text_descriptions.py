"""Text description of Gymnasium environments: one record per family of environments."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from agent_system.environments.env_package.gymnasium.settings import SuccessCondition


class GymnasiumWorld(Protocol):
    """Protocol with the members of Gymnasium environments that this package uses."""

    action_space: Any
    observation_space: Any

    @property
    def unwrapped(self) -> Any: ...
    def reset(self, *, seed: int | None = None) -> tuple[Any, dict[str, Any]]: ...
    def step(self, action: int, /) -> tuple[Any, Any, bool, bool, dict[str, Any]]: ...
    def close(self) -> None: ...


# Maps observation, info and environment to the text of the observation.
DescribeFunction = Callable[[Any, Mapping[str, Any], GymnasiumWorld], str]


def _no_state(world: GymnasiumWorld) -> str:
    del world  # the text of the observation is the state
    return ""


@dataclass(frozen=True)
class TextDescription:
    """Text description of one environment.

    ``describe`` returns the text of an observation. ``actions`` are the names of the actions by
    number. ``rules`` is text for the system message. ``state`` returns the part of the state that
    the observation does not show.
    """

    describe: DescribeFunction
    actions: Sequence[str]
    rules: str
    success_condition: SuccessCondition = "reward"
    state: Callable[[GymnasiumWorld], str] = _no_state
