"""The reward manager that a configuration asks for, with the function and weights it names."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import agent_system.reward_manager.managers  # noqa: F401  (registers those that ship)
from agent_system.reward_manager.custom import check_arguments, load_function
from agent_system.reward_manager.managers import ScoreFunction
from agent_system.reward_manager.registry import RewardManager, reward_manager_class
from agent_system.reward_manager.scores import finite, weighed
from verl.config.schema import PPOConfig
from verl.utils.limits import time_limit

SCORE_ARGUMENTS = ("data_source", "steps", "extra_info")


def load_reward_manager(config: PPOConfig) -> RewardManager:
    """The reward manager that ``config`` (the whole typed configuration) asks for.

    Raises ``ValueError`` for an unknown manager or arguments that it does not take, and what
    ``load_function`` raises for a custom function.
    """
    manager = reward_manager_class(config.reward_model.reward_manager)
    actor = config.actor_rollout_ref.actor
    penalty = actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0
    function = trajectory_function(config)
    kwargs = config.reward_model.reward_kwargs
    try:
        # Bound without being called: a ``TypeError`` from inside the manager is no wrong setting.
        inspect.signature(manager).bind(penalty, function, **kwargs)
    except TypeError as error:
        allowed = ", ".join(list(inspect.signature(manager).parameters)[2:]) or "none"
        name = getattr(manager, "__name__", repr(manager))
        raise ValueError(
            f"reward_model.reward_kwargs={kwargs!r}: {error}; allowed: {allowed} (what "
            f"{name} takes beside the penalty and the function); "
            "fix: leave the others out"
        ) from error
    return manager(penalty, function, **kwargs)


def trajectory_function(config: PPOConfig) -> ScoreFunction | None:
    """The user's function of whole plays, its rewards weighed; None where there is none, and where
    the environment is handed the function, which then grades answers.
    """
    custom = config.custom_reward_function
    settings = config.env.settings
    if not custom.path or (settings and settings.data_keys):
        return None
    function = load_function(custom.path, custom.name)
    kwargs = custom.reward_kwargs
    check_arguments(function, custom.path, (*SCORE_ARGUMENTS, *kwargs))
    function = bounded(function, custom.timeout_s)
    weights = config.reward_model.weights
    if not kwargs and not weights:
        return function

    @functools.wraps(function)
    def called(**arguments: Any) -> Any:
        found = function(**arguments, **kwargs)
        return _joined(found, weights, custom.name) if weights else found

    return called


def bounded(function: ScoreFunction, seconds: float) -> ScoreFunction:
    """``function``, whose calls raise ``TimeLimit`` once they have taken ``seconds``."""
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    def within(**arguments: Any) -> float | Mapping[str, float]:
        task_id = arguments["extra_info"].get("task_id")
        with time_limit(seconds, f"custom_reward_function {name}, task_id {task_id!r},"):
            return function(**arguments)

    return within


def _joined(found: Any, weights: Mapping[str, float], name: str) -> dict[str, float]:
    """The rewards that a function returned, with their weighed sum as ``score``."""
    who = f"custom_reward_function {name}"
    parts = found if isinstance(found, Mapping) else {"score": found}
    numbers = {key: finite(value, f"{who}, {key!r}") for key, value in parts.items()}
    return numbers | {"score": weighed(numbers, weights, who)}
