"""The loss of one micro-batch of policy rows, as its exact share of the whole mini-batch's loss.

    loss = policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference)
           - bonus.weight * entropy of a choice among a few tokens

Every term is divided by the denominator of the *mini-batch*, summed over micro-batches and ranks
beforehand; so the shares add up, and neither the micro-batching nor the number of ranks changes the
gradient.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch
from tensordict import TensorDict

from verl.algos import (
    ADVANTAGES_ONLY,
    TAKES_WEIGHTS,
    TokenPicker,
    agg_loss,
    get_policy_loss_fn,
    kl_penalty,
    loss_denominator,
    loss_needs,
)
from verl.config.schema.actor import ActorConfig
from verl.models.token_scores import TokenScores
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS, ChoiceBonus
from verl.utils.torch_functional import masked_sum
from verl.workers.collectives import gather_vectors, sum_over_ranks
from verl.workers.rows import Rows

CHOICE_MASK = "choice_mask"  # [B, R]: 1 where the choice of the bonus is made


@dataclass(frozen=True)
class Denominators:
    """Of one mini-batch over all ranks: of the aggregated losses, sampled tokens, choices, rows
    computed.
    """

    loss: float
    tokens: float
    choices: float
    rows: float


def denominators(
    data: DataProto, rows: list[int], loss_agg_mode: str, computed: list[int] | None = None
) -> Denominators:
    """Denominators of the mini-batch whose rows on this rank are ``rows``; a collective call.

    Where only the rows ``computed`` go through the model, tokens and choices are theirs (metrics
    are means over what was computed) and the loss is still divided by that of all rows.
    """
    batch = data.batch
    index = torch.as_tensor(rows, dtype=torch.long)
    counted = index if computed is None else torch.as_tensor(computed, dtype=torch.long)
    mask = batch["response_mask"][index].bool()
    sampled = batch["response_mask"][counted].bool()
    shares = batch["row_shares"][index] if "row_shares" in data.tensor_keys() else None
    choices = 0.0
    if CHOICE_MASK in data.tensor_keys():
        choices = float((batch[CHOICE_MASK][counted].bool() & sampled).sum())
    loss = float(loss_denominator(mask, loss_agg_mode, shares))
    local = [loss, float(sampled.sum()), choices, float(len(counted))]
    return Denominators(*sum_over_ranks(local))


class PolicyLoss:
    """The configured loss.

    Args:
        section: the ``actor`` section.
        bonus: the choice whose entropy is held up where ``choice_mask`` is 1; None: no such term.
        device: where the scores will be.
    """

    def __init__(
        self, section: ActorConfig, bonus: ChoiceBonus | None = None, device: str = "cpu"
    ) -> None:
        self.section = section
        self.bonus = bonus
        self.choice_token_ids: torch.Tensor | None = None
        mode = section.policy_loss.loss_mode
        self.policy_loss = get_policy_loss_fn(mode)
        self.needs = loss_needs(mode)
        self.params = self._settings(self.needs.params)
        self.metrics = ["pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"]
        if section.use_kl_loss:
            self.metrics.append("kl_loss")
        if bonus is not None:
            self.metrics.append(f"{bonus.name}_entropy")
            self.choice_token_ids = torch.as_tensor(bonus.token_ids, device=device)

    def _settings(self, paths: Mapping[str, str]) -> dict[str, float]:
        return {name: attrgetter(path)(self.section) for name, path in paths.items()}

    @property
    def reads_entropy(self) -> bool:
        """Whether the scores of tokens have to come with entropies."""
        return bool(self.section.entropy_coeff)

    def picker(self, data: DataProto, rows: list[int]) -> TokenPicker | None:
        """What picks tokens of the mini-batch whose rows on this rank are ``rows``; None where the
        loss picks none. A collective call.
        """
        if self.needs.picker is None:
            return None
        index = torch.as_tensor(rows, dtype=torch.long)
        mask = data.batch["response_mask"][index].bool()
        old = gather_vectors(data.batch["old_log_probs"][index][mask])
        advantages = gather_vectors(data.batch["advantages"][index][mask])
        return self.needs.picker(old, advantages, **self._settings(self.needs.picker_params))

    def rows_with_gradient(self, data: DataProto, rows: list[int]) -> list[int]:
        """The ``rows`` that can have a gradient: where advantages are the only reason for one,
        those with any.
        """
        section = self.section
        of_choice = self.bonus is not None and self.bonus.weight
        if (
            section.policy_loss.loss_mode not in ADVANTAGES_ONLY
            or self.reads_entropy
            or section.use_kl_loss
            or of_choice
        ):
            return rows
        return self.rows_with_advantage(data, rows)

    def rows_with_advantage(self, data: DataProto, rows: list[int]) -> list[int]:
        """The ``rows`` in which a sampled token has an advantage."""
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
        picker: TokenPicker | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Loss of the rows ``index`` with ``scores`` of their sampled tokens, and the detached
        metrics to be summed. ``whole`` and ``picker`` belong to the mini-batch.
        """
        section = self.section
        batch = data.batch[torch.as_tensor(index)].to(scores.log_probs.device)
        mask = batch["response_mask"].bool()
        shared = {
            "loss_agg_mode": section.loss_agg_mode,
            "row_shares": batch.get("row_shares", None),
            "denominator": whole.loss,
            "loss_scale_factor": section.loss_scale_factor,
        }
        log_probs = rows.unpack(scores.log_probs, index)
        # a mini-batch without a sampled token anywhere has no mean; its sums are zero
        shared_by_tokens = shared | {"num_tokens": whole.tokens or 1.0}
        loss, found = self._policy_term(batch, log_probs, picker, shared_by_tokens)
        if self.reads_entropy:
            entropy = agg_loss(rows.unpack(scores.asked_entropy, index), mask, **shared)
            loss = loss - section.entropy_coeff * entropy
        if section.use_kl_loss:
            # Zero where nothing was sampled, as the policy's: a column may hold NaN there.
            reference = torch.where(mask, batch["ref_log_prob"], 0.0)
            divergence = kl_penalty(log_probs, reference, section.kl_loss_type)
            found["kl_loss"] = agg_loss(divergence, mask, **shared)
            loss = loss + section.kl_loss_coef * found["kl_loss"]
        if self.bonus is not None and scores.choice_entropy is not None:
            per_token = rows.unpack(scores.choice_entropy, index)
            entropy = _mean_of_choices(per_token, batch, mask, whole)
            found[f"{self.bonus.name}_entropy"] = entropy
            loss = loss - self.bonus.weight * entropy
        return loss, {name: value.detach() for name, value in found.items()}

    def _policy_term(
        self,
        batch: TensorDict,
        log_probs: torch.Tensor,
        picker: TokenPicker | None,
        shared: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """The registered loss and its metrics."""
        section = self.section
        mask = batch["response_mask"].bool()
        arguments: dict[str, Any] = shared | self.params
        advantages, weights = batch["advantages"], batch.get(CORRECTION_WEIGHTS, None)
        if weights is not None and section.policy_loss.loss_mode in TAKES_WEIGHTS:
            arguments["weights"] = weights
        elif weights is not None:
            # Of a loss that is proportional to the size of an advantage this is the weight.
            advantages = advantages * weights
        if picker is not None:
            selected = picker.selects(batch["old_log_probs"], batch["advantages"], mask)
            arguments["selected"] = selected
        loss, clipfrac, ppo_kl, clipfrac_lower = self.policy_loss(
            old_log_prob=batch["old_log_probs"],
            log_prob=log_probs,
            advantages=advantages,
            response_mask=mask,
            cliprange=section.clip_ratio,
            cliprange_low=section.clip_ratio_low,
            cliprange_high=section.clip_ratio_high,
            clip_ratio_c=section.clip_ratio_c,
            **arguments,
        )
        return loss, {
            "pg_loss": loss,
            "pg_clipfrac": clipfrac,
            "ppo_kl": ppo_kl,
            "pg_clipfrac_lower": clipfrac_lower,
        }


def learnt_rows(section: ActorConfig, data: DataProto) -> list[int]:
    """The rows of ``data`` that an update computes, as far as one row tells."""
    bonus = data.meta_info.get("choice_bonus") if CHOICE_MASK in data.tensor_keys() else None
    return PolicyLoss(section, bonus).rows_with_gradient(data, list(range(len(data))))


def _mean_of_choices(
    entropy: torch.Tensor, batch: TensorDict, mask: torch.Tensor, whole: Denominators
) -> torch.Tensor:
    """This micro-batch's share of the mean of ``entropy`` [B, R] over all choices."""
    chosen = batch[CHOICE_MASK].bool() & mask
    return masked_sum(entropy, chosen) / (whole.choices or 1.0)
