"""Policy loss of one micro-batch.

The losses of all micro-batches add up to the loss of the mini-batch.

    loss = policy loss - entropy_coeff * entropy + kl_loss_coef * KL(policy || reference)
           - restricted_loss.weight * entropy of restricted tokens
           + clipped loss with ``choice_credit``, the advantages of allowed tokens

A restricted token is a sampled token that may only be one of K allowed tokens, such as a digit that
selects one of K options (``verl.records.RestrictedTokenLoss``). Its entropy is that of the policy
over these K tokens.

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
    TokenSelector,
    agg_loss,
    compute_loss_denominator,
    get_loss_needs,
    get_policy_loss_fn,
    kl_penalty,
)
from verl.algos.losses import MAX_LOG_RATIO, resolve_clip_range
from verl.config.schema.actor_rollout_ref import ActorConfig
from verl.models.token_scores import TargetLogProbs
from verl.protocol import DataProto
from verl.records import (
    CHOICE_CREDIT,
    CHOICE_MASK,
    CHOICE_OLD_LOG_PROBS,
    CHOICE_POSTERIOR,
    CORRECTION_WEIGHTS,
    RestrictedTokenLoss,
)
from verl.utils.torch_functional import entropy_from_logits, masked_sum
from verl.workers.collectives import gather_vectors, sum_over_ranks
from verl.workers.rows import Rows

SMALLEST_RATIO = 1e-8  # lower limit of a ratio before its logarithm: log 0 has no finite gradient


@dataclass(frozen=True)
class Denominators:
    """Denominators of the loss terms and metrics of one mini-batch, summed over all ranks.

    ``loss_denominator``: denominator of the policy, entropy and KL terms. ``num_tokens``: number of
    sampled tokens.
    ``num_restricted_tokens``: number of sampled tokens at positions where only K tokens are
    allowed. ``num_rows``: number of rows that pass through the model.
    """

    loss_denominator: float
    num_tokens: float
    num_restricted_tokens: float
    num_rows: float


def compute_denominators(
    data: DataProto, rows: list[int], loss_agg_mode: str, computed_rows: list[int] | None = None
) -> Denominators:
    """Compute the denominators of the loss terms and metrics of a mini-batch. A collective call.

    ``rows`` are the rows of the mini-batch on this rank. ``computed_rows`` are those that go
    through the model (None: all). Only ``loss_denominator`` also counts the other rows.
    """
    batch = data.batch
    row_indices = torch.as_tensor(rows, dtype=torch.long)
    computed_indices = (
        row_indices if computed_rows is None else torch.as_tensor(computed_rows, dtype=torch.long)
    )
    mask = batch["response_mask"][row_indices].bool()
    is_sampled = batch["response_mask"][computed_indices].bool()
    row_shares = batch["row_shares"][row_indices] if "row_shares" in data.tensor_keys() else None
    num_restricted_tokens = 0.0
    if CHOICE_MASK in data.tensor_keys():
        num_restricted_tokens = float(
            (batch[CHOICE_MASK][computed_indices].bool() & is_sampled).sum()
        )
    loss_denominator = float(compute_loss_denominator(mask, loss_agg_mode, row_shares))
    local_sums = [
        loss_denominator,
        float(is_sampled.sum()),
        num_restricted_tokens,
        float(len(computed_indices)),
    ]
    return Denominators(*sum_over_ranks(local_sums))


class PolicyLoss:
    """Configured policy loss: a call returns the loss and the metrics of a micro-batch.

    ``restricted_loss`` lists the K tokens allowed where ``choice_mask`` is 1, such as digits of
    options.
    """

    def __init__(
        self,
        section: ActorConfig,
        restricted_loss: RestrictedTokenLoss | None = None,
        device: str = "cpu",
    ) -> None:
        self.section = section
        self.restricted_loss = restricted_loss
        self.allowed_token_ids: torch.Tensor | None = None
        loss_mode = section.policy_loss.loss_mode
        self.policy_loss = get_policy_loss_fn(loss_mode)
        self.loss_needs = get_loss_needs(loss_mode)
        self.params = self._read_params(self.loss_needs.params)
        self.metrics = ["pg_loss", "pg_clipfrac", "ppo_kl", "pg_clipfrac_lower"]
        if section.use_kl_loss:
            self.metrics.append("kl_loss")
        if restricted_loss is not None:
            self.metrics.append(f"{restricted_loss.name}_entropy")
            self.allowed_token_ids = torch.as_tensor(restricted_loss.token_ids, device=device)

    def _read_params(self, paths: Mapping[str, str]) -> dict[str, float]:
        return {name: attrgetter(path)(self.section) for name, path in paths.items()}

    @property
    def reads_entropy(self) -> bool:
        """True if the loss needs the entropies of tokens."""
        return bool(self.section.entropy_coeff)

    def make_token_selector(self, data: DataProto, rows: list[int]) -> TokenSelector | None:
        """Create the rule that selects tokens of the mini-batch ``rows``, as in Clip-Cov, or None.

        If the configured loss selects tokens, this is a collective call.
        """
        if self.loss_needs.picker is None:
            return None
        row_indices = torch.as_tensor(rows, dtype=torch.long)
        mask = data.batch["response_mask"][row_indices].bool()
        old_log_probs = gather_vectors(data.batch["old_log_probs"][row_indices][mask])
        advantages = gather_vectors(data.batch["advantages"][row_indices][mask])
        return self.loss_needs.picker(
            old_log_probs, advantages, **self._read_params(self.loss_needs.token_selector_params)
        )

    def rows_with_gradient(self, data: DataProto, rows: list[int]) -> list[int]:
        """Return those of ``rows`` that can have a gradient.

        These are all rows if a loss term can have a gradient where the advantage is zero.
        """
        section = self.section
        has_entropy_bonus = self.restricted_loss is not None and self.restricted_loss.weight
        if (
            section.policy_loss.loss_mode not in ADVANTAGES_ONLY
            or self.reads_entropy
            or section.use_kl_loss
            or has_entropy_bonus
        ):
            return rows
        return self.rows_with_advantage(data, rows)

    def rows_with_advantage(self, data: DataProto, rows: list[int]) -> list[int]:
        """Return those of ``rows`` with a token of nonzero advantage or ``choice_credit``."""
        row_indices = torch.as_tensor(rows, dtype=torch.long)
        has_advantage = data.batch["advantages"][row_indices] != 0
        if CHOICE_CREDIT in data.tensor_keys():
            has_advantage = has_advantage | (data.batch[CHOICE_CREDIT][row_indices] != 0).any(-1)
        is_sampled = data.batch["response_mask"][row_indices].bool()
        return row_indices[(has_advantage & is_sampled).any(-1)].tolist()

    def __call__(
        self,
        scores: TargetLogProbs,
        rows: Rows,
        data: DataProto,
        row_indices: list[int],
        denominators: Denominators,
        token_selector: TokenSelector | None = None,
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Return the loss and the detached metrics of the rows ``row_indices``.

        Both are to be summed over micro-batches and ranks. ``denominators`` and ``token_selector``
        are those of the whole mini-batch.
        """
        section = self.section
        batch = data.batch[torch.as_tensor(row_indices)].to(scores.log_probs.device)
        mask = batch["response_mask"].bool()
        agg_arguments = {
            "loss_agg_mode": section.loss_agg_mode,
            "row_shares": batch.get("row_shares", None),
            "denominator": denominators.loss_denominator,
            "loss_scale_factor": section.loss_scale_factor,
        }
        # The KL term reads the log-probs of the sampled tokens. Those of the policy loss may be
        # replaced by marginal log-probs over the allowed tokens.
        log_probs = token_log_probs = rows.scatter_to_responses(scores.log_probs, row_indices)
        allowed_token_log_probs = None
        if self.restricted_loss is not None and scores.allowed_token_log_probs is not None:
            allowed_token_log_probs = rows.scatter_to_responses(
                scores.allowed_token_log_probs, row_indices
            )
            log_probs = _replace_by_marginal_log_probs(log_probs, allowed_token_log_probs, batch)
        # Without sampled tokens all sums are zero, so the denominator 1 gives the right result.
        loss_arguments = agg_arguments | {"num_tokens": denominators.num_tokens or 1.0}
        loss, metrics = self._compute_policy_term(batch, log_probs, token_selector, loss_arguments)
        if self.reads_entropy:
            entropy = agg_loss(
                rows.scatter_to_responses(scores.required_entropy, row_indices),
                mask,
                **agg_arguments,
            )
            loss = loss - section.entropy_coeff * entropy
        if section.use_kl_loss:
            # Replace values at positions without a sampled token, where the column may hold NaN.
            ref_log_probs = torch.where(mask, batch["ref_log_prob"], 0.0)
            kl_values = kl_penalty(token_log_probs, ref_log_probs, section.kl_loss_type)
            metrics["kl_loss"] = agg_loss(kl_values, mask, **agg_arguments)
            loss = loss + section.kl_loss_coef * metrics["kl_loss"]
        if self.restricted_loss is not None and allowed_token_log_probs is not None:
            choice_mask = batch[CHOICE_MASK].bool() & mask
            entropy = masked_sum(entropy_from_logits(allowed_token_log_probs), choice_mask)
            entropy = entropy / (denominators.num_restricted_tokens or 1.0)
            metrics[f"{self.restricted_loss.name}_entropy"] = entropy
            loss = loss - self.restricted_loss.weight * entropy
            if batch.get(CHOICE_CREDIT, None) is not None:
                allowed_token_losses = _compute_allowed_token_losses(
                    allowed_token_log_probs, batch, section
                )
                loss = loss + agg_loss(allowed_token_losses, mask, **agg_arguments)
        return loss, {name: value.detach() for name, value in metrics.items()}

    def _compute_policy_term(
        self,
        batch: TensorDict,
        log_probs: torch.Tensor,
        token_selector: TokenSelector | None,
        loss_arguments: dict[str, Any],
    ) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        """Compute the loss selected by ``policy_loss.loss_mode`` and its metrics."""
        section = self.section
        mask = batch["response_mask"].bool()
        arguments: dict[str, Any] = loss_arguments | self.params
        advantages, weights = batch["advantages"], batch.get(CORRECTION_WEIGHTS, None)
        if weights is not None and section.policy_loss.loss_mode in TAKES_WEIGHTS:
            arguments["weights"] = weights
        elif weights is not None:
            # The loss is proportional to the advantage, so it can be weighted through the
            # advantage.
            advantages = advantages * weights
        if token_selector is not None:
            selected_tokens = token_selector.select_tokens(
                batch["old_log_probs"], batch["advantages"], mask
            )
            arguments["selected"] = selected_tokens
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


