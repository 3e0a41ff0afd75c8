"""Policy loss of one micro-batch. The losses of all micro-batches add up to the mini-batch's.

    loss = policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference)
           - bonus.weight * entropy over the few tokens that are allowed at a choice

Every term is divided by the denominator of the *mini-batch*, which is summed over micro-batches and
ranks beforehand. The gradient therefore does not depend on the split into micro-batches and ranks.
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
    compute_loss_denominator,
    get_loss_needs,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.config.schema.actor import ActorConfig
from verl.models.token_scores import TokenScores
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS, ChoiceEntropyBonus
from verl.utils.torch_functional import masked_sum
from verl.workers.collectives import gather_vectors, sum_over_ranks
from verl.workers.rows import Rows

CHOICE_MASK = "choice_mask"  # [B, R]: 1 at tokens where the entropy bonus applies


@dataclass(frozen=True)
class Denominators:
    """Denominators of one mini-batch, summed over all ranks.

    ``loss``: denominator of the policy, entropy and KL terms. ``tokens``: number of sampled tokens.
    ``choices``: number of sampled tokens with ``choice_mask``. ``rows``: number of rows that pass
    through the model.
    """

    loss: float
    tokens: float
    choices: float
    rows: float


def compute_denominators(
    data: DataProto, rows: list[int], loss_agg_mode: str, computed: list[int] | None = None
) -> Denominators:
    """Compute the denominators of a mini-batch with ``rows`` on this rank. A collective call.

    ``computed`` are the rows that go through the model (None: all). ``tokens``, ``choices`` and
    ``rows`` of the result count only these, because metrics are means over them. The denominator
    ``loss`` always counts all rows of the mini-batch.
    """
    batch = data.batch
    index = torch.as_tensor(rows, dtype=torch.long)
    computed_index = index if computed is None else torch.as_tensor(computed, dtype=torch.long)
    mask = batch["response_mask"][index].bool()
    sampled = batch["response_mask"][computed_index].bool()
    row_shares = batch["row_shares"][index] if "row_shares" in data.tensor_keys() else None
    choices = 0.0
    if CHOICE_MASK in data.tensor_keys():
        choices = float((batch[CHOICE_MASK][computed_index].bool() & sampled).sum())
    loss = float(compute_loss_denominator(mask, loss_agg_mode, row_shares))
    local_sums = [loss, float(sampled.sum()), choices, float(len(computed_index))]
    return Denominators(*sum_over_ranks(local_sums))


class PolicyLoss:
    """Configured policy loss: calling it gives loss and metrics of a micro-batch.

    Args:
        section: the ``actor`` section.
        bonus: settings of the entropy bonus at tokens with ``choice_mask``; None for no bonus.
        device: device of the token scores.
    """

    def __init__(
        self, section: ActorConfig, bonus: ChoiceEntropyBonus | None = None, device: str = "cpu"
    ) -> None:
        self.section = section
        self.bonus = bonus
        self.choice_token_ids: torch.Tensor | None = None
        mode = section.policy_loss.loss_mode
        self.policy_loss = get_policy_loss_fn(mode)
        self.needs = get_loss_needs(mode)
        self.params = self._read_params(self.needs.params)
        self.metrics = ["pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"]
        if section.use_kl_loss:
            self.metrics.append("kl_loss")
        if bonus is not None:
            self.metrics.append(f"{bonus.name}_entropy")
            self.choice_token_ids = torch.as_tensor(bonus.token_ids, device=device)

    def _read_params(self, paths: Mapping[str, str]) -> dict[str, float]:
        return {name: attrgetter(path)(self.section) for name, path in paths.items()}

    @property
    def reads_entropy(self) -> bool:
        """True if the loss needs the entropies of tokens."""
        return bool(self.section.entropy_coeff)

    def make_picker(self, data: DataProto, rows: list[int]) -> TokenPicker | None:
        """Make the token picker, which selects the tokens that the loss treats differently.

        ``rows`` are those of the mini-batch on this rank. Returns None if the loss selects no
        tokens. A collective call for losses that do.
        """
        if self.needs.picker is None:
            return None
        index = torch.as_tensor(rows, dtype=torch.long)
        mask = data.batch["response_mask"][index].bool()
        old_log_probs = gather_vectors(data.batch["old_log_probs"][index][mask])
        advantages = gather_vectors(data.batch["advantages"][index][mask])
        return self.needs.picker(
            old_log_probs, advantages, **self._read_params(self.needs.picker_params)
        )

    def rows_with_gradient(self, data: DataProto, rows: list[int]) -> list[int]:
        """Return the ``rows`` that can have a gradient.

        If the policy loss is the only term and is zero for zero advantages, these are the rows with
        a nonzero advantage. Otherwise they are all rows.
        """
        section = self.section
        has_bonus = self.bonus is not None and self.bonus.weight
        if (
            section.policy_loss.loss_mode not in ADVANTAGES_ONLY
            or self.reads_entropy
            or section.use_kl_loss
            or has_bonus
        ):
            return rows
        return self.rows_with_advantage(data, rows)

    def rows_with_advantage(self, data: DataProto, rows: list[int]) -> list[int]:
        """Return the ``rows`` in which some sampled token has a nonzero advantage."""
        index = torch.as_tensor(rows, dtype=torch.long)
        has_advantage = (data.batch["advantages"][index] != 0) & data.batch["response_mask"][
            index
        ].bool()
        return index[has_advantage.any(-1)].tolist()

    def __call__(
        self,
        scores: TokenScores,
        rows: Rows,
        data: DataProto,
        index: list[int],
        totals: Denominators,
        picker: TokenPicker | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss of the rows ``index`` and the detached metrics, which are to be summed.

        ``scores`` are those of the sampled tokens. ``totals`` and ``picker`` belong to the
        mini-batch.
        """
        section = self.section
        batch = data.batch[torch.as_tensor(index)].to(scores.log_probs.device)
        mask = batch["response_mask"].bool()
        shared_settings = {
            "loss_agg_mode": section.loss_agg_mode,
            "row_shares": batch.get("row_shares", None),
            "denominator": totals.loss,
            "loss_scale_factor": section.loss_scale_factor,
        }
        log_probs = rows.scatter_to_responses(scores.log_probs, index)
        # a mini-batch without sampled tokens: all sums are zero, so any denominator is right
        shared_by_tokens = shared_settings | {"num_tokens": totals.tokens or 1.0}
        loss, metrics = self._policy_term(batch, log_probs, picker, shared_by_tokens)
        if self.reads_entropy:
            entropy = agg_loss(
                rows.scatter_to_responses(scores.required_entropy, index), mask, **shared_settings
            )
            loss = loss - section.entropy_coeff * entropy
        if section.use_kl_loss:
            # Zero at positions without a sampled token, where the column may hold NaN.
            reference = torch.where(mask, batch["ref_log_prob"], 0.0)
            divergence = kl_penalty(log_probs, reference, section.kl_loss_type)
            metrics["kl_loss"] = agg_loss(divergence, mask, **shared_settings)
            loss = loss + section.kl_loss_coef * metrics["kl_loss"]
        if self.bonus is not None and scores.choice_entropy is not None:
            per_token = rows.scatter_to_responses(scores.choice_entropy, index)
            entropy = _mean_of_choices(per_token, batch, mask, totals)
            metrics[f"{self.bonus.name}_entropy"] = entropy
            loss = loss - self.bonus.weight * entropy
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _policy_term(
        self,
        batch: TensorDict,
        log_probs: torch.Tensor,
        picker: TokenPicker | None,
        shared: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss selected by ``policy_loss.loss_mode`` and its metrics."""
        section = self.section
        mask = batch["response_mask"].bool()
        arguments: dict[str, Any] = shared | self.params
        advantages, weights = batch["advantages"], batch.get(CORRECTION_WEIGHTS, None)
        if weights is not None and section.policy_loss.loss_mode in TAKES_WEIGHTS:
            arguments["weights"] = weights
        elif weights is not None:
            # This loss is proportional to the advantage, so scaling the advantage weights it.
            advantages = advantages * weights
        if picker is not None:
            selected = picker.select_tokens(batch["old_log_probs"], batch["advantages"], mask)
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


def rows_trained_on(section: ActorConfig, data: DataProto) -> list[int]:
    """Return the rows of ``data`` that can have a gradient in an update.

    Used on the driver. ``skip_without_advantage`` is ignored, because it depends on the rows of the
    whole mini-batch.
    """
    bonus = data.meta_info.get("choice_bonus") if CHOICE_MASK in data.tensor_keys() else None
    return PolicyLoss(section, bonus).rows_with_gradient(data, list(range(len(data))))


def _mean_of_choices(
    entropy: torch.Tensor, batch: TensorDict, mask: torch.Tensor, totals: Denominators
) -> torch.Tensor:
    """Return the sum of ``entropy`` [B, R] over choices, divided by the mini-batch's choices.

    Choices are the sampled tokens with ``choice_mask``.
    """
    choice_mask = batch[CHOICE_MASK].bool() & mask
    return masked_sum(entropy, choice_mask) / (totals.choices or 1.0)
