"""Dictionaries of advantage estimators and policy losses, filled by decorators.

An estimator declares what it reads: ``inputs`` maps its keyword arguments to keys of a batch
(``batch`` or ``non_tensor_batch``; a trailing ``?`` marks an optional one), ``params`` maps
keyword arguments to dotted configuration paths, and ``compares_group`` says whether it compares the
plays of one task. The trainer needs to know nothing else about it.
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

GROUP = "uid"  # the column that names a row's task
# Where the conventional argument names of estimators are found in a batch.
CONVENTIONAL_INPUTS = {
    "token_level_rewards": "token_level_rewards",
    "response_mask": "response_mask",
    "values": "values",
    "reward_baselines": "reward_baselines",
    "index": GROUP,
    "traj_index": "traj_uid",
    "step_ids": "step_ids",
    "step_rewards": "step_rewards",
    "step_index": "step_index",
    "anchor_obs": "anchor_obs",
}


class RegisteredEstimator:
    """A registered estimator: calls its function and carries ``inputs``, ``params``, ``metrics``
    and ``compares_group``.

    One function may be registered under two names with different parameters, so these are not its
    attributes.
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


class TokenPicker(Protocol):
    """Picks tokens of any part of a mini-batch by what was found in the whole of it."""

    def selects(self, old_log_prob: Tensor, advantages: Tensor, response_mask: Tensor) -> Tensor:
        """``[B, R]`` bool, of columns ``[B, R]``."""
        ...


@dataclass(frozen=True, slots=True)
class LossNeeds:
    """What a policy loss takes beside the conventional arguments.

    ``params``: argument to dotted path below ``actor_rollout_ref.actor``. ``picker(old_log_prob,
    advantages, **picker_params)``, called with all sampled tokens ``[N]`` of a mini-batch: what
    picks the tokens ``selected [B, R]`` that the loss is handed, because a part of a mini-batch
    does not know the others. ``picker_params`` are like ``params``.
    """

    params: Mapping[str, str] = field(default_factory=dict)
    picker: Callable[..., TokenPicker] | None = None
    picker_params: Mapping[str, str] = field(default_factory=dict)


ADV_ESTIMATORS: dict[str, RegisteredEstimator] = {}
POLICY_LOSSES: dict[str, PolicyLossFunction] = {}
ADVANTAGES_ONLY: set[str] = set()  # policy losses without a gradient where advantages are zero
TAKES_WEIGHTS: set[str] = set()  # policy losses with an argument ``weights`` [B, R] of tokens
LOSS_NEEDS: dict[str, LossNeeds] = {}


def name_of(name: object) -> str:
    """The name that ``name`` stands for: the value of any enum's member, else its text."""
    return str(name.value) if isinstance(name, Enum) else str(name)


def register_adv_est(
    name: str | Enum,
    inputs: Mapping[str, str] | None = None,
    params: Mapping[str, str] | None = None,
    metrics: EstimatorMetrics | None = None,
    compares_group: bool | None = None,
) -> Callable[[AdvantageFunctionT], AdvantageFunctionT]:
    """Register an estimator ``f(**inputs, **params) -> (advantages [B, R], returns [B, R])`` under
    ``name``, a text or an enum's member that has it as value.

    Without ``inputs``, arguments with conventional names are looked up in ``CONVENTIONAL_INPUTS``,
    optional where they have a default. ``metrics(advantages, returns, **inputs)``, if given,
    returns numbers to log; it is not handed the ``params``. An optional input that the batch lacks
    is left out of both calls. An estimator that ``compares_group`` needs several plays of each
    task: they are the default of ``env.rollout.n``, and one play is refused. None: it does where it
    reads ``uid``. Raises ``ValueError`` for a name that another function holds or for an argument
    that nothing fills.
    """
    paths = dict(params or {})

    def decorate(function: AdvantageFunctionT) -> AdvantageFunctionT:
        reads = dict(inputs) if inputs is not None else _conventional_inputs(function)
        _require_filled(name_of(name), function, {*reads, *paths})
        reads_group = any(key.rstrip("?") == GROUP for key in reads.values())
        compares = reads_group if compares_group is None else compares_group
        entry = RegisteredEstimator(function, reads, paths, metrics, compares)
        _store(ADV_ESTIMATORS, name_of(name), entry, "advantage estimator")
        ESTIMATORS[name_of(name)] = compares
        return function

    return decorate


