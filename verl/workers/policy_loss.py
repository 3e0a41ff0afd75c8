"""The loss of one micro-batch of policy rows, as its exact share of the whole mini-batch's loss.

    loss = policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference)
           - level_entropy_coef * entropy of the level digit

Every term is divided by the denominator of the *mini-batch*, summed over micro-batches and ranks
beforehand; so the shares add up, and neither the micro-batching nor the number of ranks changes the
gradient.
"""

from dataclasses import dataclass
from typing import Any

import torch

from verl.algos import ADVANTAGES_ONLY, agg_loss, get_policy_loss_fn, kl_penalty, loss_denominator
from verl.models.token_scores import TokenScores
from verl.protocol import DataProto
from verl.workers.collectives import sum_over_ranks
from verl.workers.rows import Rows


@dataclass(frozen=True)
class Denominators:
    """Of one mini-batch over all ranks: of the aggregated losses, sampled tokens, level positions,
    rows computed.
    """

    loss: float
    tokens: float
    levels: float
    rows: float


def denominators(
    data: DataProto, rows: list[int], loss_agg_mode: str, computed: list[int] | None = None
) -> Denominators:
    """Denominators of the mini-batch whose rows on this rank are ``rows``; a collective call.

    Where only the rows ``computed`` go through the model, tokens and levels are theirs (metrics are
    means over what was computed) and the loss is still divided by that of all rows.
    """
    batch, index = data.batch, torch.as_tensor(rows, dtype=torch.long)
    counted = index if computed is None else torch.as_tensor(computed, dtype=torch.long)
    mask, sampled = batch["response_mask"][index].bool(), batch["response_mask"][counted].bool()
    weights = batch["loss_weights"][index] if "loss_weights" in data.tensor_keys() else None
    levels = (
        batch["level_mask"][counted].bool() & sampled
        if "level_mask" in data.tensor_keys()
        else torch.zeros(0)
    )
    local = [
        loss_denominator(mask, loss_agg_mode, weights),
        sampled.sum(),
        levels.sum(),
        len(counted),
    ]
    return Denominators(*sum_over_ranks([float(value) for value in local]))


class PolicyLoss:
    """The configured loss.

    Args:
        actor: the ``actor`` section.
        level_token_ids: the tokens whose restricted entropy is held up where ``level_mask`` is 1.
        level_entropy_coef: weight of that term.
    """

    def __init__(
        self,
        actor: Any,
        level_token_ids: torch.Tensor | None = None,
        level_entropy_coef: float = 0.0,
    ) -> None:
        self.actor = actor
        self.level_token_ids = level_token_ids
        self.level_entropy_coef = level_entropy_coef
        self.policy_loss = get_policy_loss_fn(actor.policy_loss.loss_mode)
        self.metrics = ["pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower", "entropy"]
        self.metrics += ["kl_loss"] if actor.use_kl_loss else []
        self.metrics += ["level_entropy"] if level_token_ids is not None else []

    def rows_with_gradient(self, data: DataProto, rows: list[int]) -> list[int]:
        """The ``rows`` that can have a gradient: where advantages are the only reason for one,
        those with any.
        """
        actor, of_levels = self.actor, self.level_token_ids is not None and self.level_entropy_coef
        if (
            actor.policy_loss.loss_mode not in ADVANTAGES_ONLY
            or actor.entropy_coeff
            or actor.use_kl_loss
            or of_levels
        ):
            return rows
        index = torch.as_tensor(rows, dtype=torch.long)
        moves = (data.batch["advantages"][index] != 0) & data.batch["response_mask"][index].bool()
        return index[moves.any(-1)].tolist()

    def __call__(
        self,
        scores: TokenScores,
        rows: Rows,
        data: DataProto,
        index: list[int],
        whole: Denominators,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of the rows ``index`` with ``scores`` of their sampled tokens, and the detached
        metrics to be summed.
        """
        log_probs, entropy = scores.log_probs, scores.entropy
        actor, device = self.actor, log_probs.device
        batch = data.batch[torch.as_tensor(index)].to(device)
        mask = batch["response_mask"].bool()
        shared = {
            "loss_agg_mode": actor.loss_agg_mode,
            "row_weights": batch.get("loss_weights", None),
            "denominator": whole.loss,
            "loss_scale_factor": actor.loss_scale_factor,
        }
        new = rows.unpack(log_probs, index)
        pg_loss, clipfrac, ppo_kl, clipfrac_lower = self.policy_loss(
            old_log_prob=batch["old_log_probs"],
            log_prob=new,
            advantages=batch["advantages"],
            response_mask=mask,
            cliprange=actor.clip_ratio,
            cliprange_low=actor.clip_ratio_low,
            cliprange_high=actor.clip_ratio_high,
            clip_ratio_c=actor.clip_ratio_c,
            num_tokens=whole.tokens or 1.0,
            **shared,
        )
        loss = pg_loss
        found = {
            "pg_loss": pg_loss,
            "pg_clipfrac": clipfrac,
            "ppo_kl": ppo_kl,
            "pg_clipfrac_lower": clipfrac_lower,
            "entropy": entropy.sum() / (whole.tokens or 1.0),
        }
        if actor.entropy_coeff:
            loss = loss - actor.entropy_coeff * agg_loss(
                rows.unpack(entropy, index), mask, **shared
            )
        if actor.use_kl_loss:
            divergence = kl_penalty(new, batch["ref_log_prob"], actor.kl_loss_type)
            found["kl_loss"] = agg_loss(divergence, mask, **shared)
            loss = loss + actor.kl_loss_coef * found["kl_loss"]
        if scores.level_entropy is not None:
            at_level = rows.unpack(scores.level_entropy, index) * (
                batch["level_mask"].bool() & mask
            )
            found["level_entropy"] = at_level.sum() / (whole.levels or 1.0)
            loss = loss - self.level_entropy_coef * found["level_entropy"]
        return loss, {name: value.detach() for name, value in found.items()}
