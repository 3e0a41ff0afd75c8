"""What was not sampled may hold NaN: no loss, divergence, entropy or statistic takes it up, neither
in its value nor in a gradient.
"""

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
    """[2, 4] numbers around 0."""
    return torch.randn(2, 4, generator=torch.Generator().manual_seed(seed)) / 5


def filled(values: torch.Tensor, outside: float) -> torch.Tensor:
    """``values`` with ``outside`` where nothing was sampled."""
    mask = SAMPLED.reshape(*SAMPLED.shape, *[1] * (values.dim() - 2))
    return torch.where(mask, values, outside)


def value_and_gradient(
    loss: Callable[..., torch.Tensor], learnt: torch.Tensor, outside: float, others: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The loss of ``learnt`` and ``others`` more columns, and its gradient in ``learnt``."""
    leaf = filled(learnt, outside).requires_grad_()
    columns = [filled(column(seed), outside) for seed in range(1, others + 1)]
    result = loss(leaf, *columns)
    result.backward()
    assert leaf.grad is not None
    return result.detach(), leaf.grad


def assert_nan_changes_nothing(loss, learnt: torch.Tensor, others: int) -> None:
    plain, gradient = value_and_gradient(loss, learnt, 0.0, others)
    value, with_nan = value_and_gradient(loss, learnt, float("nan"), others)
    assert torch.isfinite(value)
    torch.testing.assert_close(value, plain)
    torch.testing.assert_close(with_nan, gradient)
    assert with_nan[~SAMPLED].abs().sum() == 0


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
@pytest.mark.parametrize("name", sorted(POLICY_LOSSES))
def test_no_policy_loss_takes_it_up(name, mode):
    def loss(log_prob, old_log_prob, advantages):
        kinds = {"loss_agg_mode": mode, "cliprange": 0.2, "clip_ratio_c": 3.0}
        if get_loss_needs(name).picker is not None:
            kinds["selected"] = MASK
        results = POLICY_LOSSES[name](old_log_prob, log_prob, advantages, MASK, **kinds)
        assert all(torch.isfinite(torch.as_tensor(measured)).all() for measured in results)
        return results[0]

    assert_nan_changes_nothing(loss, column(0), others=2)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_value_loss_does_not_take_it_up(mode):
    def loss(vpreds, returns, values):
        found, share = compute_value_loss(vpreds, returns, values, MASK, 0.1, mode)
        assert torch.isfinite(share)
        return found

    assert_nan_changes_nothing(loss, column(0), others=2)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_the_entropy_loss_takes_it_up_from_neither_logits_nor_entropies(mode):
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    for learnt in (logits, column(0)):
        assert_nan_changes_nothing(
            lambda given: compute_entropy_loss(given, MASK, mode), learnt, others=0
        )


def test_log_probs_of_unused_tokens_leave_their_logits_alone():
    logits = torch.randn(2, 4, 5, generator=torch.Generator().manual_seed(3))
    labels = torch.ones(2, 4, dtype=torch.long)
    assert_nan_changes_nothing(
        lambda given: masked_mean(logprobs_from_logits(given, labels), MASK), logits, others=0
    )


@pytest.mark.parametrize(
    "statistic",
    [
        lambda values: masked_mean(values, MASK),
        lambda values: masked_var(values, MASK),
        lambda values: (masked_whiten(values, MASK) ** 3).sum(),
    ],
)
def test_statistics_do_not_take_it_up(statistic):
    assert_nan_changes_nothing(statistic, column(0), others=0)


def test_nan_on_a_sampled_token_is_not_hidden():
    broken = column(0)
    broken[0, 1] = float("nan")
    loss, _ = compute_value_loss(broken, column(1), column(2), MASK, 0.1)
    assert torch.isnan(loss)
