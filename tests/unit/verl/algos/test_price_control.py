"""Factor of token prices under a constraint on the success rate."""

import pytest

from verl.algos import PriceController


def test_prices_are_constant_without_a_tolerance():
    control = PriceController()
    for rate in (0.9, 0.1):
        control.update(rate)
    assert control.multiplier == 1.0


def test_prices_grow_to_their_full_size_while_success_is_stable():
    control = PriceController(tolerance=2.0)
    assert control.multiplier == 0.0
    factors = []
    for _ in range(12):
        control.update(0.5)
        factors.append(control.multiplier)
    assert factors[:3] == pytest.approx([0.1, 0.2, 0.3])
    assert factors[-1] == 1.0


def test_prices_fall_when_success_falls_below_the_tolerance():
    control = PriceController(tolerance=2.0)
    for _ in range(20):
        control.update(0.6)
    # Average 0.56, best 0.6 minus 0.0004: margin (0.56 - 0.5996 + 0.02) / 0.02 = -0.98
    control.update(0.2)
    assert control.multiplier == pytest.approx(1 - 0.098)
    for _ in range(20):
        control.update(0.2)
    assert control.multiplier == 0.0


def test_decrease_per_step_is_limited():
    control = PriceController(tolerance=0.5)
    for _ in range(20):
        control.update(1.0)
    control.update(0.0)
    assert control.multiplier == pytest.approx(0.7)


def test_resumed_controller_continues():
    first = PriceController(tolerance=2.0)
    for rate in (0.3, 0.5, 0.4):
        first.update(rate)
    second = PriceController(tolerance=2.0)
    second.resume(first.state())
    for control in (first, second):
        control.update(0.45)
    assert first == second
    unconstrained = PriceController()
    unconstrained.resume(first.state())
    assert unconstrained.multiplier == 1.0


def test_controller_starts_at_0_after_a_run_without_limit():
    control = PriceController(tolerance=2.0)
    control.resume(PriceController().state())
    assert control == PriceController(tolerance=2.0)
