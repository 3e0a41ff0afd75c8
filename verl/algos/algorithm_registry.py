"""Dictionaries of advantage estimators and policy losses, filled by decorators.

The entry of an estimator declares all that the trainer needs. ``inputs`` maps the estimator's
keyword arguments to keys of ``batch`` or ``non_tensor_batch``; a trailing ``?`` marks an optional
key. ``params`` maps its keyword arguments to dotted configuration paths. ``compares_group`` is true
if the estimator compares the trajectories of one task.
"""

import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias, TypeVar

from torch import Tensor

from verl.config.settings.hints import did_you_mean
from verl.names import ESTIMATORS
from verl.names import AdvantageEstimator as AdvantageEstimator

AdvantageFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor]]
PolicyLossFunction: TypeAlias = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor]]
EstimatorMetrics: TypeAlias = Callable[..., dict[str, float]]

AdvantageFunctionT = TypeVar("AdvantageFunctionT", bound=AdvantageFunction)
PolicyLossFunctionT = TypeVar("PolicyLossFunctionT", bound=PolicyLossFunction)
EntryT = TypeVar("EntryT", bound=Callable[..., object])

GROUP_COLUMN = "uid"  # column with the group id of a row
# Argument names of estimators and the batch keys that they are read from by default.
CONVENTIONAL_INPUTS = {
    "token_level_rewards": "token_level_rewards",
    "response_mask": "response_mask",
    "values": "values",
    "reward_baselines": "reward_baselines",
    "index": GROUP_COLUMN,
    "traj_index": "traj_uid",
    "step_ids": "step_ids",
    "step_rewards": "step_rewards",
    "step_index": "step_index",
    "anchor_obs": "anchor_obs",
    "won": "won",
}


class RegisteredEstimator:
    """Callable registry entry: an estimator's function and its declarations (inputs, parameters).

    The declarations are not attributes of the function, because one function may be registered
    under two names with different parameters.
    """

    def __init__(
        self,
        function: AdvantageFunction,
        inputs: Mapping[str, str],
        params: Mapping[str, str],
        metrics: EstimatorMetrics | None,
        compares_group: bool,
    ) -> None:
        self.function = function
        self.compares_group = compares_group
        self.inputs = dict(inputs)
        self.params = dict(params)
        self.metrics = metrics
        self.__name__ = getattr(function, "__name__", type(function).__name__)
        self.__doc__ = function.__doc__

    def __call__(self, *args: object, **kwargs: object) -> tuple[Tensor, Tensor]:
        return self.function(*args, **kwargs)


class TokenSelector(Protocol):
    """Rule that selects the tokens that a policy loss treats differently (as in Clip-Cov).

    It is computed from a whole mini-batch and applied to its micro-batches.
    """

    def select_tokens(
        self, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor
    ) -> Tensor:
        """Return the mask ``[B, R]`` of the selected tokens. All arguments are ``[B, R]``."""
        ...


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """Arguments of a policy loss in addition to those of ``compute_policy_loss_vanilla``.

    ``params`` maps arguments of the loss to dotted config paths below ``actor_rollout_ref.actor``.

    A loss with a ``picker`` treats some tokens differently, and gets their mask ``selected [B,
    R]``. For each mini-batch, ``picker(old_log_prob, advantages, **token_selector_params)`` is
    called with all sampled tokens ``[N]``. It returns the ``TokenSelector`` that computes the mask
    of every micro-batch. ``token_selector_params`` maps arguments of ``picker`` to config paths.
    """

    params: Mapping[str, str] = field(default_factory=dict)
    picker: Callable[..., TokenSelector] | None = None
    token_selector_params: Mapping[str, str] = field(default_factory=dict)


ADV_ESTIMATORS: dict[str, RegisteredEstimator] = {}
POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
ADVANTAGES_ONLY: set[str] = set()  # policy losses whose gradient is 0 where advantages are 0
TAKES_WEIGHTS: set[str] = set()  # policy losses with an argument ``weights`` [B, R]
LOSS_NEEDS: dict[str, LossNeeds] = {}  # additional arguments of policy losses


def as_name(name: object) -> str:
    """Return the value of an enum member as text, or the text of any other object."""
    return str(name.value) if isinstance(name, Enum) else str(name)


def register_adv_est(
    name: str | Enum,
    inputs: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    metrics: EstimatorMetrics | None = None,
    compares_group: bool | None = None,
) -> Callable[[AdvantageFunctionT], AdvantageFunctionT]:
    """Register an estimator ``f(**inputs, **params) -> (advantages [B, R], returns [B, R])``.

    ``name`` is a string or an enum member with a string value. Without ``inputs``,
    ``CONVENTIONAL_INPUTS`` gives the batch key of each argument that it lists. Arguments with a
    default are then optional. ``metrics(advantages, returns, **inputs)`` returns numbers to log.
    ``f`` and ``metrics`` are called without the optional inputs that the batch lacks.

    ``compares_group`` declares that the estimator needs several trajectories of each task, so
    ``env.rollout.n=1`` is an error. None means that it compares groups if it reads ``uid``. Raises
    ``ValueError`` for the name of another function, and for a required argument that is neither in
    ``inputs`` nor in ``params``.
    """
    config_paths = dict(params or {})

    def register_estimator(function: AdvantageFunctionT) -> AdvantageFunctionT:
        estimator_inputs = (
            dict(inputs) if inputs is not None else _infer_inputs_from_arguments(function)
        )
        _check_estimator_arguments(as_name(name), function, {*estimator_inputs, *config_paths})
        reads_group = any(key.rstrip("?") == GROUP_COLUMN for key in estimator_inputs.values())
        compares_trajectories = reads_group if compares_group is None else compares_group
        entry = RegisteredEstimator(
            function, estimator_inputs, config_paths, metrics, compares_trajectories
        )
        _add_entry(ADV_ESTIMATORS, as_name(name), entry, "advantage estimator")
        ESTIMATORS[as_name(name)] = compares_trajectories
        return function

    return register_estimator


