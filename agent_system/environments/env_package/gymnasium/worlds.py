"""Environments of Gymnasium by name: list, construction and text description."""

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from functools import cache
from typing import Any

from agent_system.environments.env_package.gymnasium.settings import GymnasiumSettings
from agent_system.environments.env_package.gymnasium.text_descriptions import (
    TOY_DESCRIPTIONS,
    DescribeFunction,
    TextDescription,
    grid_description,
)
from agent_system.reward_manager.custom import load_function
from verl.config.settings.hints import did_you_mean

NAME = "gymnasium"
GRIDS = ("MiniGrid-", "BabyAI-")
# Not listed: they need imageio and networkx, and one world takes seconds to build.
EXCLUDED_PREFIXES = ("MiniGrid-WFC-",)
MAX_NUMBERS = 32  # maximum size of a vector observation that is shown as numbers
_VERSION = re.compile(r"^(.*)-v(\d+)$")


class NoTextVersion(ValueError):
    """Error: the environment cannot be described as text with these settings. The message states
    the reason.
    """


def known_ids() -> list[str]:
    """Return the environments that this package describes, each in its newest version.

    These are toy text, classic control, MiniGrid and BabyAI. Raises ``ModuleNotFoundError`` if
    minigrid is not installed.
    """
    import gymnasium

    _register_grids()
    newest: dict[str, int] = {}
    for name in gymnasium.registry:
        match = _VERSION.match(name)
        if match and name.startswith(GRIDS) and not name.startswith(EXCLUDED_PREFIXES):
            stem, version = match.groups()
            newest[stem] = max(newest.get(stem, 0), int(version))
    return [
        *sorted(TOY_DESCRIPTIONS),
        *sorted(f"{stem}-v{version}" for stem, version in newest.items()),
    ]


def make_world(settings: GymnasiumSettings) -> Any:
    """Build the environment that ``settings`` name.

    Raises ``NoTextVersion`` if Gymnasium cannot build it, or if its actions are not discrete.
    """
    import gymnasium

    name = settings.env_id
    if name.startswith(GRIDS):
        _register_grids()
    try:
        with warnings.catch_warnings():
            # Gymnasium would warn each time that a newer version of the environment exists.
            warnings.simplefilter("ignore", DeprecationWarning)
            world = gymnasium.make(name, disable_env_checker=True, **settings.options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise NoTextVersion(
            f"env.{NAME}.env_id={name!r}: {error}{did_you_mean(name, gymnasium.registry)}; "
            f"allowed: names and options that gymnasium.make accepts; "
            f"fix: env.{NAME}.env_id=Taxi-v4"
        ) from error
    if not isinstance(world.action_space, gymnasium.spaces.Discrete):
        raise NoTextVersion(
            f"env.{NAME}.env_id={name!r}: its actions are {world.action_space}; allowed: discrete "
            f"actions; fix: env.{NAME}.env_id=Taxi-v4, or use a wrapper that makes them discrete"
        )
    return world


def make_description(settings: GymnasiumSettings) -> TextDescription:
    """Return the text description of the environment: user-provided parts, else the package's.

    Raises the errors of ``make_world`` and ``load_function``. Raises ``NoTextVersion`` if the
    numbers of actions and names differ, or if nothing describes its observations.
    """
    # Build the environment to read its spaces, which the settings do not contain.
    world = make_world(settings)
    actions, first_action = int(world.action_space.n), int(world.action_space.start)
    space = world.observation_space
    world.close()
    if settings.env_id.startswith(GRIDS):
        known_description = grid_description(actions)
    else:
        known_description = TOY_DESCRIPTIONS.get(settings.env_id)
    names = settings.actions or (
        known_description.actions if known_description else list(map(str, range(actions)))
    )
    if len(names) != actions or first_action != 0:
        raise NoTextVersion(
            f"env.{NAME}.actions={list(names)!r}: {settings.env_id} has {actions} actions, counted "
            f"from {first_action}; allowed: {actions} names, counted from 0; "
            f"fix: env.{NAME}.actions=[{','.join(f'a{n}' for n in range(actions))}]"
        )
    base = known_description or TextDescription(
        _describe_as_numbers, names, f"You act in the environment {settings.env_id}."
    )
    describe: DescribeFunction = base.describe
    if settings.describe.path is not None:
        name = settings.describe.name or "describe"
        describe = load_function(settings.describe.path, name, f"env.{NAME}.describe")
    if describe is _describe_as_numbers and not _is_describable(space):
        raise NoTextVersion(
            f"env.{NAME}.env_id={settings.env_id!r}: its observations are {space}; allowed: "
            f"at most {MAX_NUMBERS} numbers, or a function that describes them; "
            f"fix: env.{NAME}.describe.path=FILE"
        )
    rules = base.rules if settings.rules is None else settings.rules
    return TextDescription(
        describe, names, rules, settings.won_by or base.success_condition, base.state
    )


def _describe_as_numbers(observation: Any, info: Mapping[str, Any], world: Any) -> str:
    del info, world  # only the observation is shown
    return _format_numbers(observation)


def _format_numbers(value: Any) -> str:
    if isinstance(value, Mapping):
        return "; ".join(f"{key}: {_format_numbers(part)}" for key, part in value.items())
    if isinstance(value, tuple | list):
        return "; ".join(map(_format_numbers, value))
    if getattr(value, "ndim", 0):
        return " ".join(f"{float(number):.4g}" for number in value)
    return str(value)


def _is_describable(space: Any) -> bool:
    """Return True if observations are text or at most ``MAX_NUMBERS`` numbers per vector."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return all(map(_is_describable, space.values()))
    if isinstance(space, spaces.Tuple):
        return all(map(_is_describable, space))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return len(space.shape or ()) <= 1 and sum(space.shape or ()) <= MAX_NUMBERS
    return isinstance(space, spaces.Discrete | spaces.Text)


@cache
def _register_grids() -> None:
    """Register MiniGrid's environments in Gymnasium. Raises ``ModuleNotFoundError``."""
    # pygame, which renders them, prints a message on import.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        import minigrid  # noqa: F401  (registers its environments)
