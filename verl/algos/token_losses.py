"""Common code of the policy losses: their inputs, registration, and aggregation of token losses.

A policy loss is written as a function from ``PolicyLossInputs`` to ``TokenLosses``.
``register_token_loss`` turns it into a function with the signature of
``compute_policy_loss_vanilla``. The aggregation by ``verl.algos.losses.agg_loss`` is exact for any
split of a mini-batch.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from verl.algos.algorithm_registry import LossNeeds, PolicyLossFunction, register_policy_loss
from verl.algos.losses import MAX_LOG_RATIO, agg_loss, compute_token_mean, resolve_clip_range
from verl.algos.shapes import PerRow, PerToken, Scalar, TokenMask
from verl.utils.torch_functional import masked_sum


@dataclass(frozen=True, slots=True)
class PolicyLossInputs:
    """Input of a policy loss. All tensors are ``[B, R]``, and 0 where ``mask`` is 0.

    ``low`` and ``high`` are the clip range, ``ratio_ceiling`` is ``clip_ratio_c``.
    ``selected_tokens`` are the tokens that a loss such as Clip-Cov treats differently (none for
    most losses).
    """

    old_log_prob: PerToken
    log_prob: PerToken
    advantages: PerToken
    mask: TokenMask
    selected_tokens: TokenMask
    low: float
    high: float
    ratio_ceiling: float

    @property
    def log_ratio(self) -> PerToken:
        """New minus old log-prob, ``[B, R]``."""
        return self.log_prob - self.old_log_prob

    @property
    def prob_ratio(self) -> PerToken:
        """New over old probability, ``[B, R]``, limited to e^-20..e^20.

        The gradient is 0 where the limit applies.
        """
        return self.log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()

    def compute_row_mean(self, values: PerToken) -> PerToken:
        """Return the mean of ``values`` over each row's sampled tokens, expanded to ``[B, R]``."""
        num_sampled_tokens = self.mask.sum(-1, keepdim=True).clamp(min=1)
        mean = masked_sum(values, self.mask, axis=-1).unsqueeze(-1) / num_sampled_tokens
        return mean.expand_as(values)


@dataclass(frozen=True, slots=True)
class TokenLosses:
    """Result of a policy loss: token losses ``[B, R]``, and masks of tokens that a bound changed.

    ``clipped`` marks tokens that the clip range changes, or that the loss selects to treat them
    differently (as Clip-Cov does). ``capped`` marks tokens whose loss the bound ``clip_ratio_c`` of
    dual clip limits. None means that there is no such bound.
    """

    losses: PerToken
    clipped: TokenMask
    capped: TokenMask | None = None


PerTokenLoss: TypeAlias = Callable[..., TokenLosses]


def compute_clipped_surrogate(ratio: PerToken, loss_inputs: PolicyLossInputs) -> TokenLosses:
    """Return PPO's clipped token losses ``-min(r A, clip(r, 1 - low, 1 + high) A)``.

    r is ``ratio`` and A the advantage. ``low`` and ``high`` are the clip range of ``loss_inputs``.
    """
    unclipped_losses = -loss_inputs.advantages * ratio
    clipped_losses = -loss_inputs.advantages * ratio.clamp(
        1 - loss_inputs.low, 1 + loss_inputs.high
    )
    return TokenLosses(
        torch.maximum(unclipped_losses, clipped_losses), clipped_losses > unclipped_losses
    )


def register_token_loss(
    name: str,
    *aliases: str,
    advantages_only: bool = True,
    needs: LossNeeds | None = None,
    takes_weights: bool = True,
) -> Callable[[PerTokenLoss], PolicyLossFunction]:
    """Register ``f(loss_inputs, **params) -> TokenLosses`` as the policy loss ``name``.

    The result takes the arguments of ``compute_policy_loss_vanilla``, and ``params`` by keyword.
    """

    def register_loss(compute_token_losses: PerTokenLoss) -> PolicyLossFunction:
        def policy_loss(
            old_log_prob: PerToken,
            log_prob: PerToken,
            advantages: PerToken,
            response_mask: TokenMask,
            cliprange: float | None = None,
            cliprange_low: float | None = None,
            cliprange_high: float | None = None,
            clip_ratio_c: float = 3.0,
            loss_agg_mode: str = "token-mean",
            row_shares: PerRow | None = None,
            denominator: Scalar | float | None = None,
            loss_scale_factor: float | None = None,
            num_tokens: Scalar | float | None = None,
            selected: TokenMask | None = None,
            weights: PerToken | None = None,
            **params: float,
        ) -> tuple[Scalar, Scalar, Scalar, Scalar]:
            if selected is None and needs is not None and needs.picker is not None:
                raise ValueError(
                    f"policy loss {name!r} needs selected=, the tokens that its picker selects"
                )
            mask = response_mask.bool()
            if weights is not None:
                weights = _zero_unsampled(weights, mask)
                # A token of weight 0 must get no gradient through the ratio of its row (GSPO).
                log_prob = torch.where(weights == 0, log_prob.detach(), log_prob)
            loss_inputs = PolicyLossInputs(
                _zero_unsampled(old_log_prob, mask),
                _zero_unsampled(log_prob, mask),
                _zero_unsampled(advantages, mask),
                mask,
                torch.zeros_like(mask) if selected is None else selected.bool() & mask,
                *resolve_clip_range(cliprange, cliprange_low, cliprange_high),
                clip_ratio_c,
            )
            token_losses = compute_token_losses(loss_inputs, **params)
            losses = token_losses.losses if weights is None else token_losses.losses * weights
            loss = agg_loss(losses, mask, loss_agg_mode, row_shares, denominator, loss_scale_factor)
            return loss, *_compute_metrics(token_losses, loss_inputs, num_tokens)

        functools.update_wrapper(policy_loss, compute_token_losses)
        for loss_name in (name, *aliases):
            register_policy_loss(loss_name, advantages_only, needs, takes_weights)(policy_loss)
        return policy_loss

    return register_loss


def _zero_unsampled(token_values: PerToken, mask: TokenMask) -> PerToken:
    # Do not multiply by the mask: 0 * NaN is NaN, in the loss and in its gradient.
    return torch.where(mask, token_values.float(), 0.0)


@torch.no_grad()
def _compute_metrics(
    token_losses: TokenLosses, loss_inputs: PolicyLossInputs, num_tokens: Scalar | float | None
) -> tuple[Scalar, Scalar, Scalar]:
    """Return the metrics ``clipfrac``, ``ppo_kl`` and ``clipfrac_lower`` of a policy loss."""
    mask = loss_inputs.mask
    clipfrac = compute_token_mean(token_losses.clipped.float(), mask, num_tokens)
    ppo_kl = compute_token_mean(-loss_inputs.log_ratio, mask, num_tokens)
    capped = torch.zeros_like(mask) if token_losses.capped is None else token_losses.capped
    return clipfrac, ppo_kl, compute_token_mean(capped.float(), mask, num_tokens)