def get_adv_estimator_fn(name: str | Enum) -> RegisteredEstimator:
    """Return the estimator registered as ``name``. Raises ``ValueError`` for an unknown one."""
    return _look_up(ADV_ESTIMATORS, as_name(name), "advantage estimator", "algorithm.adv_estimator")


def find_missing_inputs(
    estimator: RegisteredEstimator, available_keys: Collection[str]
) -> list[str]:
    """Return the sorted batch keys that ``estimator`` requires and ``available_keys`` lacks."""
    required_keys = [key for key in estimator.inputs.values() if not key.endswith("?")]
    return sorted(key for key in required_keys if key not in available_keys)


def register_policy_loss(
    name: str | Enum,
    advantages_only: bool = False,
    needs: LossNeeds | None = None,
    takes_weights: bool = False,
) -> Callable[[PolicyLossFunctionT], PolicyLossFunctionT]:
    """Register a policy loss with the signature of ``compute_policy_loss_vanilla``.

    ``advantages_only`` declares that a row has no gradient if all its advantages are 0; such rows
    are skipped. ``needs`` declares further arguments. ``takes_weights`` declares an argument
    ``weights [B, R]`` that multiplies the token losses. For other losses the advantages are
    multiplied by the weights instead.
    """

    def register_loss(function: PolicyLossFunctionT) -> PolicyLossFunctionT:
        _add_entry(POLICY_LOSSES, as_name(name), function, "policy loss")
        if advantages_only:
            ADVANTAGES_ONLY.add(as_name(name))
        if needs is not None:
            LOSS_NEEDS[as_name(name)] = needs
        if takes_weights:
            TAKES_WEIGHTS.add(as_name(name))
        return function

    return register_loss


def get_loss_needs(name: str | Enum) -> LossNeeds:
    """Return the additional arguments of the policy loss ``name``; empty if it declares none."""
    return LOSS_NEEDS.get(as_name(name), LossNeeds())


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFunction:
    """Return the policy loss registered as ``name``. Raises ``ValueError`` for an unknown one."""
    config_key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return _look_up(POLICY_LOSSES, as_name(name), "policy loss", config_key)


def choose(value: str, allowed: Collection[str], setting: str) -> str:
    """Return ``value`` if it is one of ``allowed``; else raise ``ValueError`` about ``setting``."""
    if value in allowed:
        return value
    names = ", ".join(sorted(allowed))
    hint = did_you_mean(str(value), allowed)
    raise ValueError(f"unknown {setting} {value!r}: allowed are {names}{hint}")


def _look_up(registry: Mapping[str, EntryT], name: str, entry_kind: str, config_key: str) -> EntryT:
    return registry[choose(name, registry, f"{entry_kind} ({config_key})")]


def _add_entry(registry: dict[str, EntryT], name: str, entry: EntryT, entry_kind: str) -> None:
    existing_entry = registry.get(name)
    # Compare names, not objects: a module that is imported again creates new function objects.
    if existing_entry is not None and _get_qualified_name(existing_entry) != _get_qualified_name(
        entry
    ):
        raise ValueError(
            f"{entry_kind} {name!r} is already registered by "
            f"{'.'.join(_get_qualified_name(existing_entry))}"
        )
    registry[name] = entry


def _get_qualified_name(entry: Callable[..., object]) -> tuple[str, str]:
    function = entry.function if isinstance(entry, RegisteredEstimator) else entry
    return str(function.__module__), str(getattr(function, "__qualname__", function))


def _infer_inputs_from_arguments(function: AdvantageFunction) -> dict[str, str]:
    estimator_inputs: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in CONVENTIONAL_INPUTS:
            suffix = "" if parameter.default is parameter.empty else "?"
            estimator_inputs[name] = CONVENTIONAL_INPUTS[name] + suffix
    return estimator_inputs


def _check_estimator_arguments(
    name: str, function: AdvantageFunction, supplied_names: set[str]
) -> None:
    parameters = inspect.signature(function).parameters.values()
    named_parameters = [
        parameter
        for parameter in parameters
        if parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    ]
    missing_names = [
        parameter.name
        for parameter in named_parameters
        if parameter.default is parameter.empty and parameter.name not in supplied_names
    ]
    if missing_names:
        raise ValueError(
            f"estimator {name!r}: arguments without a source: {', '.join(missing_names)}; "
            "fix: declare them in inputs= or params="
        )
    unknown_names = supplied_names - {parameter.name for parameter in named_parameters}
    # A function with *args or **kwargs may accept further arguments.
    if unknown_names and len(named_parameters) == len(parameters):
        raise ValueError(f"estimator {name!r} has no argument {', '.join(sorted(unknown_names))}")
