"""List, construction and text description of Gymnasium environments."""

import contextlib
import os
import re
import warnings
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from typing import Any

from agent_system.environments.env_package.gymnasium.settings import GymnasiumSettings
from agent_system.environments.env_package.gymnasium.text_descriptions import (
    TOY_DESCRIPTIONS,
    TextDescription,
    make_grid_description,
)
from agent_system.reward_manager.custom import load_function
from verl.config.settings.errors import UserError
from verl.config.settings.hints import did_you_mean

NAME = "gymnasium"
GRID_PREFIXES = ("MiniGrid-", "BabyAI-")
# Environments that are not listed: they need imageio and networkx, and take seconds to build.
EXCLUDED_PREFIXES = ("MiniGrid-WFC-",)
MAX_VECTOR_SIZE = 32  # maximum size of a vector observation that is shown as numbers
_VERSIONED_ID_PATTERN = re.compile(r"^(.*)-v(\d+)$")


class NoTextDescriptionError(UserError):
    """Error: the environment cannot be described as text with these settings."""


def list_env_ids() -> list[str]:
    """Return the newest ids of toy text, classic control, MiniGrid and BabyAI environments.

    Raises ``ModuleNotFoundError`` if minigrid is not installed.
    """
    import gymnasium

    _register_grid_envs()
    newest_version_by_name: dict[str, int] = {}
    for env_id in gymnasium.registry:
        match = _VERSIONED_ID_PATTERN.match(env_id)
        if match and env_id.startswith(GRID_PREFIXES) and not env_id.startswith(EXCLUDED_PREFIXES):
            base_name, version = match.groups()
            newest_version_by_name[base_name] = max(
                newest_version_by_name.get(base_name, 0), int(version)
            )
    return [
        *sorted(TOY_DESCRIPTIONS),
        *sorted(f"{base_name}-v{version}" for base_name, version in newest_version_by_name.items()),
    ]


def make_gym_env(settings: GymnasiumSettings) -> Any:
    """Build the Gymnasium environment of ``settings.env_id``.

    Raises ``NoTextDescriptionError`` if Gymnasium cannot build it, or if its actions are not
    discrete.
    """
    import gymnasium

    env_id = settings.env_id
    if env_id.startswith(GRID_PREFIXES):
        _register_grid_envs()
    try:
        with warnings.catch_warnings():
            # Gymnasium would warn each time that a newer version of the environment exists.
            warnings.simplefilter("ignore", DeprecationWarning)
            gym_env = gymnasium.make(env_id, disable_env_checker=True, **settings.options)
    except (gymnasium.error.Error, ImportError, TypeError, ValueError) as error:
        raise NoTextDescriptionError(
            f"env.{NAME}.env_id={env_id!r}: {error}{did_you_mean(env_id, gymnasium.registry)}; "
            f"allowed: names and options that gymnasium.make accepts; "
            f"fix: env.{NAME}.env_id=Taxi-v4",
            "unknown_name" if isinstance(error, gymnasium.error.UnregisteredEnv) else "failed_call",
        ) from error
    if not isinstance(gym_env.action_space, gymnasium.spaces.Discrete):
        raise NoTextDescriptionError(
            f"env.{NAME}.env_id={env_id!r}: its actions are {gym_env.action_space}; "
            f"allowed: discrete actions; fix: env.{NAME}.env_id=Taxi-v4, "
            "or use a wrapper that makes them discrete",
            "out_of_range",
        )
    return gym_env


def make_text_description(settings: GymnasiumSettings) -> TextDescription:
    """Return the functions and texts that describe the environment of ``settings`` as text.

    User-provided functions, action names and rules replace those of this package. Raises
    ``NoTextDescriptionError`` if the numbers of actions and names differ, or if no function
    describes its observations.
    """
    gym_env = make_gym_env(settings)
    action_count, first_action_number = int(gym_env.action_space.n), int(gym_env.action_space.start)
    observation_space = gym_env.observation_space
    gym_env.close()
    if settings.env_id.startswith(GRID_PREFIXES):
        packaged_description = make_grid_description(action_count)
    else:
        packaged_description = TOY_DESCRIPTIONS.get(settings.env_id)
    action_names = settings.actions or (
        packaged_description.actions
        if packaged_description
        else list(map(str, range(action_count)))
    )
    if len(action_names) != action_count or first_action_number != 0:
        raise NoTextDescriptionError(
            f"env.{NAME}.actions={list(action_names)!r}: {settings.env_id} has "
            f"{action_count} actions, counted from "
            f"{first_action_number}; allowed: {action_count} names, counted from 0; "
            f"fix: env.{NAME}.actions=[{','.join(f'a{n}' for n in range(action_count))}]",
            "out_of_range",
        )
    base_description = packaged_description or TextDescription(
        _format_numbers, action_names, f"You act in the environment {settings.env_id}."
    )
    describe_function = base_description.describe
    if settings.describe.path is not None:
        function_name = settings.describe.name or "describe"
        describe_function = load_function(
            settings.describe.path, function_name, f"env.{NAME}.describe"
        )
    if describe_function is _format_numbers and not _can_be_formatted(observation_space):
        raise NoTextDescriptionError(
            f"env.{NAME}.env_id={settings.env_id!r}: its observations are "
            f"{observation_space}; allowed: at most {MAX_VECTOR_SIZE} numbers, "
            f"or a function that describes them; "
            f"fix: env.{NAME}.describe.path=FILE",
            "out_of_range",
        )
    return replace(
        base_description,
        describe=describe_function,
        actions=action_names,
        rules=base_description.rules if settings.rules is None else settings.rules,
        success_condition=settings.won_by or base_description.success_condition,
    )


def _format_numbers(observation: Any, *_info_and_env: object) -> str:
    """Return the numbers in an observation as text: the default of ``describe``."""
    if isinstance(observation, Mapping):
        return "; ".join(f"{key}: {_format_numbers(item)}" for key, item in observation.items())
    if isinstance(observation, tuple | list):
        return "; ".join(map(_format_numbers, observation))
    if getattr(observation, "ndim", 0):
        return " ".join(f"{float(number):.4g}" for number in observation)
    return str(observation)


def _can_be_formatted(observation_space: object) -> bool:
    """Return True if observations are texts, numbers or vectors of limited size."""
    from gymnasium import spaces

    if isinstance(observation_space, spaces.Dict):
        return all(map(_can_be_formatted, observation_space.values()))
    if isinstance(observation_space, spaces.Tuple):
        return all(map(_can_be_formatted, observation_space))
    if isinstance(observation_space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        return (
            len(observation_space.shape or ()) <= 1
            and sum(observation_space.shape or ()) <= MAX_VECTOR_SIZE
        )
    return isinstance(observation_space, spaces.Discrete | spaces.Text)


@cache
def _register_grid_envs() -> None:
    # Suppress the message that pygame prints on import.
    os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")
    with warnings.catch_warnings(), contextlib.redirect_stdout(None):
        warnings.simplefilter("ignore")
        import minigrid  # noqa: F401  (registers its environments)
