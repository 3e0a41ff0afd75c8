"""The masked loss on whole sequences never reads masked values."""

import torch

from agent_system.integrations.trl.full_sequence import LOSS_TYPES, masked_grpo_loss

MASK = torch.tensor([[0, 1, 1, 0], [1, 0, 1, 1]])


def loss_and_gradient(outside: float, **options) -> tuple[float, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    names = ("old_per_token_logps", "ref_per_token_logps", "advantages")
    hidden = ~MASK.bool()
    batch = {"completion_only_mask": MASK}
    for name in names:
        batch[name] = torch.randn(2, 4, generator=generator).masked_fill(hidden, outside)
    logps = torch.randn(2, 4, generator=generator).masked_fill(hidden, outside).requires_grad_()
    loss = masked_grpo_loss(logps, batch, beta=0.1, **options)
    loss.backward()
    assert logps.grad is not None
    return loss.item(), logps.grad


def test_nan_outside_the_mask_changes_neither_loss_nor_gradient():
    for loss_type in LOSS_TYPES:
        for level in ("token", "sequence"):
            options = {
                "loss_type": loss_type,
                "importance_sampling_level": level,
                "bias_correction": True,
            }
            loss, gradient = loss_and_gradient(0.0, **options)
            loss_with_nan, gradient_with_nan = loss_and_gradient(float("nan"), **options)
            assert loss_with_nan == loss
            assert torch.equal(gradient_with_nan, gradient)
            assert gradient_with_nan[~MASK.bool()].abs().sum() == 0
