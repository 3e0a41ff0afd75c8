"""KL divergence from the reference policy: per-token estimators and coefficient controllers."""

from typing import Protocol, runtime_checkable

from verl.algos.algorithm_registry import choose
from verl.algos.shapes import PerPosition
from verl.names import KL_ESTIMATORS

_ESTIMATOR_OF_NAME: dict[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def kl_penalty(logprob: PerPosition, ref_logprob: PerPosition, kl_penalty: str) -> PerPosition:
    """Estimate KL(policy || reference) for each sampled token (Schulman, 2020), ``[...]``.

    With ``d = logprob - ref_logprob``:

    * ``kl``, ``k1``: d
    * ``abs``: abs(d)
    * ``mse``, ``k2``: d^2 / 2
    * ``low_var_kl``, ``k3``: exp(-d) - 1 + d, with d limited to [-20, 20], the result to [-10, 10]

    With a suffix ``+`` (not for k2) the value is unchanged and the gradient is that of k2,
    ``d * grad(logprob)``.
    The mean of that gradient over sampled tokens is the gradient of the KL divergence. The mean
    gradient of k1 is 0, and that of k3 is the gradient of KL(reference || policy). Raises
    ``ValueError`` for any other name.
    """
    choose(kl_penalty, KL_ESTIMATORS, "kl_penalty (algorithm.kl_penalty, actor.kl_loss_type)")
    difference = logprob - ref_logprob
    value = _estimate_kl(difference, _ESTIMATOR_OF_NAME[kl_penalty.removesuffix("+")])
    if not kl_penalty.endswith("+"):
        return value
    gradient_term = 0.5 * difference.square()
    return value.detach() + (gradient_term - gradient_term.detach())


def _estimate_kl(difference: PerPosition, estimator: str) -> PerPosition:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    # The clamp avoids an overflow of exp(-difference). It could occur for a token whose probability
    # under the policy is close to 0.
    clamped_difference = difference.clamp(-20.0, 20.0)
    # k3 is k1 plus a term with mean 0. k3 is never negative and has less variance than k1.
    return ((-clamped_difference).exp() - 1 + clamped_difference).clamp(-10.0, 10.0)


@runtime_checkable
class KLController(Protocol):
    """KL coefficient ``value`` that may adapt to the measured divergence."""

    value: float

    def update(self, current_kl: float, n_steps: int) -> None: ...


class FixedKLController:
    """KL coefficient with the constant value ``kl_coef``."""

    def __init__(self, kl_coef: float) -> None:
        self.value = kl_coef

    def update(self, current_kl: float, n_steps: int) -> None:
        """Do nothing: the coefficient is constant."""


class AdaptiveKLController:
    """KL coefficient that moves the measured KL towards ``target_kl`` (Ziegler et al., 2019).

    ``value *= 1 + clip(current / target - 1, -0.2, 0.2) * n_steps / horizon`` (section 2.2).
    ``value`` is the whole state of the controller.
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
        # Clip the relative error, so that one unusual batch does not change the coefficient much.
        relative_error = min(max(current_kl / self.target - 1, -0.2), 0.2)
        self.value *= 1 + relative_error * n_steps / self.horizon


def get_kl_controller(
    type: str, kl_coef: float, horizon: float = 10000, target_kl: float = 0.1
) -> KLController:
    """Create the KL controller that ``algorithm.kl_ctrl`` configures.

    ``type`` is ``fixed`` or ``adaptive``. ``horizon`` and ``target_kl`` are for ``adaptive`` only.
    """
    if choose(type, ("fixed", "adaptive"), "type (algorithm.kl_ctrl.type)") == "fixed":
        return FixedKLController(kl_coef)
    return AdaptiveKLController(kl_coef, target_kl, horizon)
