"""Environments of Gymnasium by name: which there are, how one is made, and how it is told."""

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from agent_system.environments.env_package.gymnasium.grid_view import grid_telling
from agent_system.environments.env_package.gymnasium.settings import GymnasiumSettings
from agent_system.environments.env_package.gymnasium.telling import (
    Describe,
    GymnasiumWorld,
    Telling,
)
from agent_system.environments.env_package.gymnasium.toy_text import TOLD
from agent_system.reward_manager.custom import load_function
from verl.config.settings.hints import did_you_mean

NAME = "gymnasium"
GRIDS = ("MiniGrid-", "BabyAI-")
# They need imageio and networkx, and a world takes seconds to make.
LEFT_OUT = ("MiniGrid-WFC-",)
MOST_NUMBERS = 32  # of an observation that is told as it is
_VERSION = re.compile(r"^(.*)-v(\d+)$")


class NotTold(ValueError):
    """The environment cannot be played in words as the settings stand; the message says why."""


def known_ids() -> list[str]:
    """The environments that the package tells in words of its own: toy text, classic control,
    MiniGrid, BabyAI, each in its newest version.

    Raises ``ModuleNotFoundError`` without minigrid.
    """
    import gymnasium

    _register_grids()
    newest: dict[str, int] = {}
    for name in gymnasium.registry:
        found = _VERSION.match(name)
        if found and name.startswith(GRIDS) and not name.startswith(LEFT_OUT):
            stem, version = found.groups()
            newest[stem] = max(newest.get(stem, 0), int(version))
    return [*sorted(TOLD), *sorted(f"{stem}-v{version}" for stem, version in newest.items())]


def make_world(settings: GymnasiumSettings) -> GymnasiumWorld:
    """The environment that ``settings`` name. Raises ``NotTold`` where Gymnasium does not make it
    or its actions are not discrete, ``ModuleNotFoundError`` where minigrid is not installed.
    """
    import gymnasium

    name = settings.env_id
    if name.startswith(GRIDS):
        _register_grids()
    try:
        with warnings.catch_warnings():
            # It says at each start that an older version is asked for.
            warnings.simplefilter("ignore", DeprecationWarning)
            world = gymnasium.make(name, disable_env_checker=True, **settings.options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise NotTold(
            f"env.{NAME}.env_id={name!r}: {error}{did_you_mean(name, gymnasium.registry)}; "
            f"allowed: what gymnasium.make takes; fix: env.{NAME}.env_id=Taxi-v4"
        ) from error
    if not isinstance(world.action_space, gymnasium.spaces.Discrete):
        raise NotTold(
            f"env.{NAME}.env_id={name!r}: its actions are {world.action_space}; allowed: discrete "
            f"ones; fix: env.{NAME}.env_id=Taxi-v4, or a wrapper that makes them discrete"
        )
    return world


def telling_of(settings: GymnasiumSettings) -> Telling:
    """How the environment is told: by the user's words where there are some, else by the package's.

    Raises what ``make_world`` and ``load_function`` raise, and ``NotTold`` where it has another
    number of actions than names, or observations that nobody puts into words.
    """
    # Made for its spaces; it is cheap to make, and the settings do not say them.
    world = make_world(settings)
    actions, first = int(world.action_space.n), int(world.action_space.start)
    space = world.observation_space
    world.close()
    known = _known(settings.env_id, actions)
    names = settings.actions or (known.actions if known else list(map(str, range(actions))))
    if len(names) != actions or first != 0:
        raise NotTold(
            f"env.{NAME}.actions={list(names)!r}: {settings.env_id} has {actions} actions, counted "
            f"from {first}; allowed: {actions} names, counted from 0; "
            f"fix: env.{NAME}.actions=[{','.join(f'a{n}' for n in range(actions))}]"
        )
    base = known or Telling(_in_numbers, names, f"You act in the environment {settings.env_id}.")
    describe = _own_words(settings) or base.describe
    if describe is _in_numbers and not _tellable(space):
        raise NotTold(
            f"env.{NAME}.env_id={settings.env_id!r}: its observations are {space}; allowed: "
            f"numbers, or a function that puts them into words; fix: env.{NAME}.describe.path=FILE"
        )
    rules = base.rules if settings.rules is None else settings.rules
    return Telling(describe, names, rules, settings.won_by or base.won_by, base.state)


def _known(env_id: str, actions: int) -> Telling | None:
    return grid_telling(actions) if env_id.startswith(GRIDS) else TOLD.get(env_id)


def _own_words(settings: GymnasiumSettings) -> Describe | None:
    own = settings.describe
    if own.path is None:
        return None
    return load_function(own.path, own.name or "describe", f"env.{NAME}.describe")


def _in_numbers(observation: Any, info: Mapping[str, Any], world: GymnasiumWorld) -> str:
    del info, world  # what is observed is told
    return _numbers(observation)


def _numbers(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_numbers(part)}" for key, part in value.items())
    if isinstance(value, tuple | list):
        return "; ".join(map(_numbers, value))
    if getattr(value, "ndim", 0):
        return " ".join(f"{float(number):.4g}" for number in value)
    return str(value)


def _tellable(space: Any) -> bool:
    """Whether a few numbers or words say all of an observation."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return all(map(_tellable, space.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_tellable, space))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return len(space.shape or ()) <= 1 and sum(space.shape or ()) <= MOST_NUMBERS
    return isinstance(space, spaces.Discrete | spaces.Text)


@cache
def _register_grids() -> None:
    """Make MiniGrid's environments known to Gymnasium. Raises ``ModuleNotFoundError``."""
    # pygame, which draws them, greets on the standard output.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        import minigrid  # noqa: F401  (registers its environments)
