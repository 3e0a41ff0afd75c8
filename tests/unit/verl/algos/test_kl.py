"""KL estimators at their limits, and the controllers of its coefficient."""

import math

import pytest
import torch

from verl.algos import AdaptiveKLController, FixedKLController, get_kl_controller, kl_penalty


def k3(difference):
    """The estimate for one token with this difference of log-probs."""
    return kl_penalty(torch.tensor([[difference]]), torch.zeros(1, 1), "k3").item()


def test_k3_in_the_middle_and_at_its_limit():
    assert k3(1.0) == pytest.approx(math.exp(-1) - 1 + 1)
    assert k3(10.5) == pytest.approx(9.5, rel=1e-4)
    assert k3(15.0) == 10.0
    assert k3(-3.0) == 10.0  # exp(3) - 4 = 16.1


def test_an_enormous_difference_stays_finite_and_has_no_gradient():
    for difference in (500.0, -500.0):
        logprob = torch.full((1, 1), difference, requires_grad=True)
        estimate = kl_penalty(logprob, torch.zeros(1, 1), "low_var_kl")
        estimate.sum().backward()
        assert estimate.item() == 10.0
        assert logprob.grad is not None
        assert logprob.grad.item() == 0.0


@pytest.mark.parametrize(("target", "horizon"), [(0.0, 1.0), (1.0, 0.0), (-1.0, 1.0), (1.0, -1.0)])
def test_target_and_horizon_are_positive(target, horizon):
    with pytest.raises(ValueError, match="must be positive"):
        AdaptiveKLController(0.1, target, horizon)


def test_target_and_horizon_may_lie_below_one():
    assert AdaptiveKLController(0.1, 0.5, 0.5).horizon == 0.5


@pytest.mark.parametrize(
    ("measured", "expected"), [(0.05, 0.8), (0.09, 0.9), (0.1, 1.0), (0.11, 1.1), (5.0, 1.2)]
)
def test_an_adaptive_coefficient_moves_by_a_fifth_at_most(measured, expected):
    controller = AdaptiveKLController(1.0, target_kl=0.1, horizon=100)
    controller.update(measured, n_steps=100)
    assert controller.value == pytest.approx(expected)


def test_the_step_is_the_number_of_samples_over_the_horizon():
    controller = AdaptiveKLController(2.0, target_kl=0.1, horizon=100)
    controller.update(1.0, n_steps=25)
    assert controller.value == pytest.approx(2.0 * (1 + 0.2 / 4))


def test_what_the_config_leaves_out():
    controller = get_kl_controller("adaptive", 0.3)
    assert isinstance(controller, AdaptiveKLController)
    assert (controller.value, controller.horizon, controller.target) == (0.3, 10000, 0.1)
    fixed = get_kl_controller("fixed", 0.3)
    assert isinstance(fixed, FixedKLController)
    fixed.update(9.0, 1)
    assert fixed.value == 0.3