def create_policy_loss(section: ActorConfig, data: DataProto, device: str = "cpu") -> PolicyLoss:
    """Create the policy loss of an update on ``data``.

    ``meta_info["choice"]`` of ``data`` lists the tokens that are allowed at some positions, such as
    level digits. It has no effect without the column ``choice_mask``, which marks these positions.
    """
    restricted_loss = data.meta_info.get("choice") if CHOICE_MASK in data.tensor_keys() else None
    return PolicyLoss(section, restricted_loss, device)


def rows_trained_on(section: ActorConfig, data: DataProto) -> list[int]:
    """Return the rows of ``data`` that can have a gradient in an update.

    The driver uses this function. It ignores ``skip_without_advantage``, which skips mini-batches
    without any nonzero advantage, because it does not know the mini-batches.
    """
    return create_policy_loss(section, data).rows_with_gradient(data, list(range(len(data))))


def _replace_by_marginal_log_probs(
    log_probs: torch.Tensor, allowed_token_log_probs: torch.Tensor, batch: TensorDict
) -> torch.Tensor:
    """Return ``log_probs`` [B, R], changed where only K tokens are allowed.

    There the ratio in the policy loss becomes ``sum_k posterior_k r_k``, a weighted mean over the K
    tokens. The weights are ``choice_posterior`` [B, R, K]; r_k is the new over the old probability
    of token k. The returned value is the old log-prob plus the log of this sum.
    ``allowed_token_log_probs`` [B, R, K] are the new log-probs of the K tokens. Positions with zero
    weights are unchanged.
    """
    posterior = batch.get(CHOICE_POSTERIOR, None)
    if posterior is None:
        return log_probs
    ratios = _compute_allowed_token_ratios(allowed_token_log_probs, batch)
    marginal_ratio = (posterior * ratios).sum(-1).clamp(min=SMALLEST_RATIO)
    marginal_log_probs = batch["old_log_probs"] + marginal_ratio.log()
    return torch.where(posterior.sum(-1) > 0, marginal_log_probs, log_probs)