def get_adv_estimator_fn(name: str | Enum) -> RegisteredEstimator:
    """The estimator called ``name``, with attributes ``inputs``, ``params``, ``metrics`` and
    ``compares_group``.

    Raises ``ValueError`` that lists the right names and the nearest one.
    """
    return _look_up(ADV_ESTIMATORS, name_of(name), "advantage estimator", "algorithm.adv_estimator")


def missing_inputs(estimator: RegisteredEstimator, available: Collection[str]) -> list[str]:
    """The required batch keys of ``estimator`` that are not in ``available``."""
    required = [key for key in estimator.inputs.values() if not key.endswith("?")]
    return sorted(key for key in required if key not in available)


def register_policy_loss(
    name: str | Enum,
    advantages_only: bool = False,
    needs: LossNeeds | None = None,
    takes_weights: bool = False,
) -> Callable[[PolicyLossFunctionT], PolicyLossFunctionT]:
    """Register a policy loss with the signature of ``compute_policy_loss_vanilla`` under ``name``,
    a text or an enum's member that has it as value.

    ``advantages_only`` promises that a row whose advantages are all zero has no gradient: such rows
    are passed over. ``needs``: arguments beyond that signature. A loss that ``takes_weights`` has
    an argument ``weights [B, R]``, which multiplies the losses of tokens; others are handed
    advantages that are multiplied by them.
    """

    def decorate(function: PolicyLossFunctionT) -> PolicyLossFunctionT:
        _store(POLICY_LOSSES, name_of(name), function, "policy loss")
        if advantages_only:
            ADVANTAGES_ONLY.add(name_of(name))
        if needs is not None:
            LOSS_NEEDS[name_of(name)] = needs
        if takes_weights:
            TAKES_WEIGHTS.add(name_of(name))
        return function

    return decorate


def loss_needs(name: str | Enum) -> LossNeeds:
    """What the policy loss ``name`` takes beside the conventional arguments."""
    return LOSS_NEEDS.get(name_of(name), LossNeeds())


def get_policy_loss_fn(name: str | Enum) -> PolicyLossFunction:
    """The policy loss called ``name``; ``ValueError`` lists the right names and the nearest one."""
    key = "actor_rollout_ref.actor.policy_loss.loss_mode"
    return _look_up(POLICY_LOSSES, name_of(name), "policy loss", key)


def choose(value: str, allowed: Collection[str], what: str) -> str:
    """``value`` if allowed; else ``ValueError`` naming ``what``, the allowed values and the nearest
    one.
    """
    if value in allowed:
        return value
    names = ", ".join(sorted(allowed))
    hint = did_you_mean(str(value), allowed)
    raise ValueError(f"unknown {what} {value!r}: allowed are {names}{hint}")


def _look_up(table: Mapping[str, EntryT], name: str, what: str, key: str) -> EntryT:
    return table[choose(name, table, f"{what} ({key})")]


def _store(table: dict[str, EntryT], name: str, entry: EntryT, what: str) -> None:
    known = table.get(name)
    # A module that is imported again brings the same function as another object.
    if known is not None and _identity(known) != _identity(entry):
        raise ValueError(f"{what} {name!r} is already registered by {'.'.join(_identity(known))}")
    table[name] = entry


def _identity(entry: Callable[..., object]) -> tuple[str, str]:
    """Module and qualified name of the function behind ``entry``."""
    function = entry.function if isinstance(entry, RegisteredEstimator) else entry
    return str(function.__module__), str(getattr(function, "__qualname__", function))


def _conventional_inputs(function: AdvantageFunction) -> dict[str, str]:
    reads: dict[str, str] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in CONVENTIONAL_INPUTS:
            optional = "" if parameter.default is parameter.empty else "?"
            reads[name] = CONVENTIONAL_INPUTS[name] + optional
    return reads


def _require_filled(name: str, function: AdvantageFunction, filled: set[str]) -> None:
    parameters = inspect.signature(function).parameters.values()
    named = [p for p in parameters if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]
    unfilled = [p.name for p in named if p.default is p.empty and p.name not in filled]
    if unfilled:
        raise ValueError(
            f"estimator {name!r}: declare where {', '.join(unfilled)} come from "
            "(inputs= or params=)"
        )
    surplus = filled - {p.name for p in named}
    # With *args or **kwargs, the function may well take what it does not name.
    if surplus and len(named) == len(parameters):
        raise ValueError(f"estimator {name!r} takes no argument {', '.join(sorted(surplus))}")
