"""Divergence from the reference policy: per-token estimators and the controllers of its
coefficient.
"""

from typing import Protocol, runtime_checkable

from verl.algos.algorithm_registry import choose
from verl.algos.shapes import PerPosition
from verl.names import KL_ESTIMATORS

_FORMS: dict[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def kl_penalty(logprob: PerPosition, ref_logprob: PerPosition, kl_penalty: str) -> PerPosition:
    """Estimate of KL(policy || reference) from log-probs ``[...]`` of sampled tokens, one for each
    (Schulman, 2020).

    With ``d = logprob - ref_logprob``: ``kl``/``k1`` d; ``abs`` |d|; ``mse``/``k2`` d^2 / 2;
    ``low_var_kl``/``k3`` exp(-d) - 1 + d with d and the result limited to [-20, 20] and [-10, 10].
    A ``+`` behind any but k2: the value of that form with the gradient of k2, d times that of
    ``logprob``, whose mean over sampled tokens is the gradient of the KL itself; that of k1 is 0 in
    the mean, that of k3 belongs to KL(reference || policy). Raises ``ValueError`` otherwise.
    """
    choose(kl_penalty, KL_ESTIMATORS, "kl_penalty (algorithm.kl_penalty, actor.kl_loss_type)")
    difference = logprob - ref_logprob
    value = _value(difference, _FORMS[kl_penalty.removesuffix("+")])
    if not kl_penalty.endswith("+"):
        return value
    gradient = 0.5 * difference.square()
    return value.detach() + (gradient - gradient.detach())


def _value(difference: PerPosition, form: str) -> PerPosition:
    if form == "k1":
        return difference
    if form == "abs":
        return difference.abs()
    if form == "k2":
        return 0.5 * difference.square()
    # exp of an unlimited difference would overflow on a token the reference finds impossible.
    limited = difference.clamp(-20.0, 20.0)
    # k3 is never negative, and it varies less than k1, from which it differs by a term of mean 0.
    return ((-limited).exp() - 1 + limited).clamp(-10.0, 10.0)


@runtime_checkable
class KLController(Protocol):
    """A coefficient ``value`` that may adapt to the divergence it is paid for."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...


class FixedKLController:
    """A coefficient that stays ``kl_coef``."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Nothing changes."""


class AdaptiveKLController:
    """Moves the coefficient so that the measured KL approaches ``target_kl`` (Ziegler et al., 2019,
    section 2.2).

    ``value *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon``. ``value`` is its
    whole state.
    """

    def __init__(self, init_kl_coef: float, target_kl: float, horizon: float) -> None:
        if target_kl <= 0 or horizon <= 0:
            raise ValueError(
                f"target_kl and horizon must be positive, got {target_kl} and {horizon}"
            )
        self.value = init_kl_coef
        self.target = target_kl
        self.horizon = horizon

    def update(self, current_kl: float, n_steps: int) -> None:
        """Adapt to the mean KL ``current_kl`` (nats) measured over ``n_steps`` samples."""
        # Clipped, so that one unusual batch cannot throw the coefficient off.
        error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + error * n_steps / self.horizon


def get_kl_controller(
    type: str, kl_coef: float, horizon: float = 10000, target_kl: float = 0.1
) -> KLController:
    """The controller that ``algorithm.kl_ctrl`` describes: ``fixed`` or ``adaptive``."""
    if choose(type, ("fixed", "adaptive"), "type (algorithm.kl_ctrl.type)") == "fixed":
        return FixedKLController(kl_coef)
    return AdaptiveKLController(kl_coef, target_kl, horizon)
