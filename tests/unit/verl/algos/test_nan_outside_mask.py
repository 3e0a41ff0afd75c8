"""Unsampled tokens may be NaN without effect on losses, divergences, entropies, statistics and
gradients."""

from collections.abc import Callable

import pytest
import torch

from verl.algos import (
    LOSS_AGG_MODES,
    POLICY_LOSSES,
    compute_entropy_loss,
    compute_value_loss,
    get_loss_needs,
)
from verl.utils.torch_functional import logprobs_from_logits, masked_mean, masked_var, masked_whiten

MASK = torch.tensor([[0, 1, 1, 0], [1, 0, 0, 1]])
SAMPLED = MASK.bool()


def column(seed: int) -> torch.Tensor:
    """Return [2, 4] numbers around 0."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) / 5


def fill_unsampled(values: torch.Tensor, outside: float) -> torch.Tensor:
    """Return ``values`` with ``outside`` at unsampled positions."""
    mask = SAMPLED.reshape(*SAMPLED.shape, *[1] * (values.dim() - 2))
    return torch.where(mask, values, outside)


def value_and_gradient(
    loss: Callable[..., torch.Tensor], trained: torch.Tensor, outside: float, others: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the loss of ``trained`` and ``others`` more columns, and its gradient."""
    leaf = fill_unsampled(trained, outside).requires_grad_()
    columns = [fill_unsampled(column(seed), outside) for seed in range(1, others + 1)]
    result = loss(leaf, *columns)
    result.backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def assert_nan_changes_nothing(loss, trained: torch.Tensor, others: int) -> None:
    plain, gradient = value_and_gradient(loss, trained, 0.0, others)
    value, with_nan = value_and_gradient(loss, trained, float("nan"), others)
    assert torch.isfinite(value)
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(with_nan, gradient)
    assert with_nan[~SAMPLED].abs().sum() == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_policy_loss_ignores_nan_of_unsampled_tokens(name, mode):
    def loss(log_prob, old_log_prob, advantages, weights):
        kinds = {"loss_agg_mode": mode, "cliprange": 0.2, "clip_ratio_c": 3.0}
        kinds["weights"] = weights
        if get_loss_needs(name).picker is not None:
            kinds["selected"] = MASK
        results = POLICY_LOSSES[name](old_log_prob, log_prob, advantages, MASK, **kinds)
        assert all(torch.isfinite(torch.as_tensor(result)).all() for result in results)
        return results[0]

    assert_nan_changes_nothing(loss, column(0), others=3)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_value_loss_ignores_nan_of_unsampled_tokens(mode):
    def loss(vpreds, returns, values):
        value_loss, share = compute_value_loss(vpreds, returns, values, MASK, 0.1, mode)
        assert torch.isfinite(share)
        return value_loss

    assert_nan_changes_nothing(loss, column(0), others=2)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_entropy_loss_ignores_nan_in_logits_and_entropies(mode):
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    for trained in (logits, column(0)):
        assert_nan_changes_nothing(
            lambda values: compute_entropy_loss(values, MASK, mode), trained, others=0
        )


def test_log_probs_of_unsampled_tokens_give_no_gradient():
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    labels = torch.ones(2, 4, dtype=torch.long)
    assert_nan_changes_nothing(
        lambda values: masked_mean(logprobs_from_logits(values, labels), MASK), logits, others=0
    )


@pytest.mark.parametrize(
    "statistic",
    [
        lambda values: masked_mean(values, MASK),
        lambda values: masked_var(values, MASK),
        lambda values: (masked_whiten(values, MASK) ** 3).sum(),
    ],
)
def test_statistics_ignore_nan_of_unsampled_tokens(statistic):
    assert_nan_changes_nothing(statistic, column(0), others=0)


def test_nan_on_a_sampled_token_is_visible():
    with_nan = column(0)
    with_nan[0, 1] = float("nan")
    loss, _ = compute_value_loss(with_nan, column(1), column(2), MASK, 0.1)
    assert torch.isnan(loss)