def _compute_allowed_token_ratios(
    allowed_token_log_probs: torch.Tensor, batch: TensorDict
) -> torch.Tensor:
    """Return new over old probability of the K allowed tokens, [B, R, K]; 1 at other positions."""
    log_ratios = allowed_token_log_probs - batch[CHOICE_OLD_LOG_PROBS]
    is_restricted = batch[CHOICE_MASK].bool().unsqueeze(-1)
    # Positions where all tokens are allowed have no old log-probs. where() keeps them out of the
    # gradient.
    return torch.where(is_restricted, log_ratios, 0.0).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def _compute_allowed_token_losses(
    allowed_token_log_probs: torch.Tensor, batch: TensorDict, section: ActorConfig
) -> torch.Tensor:
    """Return PPO's clipped losses [B, R] of ``choice_credit`` [B, R, K], summed over K tokens."""
    ratios = _compute_allowed_token_ratios(allowed_token_log_probs, batch)
    low, high = resolve_clip_range(
        section.clip_ratio, section.clip_ratio_low, section.clip_ratio_high
    )
    choice_credit = batch[CHOICE_CREDIT]
    weights = batch.get(CORRECTION_WEIGHTS, None)
    if weights is not None:
        choice_credit = choice_credit * weights.unsqueeze(-1)
    clipped_ratios = ratios.clamp(1 - low, 1 + high)
    return torch.maximum(-choice_credit * ratios, -choice_credit * clipped_ratios).sum(-1)
