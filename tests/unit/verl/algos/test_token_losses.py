"""What policy losses have in common, by hand: the tokens they see, bounds, and registration."""

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
    """What a test registers is gone after it."""
    losses = dict(algorithm_registry.POLICY_LOSSES)
    only = set(algorithm_registry.ADVANTAGES_ONLY)
    needs = dict(algorithm_registry.LOSS_NEEDS)
    monkeypatch.setattr(algorithm_registry, "POLICY_LOSSES", losses)
    monkeypatch.setattr(algorithm_registry, "ADVANTAGES_ONLY", only)
    monkeypatch.setattr(algorithm_registry, "LOSS_NEEDS", needs)


def halved(tokens, share=0.5):
    """A loss of this test."""
    return TokenLosses(share * tokens.advantages, tokens.advantages > 2, tokens.advantages > 3)


def call(function, advantages, mask, **kwargs):
    zeros = torch.zeros(len(mask), len(mask[0]))
    advantages = torch.tensor(advantages)
    results = function(zeros, zeros, advantages, torch.tensor(mask), **kwargs)
    return [result.item() for result in results]


def of_distance(name, distance, advantage, **kwargs):
    """The results of one token whose log-prob is ``distance`` above the old one."""
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


def test_a_loss_is_registered_under_all_its_names():
    needs = LossNeeds({"share": "share"})
    found = register_token_loss("half", "halved", needs=needs)(halved)
    for name in ("half", "halved"):
        assert get_policy_loss_fn(name) is found
        assert get_loss_needs(name) is needs
        assert name in algorithm_registry.ADVANTAGES_ONLY
    assert found.__name__ == "halved" and found.__doc__ == "A loss of this test."


def test_a_loss_may_need_nothing_and_more_than_advantages():
    register_token_loss("half", advantages_only=False)(halved)
    assert get_loss_needs("half") == LossNeeds({}, None, {})
    assert algorithm_registry.LOSS_NEEDS["half"] == LossNeeds()
    assert "half" not in algorithm_registry.ADVANTAGES_ONLY


# ---------------------------------------------------------------- what a loss sees and returns


def test_a_loss_sees_zeros_where_nothing_was_sampled():
    seen = []

    def look(tokens):
        seen.append(tokens)
        return TokenLosses(tokens.advantages, tokens.mask)

    columns = (torch.tensor([[-1.0, NAN]]), torch.tensor([[-2.0, NAN]]), torch.tensor([[3.0, NAN]]))
    register_token_loss("look")(look)(*columns, torch.tensor([[1, 0]]))
    (tokens,) = seen
    assert tokens.old_log_prob.tolist() == [[-1.0, 0.0]]
    assert tokens.log_prob.tolist() == [[-2.0, 0.0]]
    assert tokens.advantages.tolist() == [[3.0, 0.0]]
    assert not tokens.selected.any()
    assert (tokens.low, tokens.high, tokens.ceiling) == (0.2, 0.2, 3.0)


def test_by_default_tokens_are_averaged():
    function = register_token_loss("half")(halved)
    advantages = [[2.0, 4.0], [6.0, NAN]]
    found = call(function, advantages, [[1, 1], [1, 0]])
    assert found == pytest.approx([(1 + 2 + 3) / 3, 2 / 3, 0.0, 2 / 3])
    assert call(function, advantages, [[1, 1], [1, 0]], share=1.0)[0] == pytest.approx(4.0)


def test_a_loss_is_aggregated_as_its_caller_says():
    function = register_token_loss("half")(halved)
    advantages = [[2.0, 4.0], [6.0, NAN]]
    mask = [[1, 1], [1, 0]]
    mode = {"loss_agg_mode": "seq-mean-token-sum-norm", "loss_scale_factor": 5.0}
    found = call(function, advantages, mask, denominator=4.0, **mode)
    assert found[0] == pytest.approx((3 + 3) / 5 / 4)
    found = call(
        function,
        advantages,
        mask,
        loss_agg_mode="seq-mean-token-mean",
        row_shares=torch.tensor([1.0, 0.5]),
        denominator=4.0,
    )
    assert found[0] == pytest.approx((1.5 + 3 * 0.5) / 4)


def test_measures_of_a_part_are_shares_of_the_whole():
    function = register_token_loss("half")(halved)
    found = call(function, [[2.0, 4.0], [6.0, NAN]], [[1, 1], [1, 0]], num_tokens=8)
    assert found[1:] == pytest.approx([2 / 8, 0.0, 2 / 8])


# ---------------------------------------------------------------- bounds


@pytest.mark.parametrize("name", ["gspo", "geo_mean", "clip_cov", "kl_cov"])
def test_ratios_end_at_twenty_nats(name):
    far = {"cliprange": 40.0} if name == "geo_mean" else {}
    assert of_distance(name, -30, math.exp(20), **far)[0] == pytest.approx(-1.0, rel=1e-4)
    assert of_distance(name, 30, -math.exp(-20), **far)[0] == pytest.approx(1.0, rel=1e-4)


def test_a_ratio_below_the_range_does_not_lower_the_loss_further():
    found = of_distance("clip_cov", math.log(0.5), -1.0)
    assert found == pytest.approx([0.8, 1.0, math.log(2), 0.0], rel=1e-5)
    found = of_distance("clip_cov", math.log(0.5), -1.0, cliprange_low=0.4)
    assert found[:2] == pytest.approx([0.6, 1.0], rel=1e-5)
