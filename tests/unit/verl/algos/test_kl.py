"""KL estimators at their limits, and the controllers of the KL coefficient."""

import math

import pytest
import torch

from tests.helpers.refusals import mentions
from verl.algos import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty
from verl.names import KL_ESTIMATORS


def k3(difference):
    """Return the estimate for one token with this difference of log-probs."""
    return kl_penalty(torch.tensor([[difference]]), torch.zeros(1, 1), "k3").item()


def test_k3_by_hand_and_at_its_limit():
    assert k3(1.0) == pytest.approx(math.exp(-1) - 1 + 1)
    assert k3(10.5) == pytest.approx(9.5, rel=1e-4)
    assert k3(15.0) == 10.0
    assert k3(-3.0) == 10.0  # exp(3) - 4 = 16.1


VALUES = {
    "kl": 0.5,
    "k1": 0.5,
    "abs": 0.5,
    "k2": 0.125,
    "mse": 0.125,
    "k3": math.exp(-0.5) - 0.5,
    "low_var_kl": math.exp(-0.5) - 0.5,
}
GRADIENTS = {"kl": 1.0, "k1": 1.0, "abs": 1.0, "k3": 1 - math.exp(-0.5)}


@pytest.mark.parametrize("name", KL_ESTIMATORS)
def test_every_estimator_and_its_gradient_by_hand(name):
    form = name.removesuffix("+")
    logprob = torch.tensor([-1.0, -2.0], requires_grad=True)
    estimate = kl_penalty(logprob, torch.tensor([-1.5, -2.5]), name)
    estimate.sum().backward()
    assert estimate.tolist() == pytest.approx([VALUES[form]] * 2)
    plain = GRADIENTS.get("k3" if form == "low_var_kl" else form, 0.5)
    assert logprob.grad is not None
    assert logprob.grad.tolist() == pytest.approx([0.5 if name.endswith("+") else plain] * 2)


@pytest.mark.parametrize("wrong", ["k2+", "mse+", "k1++", "k4", "+"])
def test_unknown_estimator_is_refused(wrong):
    with pytest.raises(ValueError, check=mentions("kl_penalty")):
        kl_penalty(torch.zeros(1), torch.zeros(1), wrong)


def test_k2_gradient_is_that_of_the_exact_divergence():
    """Summed over all tokens and weighted by the policy, the k2 gradient equals the KL gradient.
    The k1 gradient sums to 0."""
    logits = torch.tensor([0.3, -0.2, 1.1], dtype=torch.float64, requires_grad=True)
    reference = torch.tensor([0.1, 0.4, -0.5], dtype=torch.float64).log_softmax(-1)
    logprob = logits.log_softmax(-1)
    exact = torch.autograd.grad((logprob.exp() * (logprob - reference)).sum(), logits)[0]
    probabilities = logits.detach().softmax(-1)
    for name, expected in (("k1+", exact), ("k3+", exact), ("k1", torch.zeros(3))):
        estimate = (probabilities * kl_penalty(logits.log_softmax(-1), reference, name)).sum()
        gradient = torch.autograd.grad(estimate, logits)[0]
        torch.testing.assert_close(gradient, expected.double(), atol=1e-12, rtol=0)


def test_very_large_difference_stays_finite_without_gradient():
    for difference in (500.0, -500.0):
        logprob = torch.full((1, 1), difference, requires_grad=True)
        estimate = kl_penalty(logprob, torch.zeros(1, 1), "low_var_kl")
        estimate.sum().backward()
        assert estimate.item() == 10.0
        assert logprob.grad is not None
        assert logprob.grad.item() == 0.0


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, -1.0)])
def test_target_and_horizon_must_be_positive(target, horizon):
    with pytest.raises(ValueError, check=mentions("target_kl", "horizon")):
        AdaptiveKLController(0.1, target, horizon)


def test_target_and_horizon_may_be_below_one():
    assert AdaptiveKLController(0.1, 0.5, 0.5).horizon == 0.5


@pytest.mark.parametrize(
    ("measured", "expected"), [(0.05, 0.8), (0.09, 0.9), (0.1, 1.0), (0.11, 1.1), (5.0, 1.2)]
)
def test_adaptive_coefficient_changes_by_a_fifth_at_most(measured, expected):
    controller = AdaptiveKLController(1.0, target_kl=0.1, horizon=100)
    controller.update(measured, n_steps=100)
    assert controller.value == pytest.approx(expected)


def test_update_is_scaled_by_samples_over_horizon():
    controller = AdaptiveKLController(2.0, target_kl=0.1, horizon=100)
    controller.update(1.0, n_steps=25)
    assert controller.value == pytest.approx(2.0 * (1 + 0.2 / 4))


def test_coefficient_stays_positive_for_large_batches():
    controller = AdaptiveKLController(1.0, target_kl=0.1, horizon=100)
    controller.update(0.0, n_steps=512)
    assert controller.value == pytest.approx(0.8)


def test_default_horizon_target_and_fixed_coefficient():
    controller = get_kl_controller("adaptive", 0.3)
    assert isinstance(controller, AdaptiveKLController)
    assert (controller.value, controller.horizon, controller.target) == (0.3, 10000, 0.1)
    fixed = get_kl_controller("fixed", 0.3)
    assert isinstance(fixed, FixedKLController)
    fixed.update(9.0, 1)
    assert fixed.value == 0.3
