"""Common parts of policy losses against numbers by hand: visible tokens, bounds, registration."""

import math

import pytest
import torch

from verl.algos import (
    LossNeeds,
    TokenLosses,
    algorithm_registry,
    get_loss_needs,
    get_policy_loss_fn,
)
from verl.algos.token_losses import register_token_loss

NAN = math.nan


@pytest.fixture(autouse=True)
def registries(monkeypatch):
    """Restore the registries after each test."""
    losses = dict(algorithm_registry.POLICY_LOSSES)
    advantages_only = set(algorithm_registry.ADVANTAGES_ONLY)
    needs = dict(algorithm_registry.LOSS_NEEDS)
    monkeypatch.setattr(algorithm_registry, "POLICY_LOSSES", losses)
    monkeypatch.setattr(algorithm_registry, "ADVANTAGES_ONLY", advantages_only)
    monkeypatch.setattr(algorithm_registry, "LOSS_NEEDS", needs)


def halved(tokens, share=0.5):
    """Loss for these tests."""
    return TokenLosses(share * tokens.advantages, tokens.advantages > 2, tokens.advantages > 3)


def call(function, advantages, mask, **kwargs):
    zeros = torch.zeros(len(mask), len(mask[0]))
    advantages = torch.tensor(advantages)
    results = function(zeros, zeros, advantages, torch.tensor(mask), **kwargs)
    return [result.item() for result in results]


def loss_at_distance(name, distance, advantage, **kwargs):
    """Return the results of one token whose log-prob is ``distance`` above the old one."""
    mask = torch.ones(1, 1)
    if get_loss_needs(name).picker is not None:
        kwargs["selected"] = torch.zeros(1, 1)
    results = get_policy_loss_fn(name)(
        torch.zeros(1, 1),
        torch.full((1, 1), float(distance)),
        torch.full((1, 1), float(advantage)),
        mask,
        **kwargs,
    )
    return [result.item() for result in results]


# ---------------------------------------------------------------- registration


def test_loss_is_registered_under_all_its_names():
    needs = LossNeeds({"share": "share"})
    registered = register_token_loss("half", "halved", needs=needs)(halved)
    for name in ("half", "halved"):
        assert get_policy_loss_fn(name) is registered
        assert get_loss_needs(name) is needs
        assert name in algorithm_registry.ADVANTAGES_ONLY
    assert registered.__name__ == "halved" and registered.__doc__ == "Loss for these tests."


def test_loss_may_need_nothing_and_more_than_advantages():
    register_token_loss("half", advantages_only=False)(halved)
    assert get_loss_needs("half") == LossNeeds({}, None, {})
    assert "half" not in algorithm_registry.ADVANTAGES_ONLY


# ---------------------------------------------------------------- what a loss sees and returns


def test_loss_receives_zeros_at_unsampled_positions():
    received = []

    def record(tokens):
        received.append(tokens)
        return TokenLosses(tokens.advantages, tokens.mask)

    columns = (torch.tensor([[-1.0, NAN]]), torch.tensor([[-2.0, NAN]]), torch.tensor([[3.0, NAN]]))
    register_token_loss("record")(record)(*columns, torch.tensor([[1, 0]]))
    (tokens,) = received
    assert tokens.old_log_prob.tolist() == [[-1.0, 0.0]]
    assert tokens.log_prob.tolist() == [[-2.0, 0.0]]
    assert tokens.advantages.tolist() == [[3.0, 0.0]]
    assert not tokens.selected_tokens.any()
    assert (tokens.low, tokens.high, tokens.ratio_ceiling) == (0.2, 0.2, 3.0)


def test_tokens_are_averaged_by_default():
    function = register_token_loss("half")(halved)
    advantages = [[2.0, 4.0], [6.0, NAN]]
    results = call(function, advantages, [[1, 1], [1, 0]])
    assert results == pytest.approx([(1 + 2 + 3) / 3, 2 / 3, 0.0, 2 / 3])
    assert call(function, advantages, [[1, 1], [1, 0]], share=1.0)[0] == pytest.approx(4.0)


def test_loss_is_aggregated_as_the_caller_requests():
    function = register_token_loss("half")(halved)
    advantages = [[2.0, 4.0], [6.0, NAN]]
    mask = [[1, 1], [1, 0]]
    mode = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5.0}
    results = call(function, advantages, mask, denominator=4.0, **mode)
    assert results[0] == pytest.approx((3 + 3) / 5 / 4)
    results = call(
        function,
        advantages,
        mask,
        loss_agg_mode="seq-mean-token-mean",
        row_shares=torch.tensor([1.0, 0.5]),
        denominator=4.0,
    )
    assert results[0] == pytest.approx((1.5 + 3 * 0.5) / 4)


def test_metrics_of_a_part_are_shares_of_the_whole():
    function = register_token_loss("half")(halved)
    results = call(function, [[2.0, 4.0], [6.0, NAN]], [[1, 1], [1, 0]], num_tokens=8)
    assert results[1:] == pytest.approx([2 / 8, 0.0, 2 / 8])


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("name", ["gspo", "geo_mean", "clip_cov", "kl_cov"])
def test_ratios_are_limited_at_twenty_nats(name):
    options = {"cliprange": 40.0} if name == "geo_mean" else {}
    assert loss_at_distance(name, -30, math.exp(20), **options)[0] == pytest.approx(-1.0, rel=1e-4)
    assert loss_at_distance(name, 30, -math.exp(-20), **options)[0] == pytest.approx(1.0, rel=1e-4)


def test_ratio_below_the_range_does_not_lower_the_loss_further():
    results = loss_at_distance("clip_cov", math.log(0.5), -1.0)
    assert results == pytest.approx([0.8, 1.0, math.log(2), 0.0], rel=1e-5)
    results = loss_at_distance("clip_cov", math.log(0.5), -1.0, cliprange_low=0.4)
    assert results[:2] == pytest.approx([0.6, 1.0], rel=1e-5)
