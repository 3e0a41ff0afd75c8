"""Masked GRPO loss on whole sequences, as pure tensor functions.

A batch has ``prompt_completion_ids``, ``attention_mask`` and ``completion_only_mask`` (1 on the
tokens of the agent), all ``[B, T]``. ``old_per_token_logps`` and ``ref_per_token_logps`` are
optional, ``[B, T]``; position t is for token t given the tokens before it. ``advantages`` is
``[B]`` or ``[B, T]``. Tokens outside of ``completion_only_mask`` are still attended to.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

LOSS_TYPES = ("grpo", "bnpo", "dr_grpo", "dapo")


def build_full_sequence_batch(inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Concatenate TRL's ``inputs`` (prompts ``[B, P]``, completions ``[B, C]``) to ``[B, P+C]``."""
    prompt_mask, completion_mask = inputs["prompt_mask"], inputs["completion_mask"]
    agent_mask = completion_mask * inputs["tool_mask"] if "tool_mask" in inputs else completion_mask
    batch = {
        "prompt_completion_ids": torch.cat([inputs["prompt_ids"], inputs["completion_ids"]], dim=1),
        "attention_mask": torch.cat([prompt_mask, completion_mask], dim=1),
        "completion_only_mask": torch.cat([torch.zeros_like(prompt_mask), agent_mask], dim=1),
        "advantages": inputs["advantages"],
    }
    for name in ("old_per_token_logps", "ref_per_token_logps"):
        if inputs.get(name) is not None:
            completion_logps = inputs[name]
            batch[name] = torch.cat(
                [completion_logps.new_zeros(prompt_mask.shape), completion_logps], dim=1
            )
    # One advantage per row, [B] or [B, 1], is broadcast and needs no padding.
    if batch["advantages"].dim() == 2 and batch["advantages"].shape[1] > 1:
        batch["advantages"] = torch.cat(
            [batch["advantages"].new_zeros(prompt_mask.shape), batch["advantages"]], dim=1
        )
    return batch


def compute_token_logps(logits: Tensor, ids: Tensor, temperature: float = 1.0) -> Tensor:
    """Return the log-prob ``[B, T]`` of every token of ``ids`` ``[B, T]``, 0 for the first token.

    ``logits`` is ``[B, T, V]``.
    """
    # The logits at position t are for token t + 1. Use float32: ratios depend on small
    # differences, which half precision loses.
    scaled_logits = logits[:, :-1].float() / temperature
    token_logps = torch.log_softmax(scaled_logits, dim=-1).gather(-1, ids[:, 1:, None]).squeeze(-1)
    return torch.nn.functional.pad(token_logps, (1, 0))


def masked_grpo_loss(
    logps: Tensor,
    batch: Mapping[str, Tensor],
    *,
    loss_type: str = "dapo",
    epsilon_low: float = 0.2,
    epsilon_high: float = 0.2,
    beta: float = 0.0,
    delta: float | None = None,
    importance_sampling_level: str = "token",
    bias_correction: bool = False,
    max_completion_length: int | None = None,
    num_tokens: Tensor | float | None = None,
) -> Tensor:
    """Return GRPO's clipped loss with KL penalty for the log-probs ``logps`` ``[B, T]``.

    The loss of a token with advantage A is
    ``-min(min(r, delta) A, clip(r, 1 - epsilon_low, 1 + epsilon_high) A)`` plus the KL penalty.
    The ratio r is ``exp(new - old)`` of the log-probs, or 1 without ``old_per_token_logps``. With
    ``importance_sampling_level="sequence"``, r is the exponential of the mean of ``new - old`` over
    the trained tokens of a row. The KL penalty is ``beta (exp(ref - new) - (ref - new) - 1)``,
    times r with ``bias_correction``.

    ``loss_type`` determines the aggregation:

    - ``grpo``: mean over rows of the token means, 0 for rows without trained tokens.
    - ``bnpo``: mean over tokens.
    - ``dr_grpo``: sum over tokens / (rows * ``max_completion_length``).
    - ``dapo``: sum over tokens / ``num_tokens`` of the optimizer step (None: of this batch).
    """
    if loss_type not in LOSS_TYPES:
        raise ValueError(
            f"loss_type={loss_type!r}: allowed are {', '.join(LOSS_TYPES)}; set one of them"
        )
    is_trained = batch["completion_only_mask"].bool()
    mask = is_trained.to(logps.dtype)
    is_per_row = batch["advantages"].dim() == 1
    advantages = batch["advantages"].unsqueeze(1) if is_per_row else batch["advantages"]
    advantages = torch.where(is_trained, advantages, 0.0)
    # Mask before ``exp``: on a token of the environment the ratio may overflow to inf, and inf * 0
    # is NaN. An unknown log-prob is NaN too.
    new_logps = torch.where(is_trained, logps, 0.0)
    old_logps = batch.get("old_per_token_logps")
    old_logps = new_logps.detach() if old_logps is None else torch.where(is_trained, old_logps, 0.0)
    log_ratio = new_logps - old_logps
    if importance_sampling_level == "sequence":
        log_ratio = (log_ratio.sum(-1) / mask.sum(-1).clamp(min=1)).unsqueeze(-1)
    ratio = log_ratio.exp()
    clipped_ratio = ratio.clamp(1 - epsilon_low, 1 + epsilon_high)
    # For a negative advantage the minimum selects the unclipped side, which only ``delta`` bounds.
    bounded_ratio = ratio if delta is None else ratio.clamp(max=delta)
    losses = -torch.min(bounded_ratio * advantages, clipped_ratio * advantages)
    if beta:
        ref_log_ratio = torch.where(is_trained, batch["ref_per_token_logps"], 0.0) - new_logps
        # Non-negative estimate of KL(new || ref) from one sample.
        kl_penalty = ref_log_ratio.exp() - ref_log_ratio - 1
        losses = losses + beta * (kl_penalty * ratio if bias_correction else kl_penalty)
    losses = torch.where(is_trained, losses, 0.0)
    row_length = max_completion_length or mask.shape[1]
    return _aggregate_losses(losses, mask, loss_type, row_length, num_tokens)


def _aggregate_losses(
    losses: Tensor,
    mask: Tensor,
    loss_type: str,
    row_length: int,
    num_tokens: Tensor | float | None,
) -> Tensor:
    if loss_type == "grpo":
        return (losses.sum(-1) / mask.sum(-1).clamp(min=1)).mean()
    if loss_type == "dr_grpo":
        return losses.sum() / (len(losses) * row_length)
    if num_tokens is None or loss_type == "bnpo":
        num_tokens = mask.sum()
    divisor = torch.as_tensor(num_tokens, dtype=losses.dtype)
    return losses.sum() / divisor.clamp(min=1)
