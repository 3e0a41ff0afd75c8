"""Construction of the reward manager of a configuration, with its custom function and weights."""

import functools
import inspect
from collections.abc import Mapping
from typing import Any

from agent_system.reward_manager.custom import check_arguments, load_function
from agent_system.reward_manager.managers import (
    RewardManager,
    ScoreFunction,
    reward_manager_class,
)
from agent_system.reward_manager.scores import read_finite_number, weighted_sum
from verl.config.schema import PPOConfig
from verl.utils.limits import time_limit

SCORE_ARGUMENTS = ("data_source", "steps", "extra_info")


def load_reward_manager(config: PPOConfig) -> RewardManager:
    """Return the reward manager that ``config`` (the whole configuration) names.

    Raises ``ValueError`` for an unknown manager or invalid ``reward_kwargs``, and what
    ``load_function`` raises for a custom function.
    """
    manager = reward_manager_class(config.reward_model.reward_manager)
    actor = config.actor_rollout_ref.actor
    penalty = actor.invalid_action_penalty_coef if actor.use_invalid_action_penalty else 0.0
    function = load_trajectory_function(config)
    kwargs = config.reward_model.reward_kwargs
    try:
        # Bind without calling: a ``TypeError`` inside the manager is not a wrong setting.
        inspect.signature(manager).bind(penalty, function, **kwargs)
    except TypeError as error:
        allowed = ", ".join(list(inspect.signature(manager).parameters)[2:]) or "none"
        name = getattr(manager, "__name__", repr(manager))
        raise ValueError(
            f"reward_model.reward_kwargs={kwargs!r}: {error}; allowed: {allowed} (the keyword "
            f"arguments of {name}); fix: remove the others"
        ) from error
    return manager(penalty, function, **kwargs)


def load_trajectory_function(config: PPOConfig) -> ScoreFunction | None:
    """Return the user-provided function that scores trajectories, or None.

    Its ``score`` is the weighted sum of its rewards if ``reward_model.weights`` is set. None if
    there is no function, or if the environment uses the function to grade answers.
    """
    custom = config.custom_reward_function
    settings = config.env.active_section
    if not custom.path or (settings and settings.data_keys):
        return None
    function = load_function(custom.path, custom.name)
    kwargs = custom.reward_kwargs
    check_arguments(function, custom.path, (*SCORE_ARGUMENTS, *kwargs))
    function = with_time_limit(function, custom.timeout_s)
    weights = config.reward_model.weights
    if not kwargs and not weights:
        return function
    source = f"custom_reward_function {custom.name}"

    @functools.wraps(function)
    def score_with_weights(**arguments: Any) -> Any:
        score = function(**arguments, **kwargs)
        if not weights:
            return score
        rewards = score if isinstance(score, Mapping) else {"score": score}
        numbers = {
            key: read_finite_number(value, f"{source}, {key!r}") for key, value in rewards.items()
        }
        return numbers | {"score": weighted_sum(numbers, weights, source)}

    return score_with_weights


def with_time_limit(function: ScoreFunction, seconds: float) -> ScoreFunction:
    """Return ``function`` with a time limit of ``seconds``. A longer call raises ``TimeLimit``."""
    name = getattr(function, "__name__", repr(function))

    @functools.wraps(function)
    def score_within_limit(**arguments: Any) -> float | Mapping[str, float]:
        task_id = arguments["extra_info"].get("task_id")
        with time_limit(seconds, f"custom_reward_function {name}, task_id {task_id!r},"):
            return function(**arguments)

    return score_within_limit
