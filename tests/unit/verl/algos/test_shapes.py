"""Shape annotations of tensor functions are checked during the tests: wrong shapes are refused."""

import pytest
import torch
from jaxtyping import TypeCheckError

from verl.algos import agg_loss, compute_group_stats, compute_grpo_outcome_advantage, kl_penalty
from verl.algos.advantages import spread
from verl.utils.torch_functional import entropy_from_logits, masked_mean


@pytest.mark.parametrize(
    ("function", "arguments"),
    [
        (compute_grpo_outcome_advantage, (torch.zeros(2, 3), torch.ones(2, 4), ["a", "a"])),
        (compute_grpo_outcome_advantage, (torch.zeros(6), torch.ones(6), ["a"] * 6)),
        (spread, (torch.zeros(3), torch.ones(2, 3))),
        (compute_group_stats, (torch.zeros(3), torch.zeros(2, dtype=torch.long))),
        (compute_group_stats, (torch.zeros(3), torch.zeros(3))),  # groups are whole numbers
        (agg_loss, (torch.zeros(2, 3), torch.ones(2, 3), "token-mean", torch.ones(3))),
        (kl_penalty, (torch.zeros(2, 3), torch.zeros(3), "kl")),
        (masked_mean, (torch.zeros(2, 3), torch.ones(3))),
        (entropy_from_logits, (torch.zeros((), dtype=torch.float32),)),
    ],
)
def test_wrong_shape_is_refused(function, arguments):
    """Without the check, these would broadcast or fail far from their cause."""
    with pytest.raises(TypeCheckError):
        function(*arguments)


def test_wrong_shape_of_a_result_is_refused(monkeypatch):
    monkeypatch.setattr("verl.algos.advantages.spread", lambda per_row, _: per_row)
    with pytest.raises(TypeCheckError):
        compute_grpo_outcome_advantage(torch.zeros(2, 3), torch.ones(2, 3), ["a", "a"])


def test_right_shapes_pass_with_masks_of_any_dtype():
    for mask in (torch.ones(2, 3), torch.ones(2, 3).bool(), torch.ones(2, 3).long()):
        advantages, returns = compute_grpo_outcome_advantage(torch.eye(2, 3), mask, ["a", "a"])
        assert advantages.shape == returns.shape == (2, 3)
