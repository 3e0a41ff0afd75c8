"""Dictionaries of advantage estimators and policy losses, filled by decorators.

An estimator declares what it reads: ``inputs`` maps its keyword arguments to keys of a batch
(``batch`` or ``non_tensor_batch``; a trailing ``?`` marks an optional one) and ``params`` maps
keyword arguments to dotted configuration paths. The trainer needs to know nothing else about it.
"""

import difflib
import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from verl.names import AdvantageEstimator as AdvantageEstimator

ADV_ESTIMATORS: dict[str, Callable] = {}
POLICY_LOSSES: dict[str, Callable] = {}
ADVANTAGES_ONLY: set[str] = set()  # policy losses without a gradient where advantages are zero

# Where the conventional argument names of estimators are found in a batch.
CONVENTIONAL_INPUTS = {
    "token_level_rewards": "token_level_rewards",
    "response_mask": "response_mask",
    "values": "values",
    "reward_baselines": "reward_baselines",
    "index": "uid",
    "traj_index": "traj_uid",
    "step_ids": "step_ids",
    "step_rewards": "step_rewards",
    "step_index": "step_index",
    "anchor_obs": "anchor_obs",
}


def register_adv_est(
    name: str,
    inputs: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    metrics: Callable[..., dict[str, float]] | None = None,
) -> Callable[[Callable], Callable]:
    """Register an estimator ``f(**inputs, **params) -> (advantages [B, R], returns [B, R])`` under
    ``name``.

    Without ``inputs``, arguments with conventional names are looked up in ``CONVENTIONAL_INPUTS``,
    optional where they have a default. ``metrics(advantages, returns, **inputs)``, if given,
    returns numbers to log; it is not handed the ``params``. An optional input that the batch lacks
    is left out of both calls. Raises ``ValueError`` for a name that another function holds or for
    an argument that nothing fills.
    """

    def decorate(function: Callable) -> Callable:
        reads = dict(inputs) if inputs is not None else _conventional_inputs(function)
        _require_filled(name, function, {*reads, *(params or {})})
        entry = _Estimator(function, reads, dict(params or {}), metrics)
        _store(ADV_ESTIMATORS, str(name), entry, "advantage estimator")
        return function

    return decorate


class _Estimator:
    """A registered estimator: calls its function and carries ``inputs``, ``params`` and
    ``metrics``.

    One function may be registered under two names with different parameters, so these are not its
    attributes.
    """

    def __init__(
        self,
        function: Callable,
        inputs: dict[str, str],
        params: dict[str, str],
        metrics: Callable | None,
    ):
        self.function, self.inputs, self.params, self.metrics = function, inputs, params, metrics
        self.__name__, self.__doc__ = function.__name__, function.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


def get_adv_estimator_fn(name: str) -> Callable:
    """The estimator called ``name``, with attributes ``inputs``, ``params`` and ``metrics``.

    Raises ``ValueError`` that lists the right names and the nearest one.
    """
    return _look_up(ADV_ESTIMATORS, str(name), "advantage estimator", "algorithm.adv_estimator")


def missing_inputs(estimator: Callable, available: Collection[str]) -> list[str]:
    """The required batch keys of ``estimator`` that are not in ``available``."""
    return sorted(
        key for key in estimator.inputs.values() if not key.endswith("?") and key not in available
    )


def register_policy_loss(
    name: str, advantages_only: bool = False
) -> Callable[[Callable], Callable]:
    """Register a policy loss with the signature of ``compute_policy_loss_vanilla`` under ``name``.

    ``advantages_only`` promises that a row whose advantages are all zero has no gradient: such rows
    are passed over.
    """

    def decorate(function: Callable) -> Callable:
        _store(POLICY_LOSSES, str(name), function, "policy loss")
        if advantages_only:
            ADVANTAGES_ONLY.add(str(name))
        return function

    return decorate


def get_policy_loss_fn(name: str) -> Callable:
    """The policy loss called ``name``; ``ValueError`` lists the right names and the nearest one."""
    return _look_up(
        POLICY_LOSSES, str(name), "policy loss", "actor_rollout_ref.actor.policy_loss.loss_mode"
    )


def choose(value: str, allowed: Collection[str], what: str) -> str:
    """``value`` if allowed; else ``ValueError`` naming ``what``, the allowed values and the nearest
    one.
    """
    if value in allowed:
        return value
    nearest = difflib.get_close_matches(str(value), list(allowed), n=1)
    hint = f"; did you mean {nearest[0]!r}?" if nearest else ""
    raise ValueError(f"unknown {what} {value!r}: allowed are {', '.join(sorted(allowed))}{hint}")


def _look_up(table: Mapping[str, Any], name: str, what: str, key: str) -> Any:
    return table[choose(name, table, f"{what} ({key})")]


def _store(table: dict[str, Any], name: str, entry: Any, what: str) -> None:
    known = table.get(name)
    if known is not None and _identity(known) != _identity(entry):
        raise ValueError(f"{what} {name!r} is already registered by {'.'.join(_identity(known))}")
    table[name] = entry


def _identity(entry: Any) -> tuple[str, str]:
    function = getattr(entry, "function", entry)
    return function.__module__, function.__qualname__


def _conventional_inputs(function: Callable) -> dict[str, str]:
    return {
        name: CONVENTIONAL_INPUTS[name] + ("" if parameter.default is parameter.empty else "?")
        for name, parameter in inspect.signature(function).parameters.items()
        if name in CONVENTIONAL_INPUTS
    }


def _require_filled(name: str, function: Callable, filled: set[str]) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unfilled = [p.name for p in named if p.default is p.empty and p.name not in filled]
    if unfilled:
        raise ValueError(
            f"estimator {name!r}: declare where {', '.join(unfilled)} come from (inputs= or params=)"
        )
    surplus = filled - {p.name for p in named}
    if surplus and len(named) == len(parameters):
        raise ValueError(f"estimator {name!r} takes no argument {', '.join(sorted(surplus))}")
