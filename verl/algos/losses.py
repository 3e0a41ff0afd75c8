"""Losses of actor and critic, exact under any split of a mini-batch into micro-batches and ranks.

Every mode of ``agg_loss`` is a sum over rows divided by a denominator. The denominator of a
mini-batch is the sum of ``loss_denominator`` over all its parts; handed to ``agg_loss`` for
each part, the losses of the parts (and their gradients) add up to the loss of the whole.

What is not sampled may hold anything, NaN included: it is replaced before it is computed with,
because 0 times the derivative at NaN is NaN.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from verl.algos.algorithm_registry import choose, register_policy_loss
from verl.algos.shapes import PerRow, PerToken, Scalar, TokenMask
from verl.names import LOSS_AGG_MODES
from verl.utils.torch_functional import entropy_from_logits, masked_mean, masked_sum

MAX_LOG_RATIO = 20.0  # exp of it is finite in float32
TokenLogits = Float[Tensor, "B R V"]


def _shares(loss_mask: TokenMask, row_shares: PerRow | None) -> PerRow:
    ones = torch.ones(loss_mask.shape[0], dtype=torch.float32, device=loss_mask.device)
    return ones if row_shares is None else row_shares.to(ones)


def loss_denominator(
    loss_mask: TokenMask, loss_agg_mode: str, row_shares: PerRow | None = None
) -> Scalar:
    """What ``agg_loss`` divides by, for these rows: a scalar to be summed over micro-batches and
    ranks.

    ``token-mean``: number of tokens; ``token-sum``: 0, which stands for no division; the
    ``seq-mean`` modes: number of sequences, which is the sum of ``row_shares`` over the rows that
    have a token.
    """
    choose(loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")
    tokens = loss_mask.bool().sum(-1)
    if loss_agg_mode == "token-sum":
        return torch.zeros((), device=tokens.device)
    if loss_agg_mode == "token-mean":
        return tokens.sum().float()
    # Rows that only fill up a batch have no sampled token: they must not count as sequences.
    return (_shares(loss_mask, row_shares) * (tokens > 0)).sum()


def agg_loss(
    loss_mat: PerToken,
    loss_mask: TokenMask,
    loss_agg_mode: str,
    row_shares: PerRow | None = None,
    denominator: Scalar | float | None = None,
    loss_scale_factor: float | None = None,
) -> Scalar:
    """Reduce ``loss_mat [B, R]`` over ``loss_mask [B, R]`` to a scalar.

    * ``token-mean``: mean over tokens;
    * ``token-sum``: sum over tokens, which grows with the mini-batch;
    * ``seq-mean-token-sum``: mean over sequences of token sums;
    * ``seq-mean-token-mean``: mean over sequences of token means;
    * ``seq-mean-token-sum-norm``: the second, divided by the constant ``loss_scale_factor``
      (Dr.GRPO's constant length; None: R, which depends on the padding).

    A row is a sequence, or ``row_shares [B]`` says what part of one it is (``groups.row_shares``);
    for the first two that makes no difference. ``denominator`` replaces the one of these rows, see
    the module's docstring. Rows without a token count for nothing; nothing at all gives 0. Raises
    ``ValueError`` for an unknown mode.
    """
    if denominator is None:
        denominator = loss_denominator(loss_mask, loss_agg_mode, row_shares)
    choose(loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")
    per_row = masked_sum(loss_mat, loss_mask, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        # The mean over a sequence is the mean of its rows' means, each by its part of the tokens.
        own = per_row / loss_mask.bool().sum(-1).clamp(min=1)
        per_row = own * _shares(loss_mask, row_shares)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        width = loss_mask.shape[-1]
        per_row = per_row / (width if loss_scale_factor is None else loss_scale_factor)
    total = per_row.sum()
    denominator = torch.as_tensor(denominator, dtype=total.dtype, device=total.device)
    # Nothing sampled: 0 / 1, not 0 / 0. A plain sum: total / 1.
    return total / torch.where(denominator > 0, denominator, 1.0)


def mean_over_tokens(
    values: PerToken, mask: TokenMask, num_tokens: Scalar | float | None
) -> Scalar:
    """Mean over sampled tokens, or this part's share of the mean over ``num_tokens``."""
    if num_tokens is None:
        return masked_mean(values, mask)
    return masked_sum(values, mask) / num_tokens


def clip_range(
    cliprange: float | None, low: float | None, high: float | None
) -> tuple[float, float]:
    """The range below and above 1; ``cliprange`` (default 0.2) stands in for a bound not given."""
    both = 0.2 if cliprange is None else cliprange
    return (both if low is None else low), (both if high is None else high)


@register_policy_loss("vanilla", advantages_only=True)
def compute_policy_loss_vanilla(
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
) -> tuple[Scalar, Scalar, Scalar, Scalar]:
    """PPO's clipped surrogate with separate bounds (DAPO) and dual clip (Ye et al., 2020); all
    inputs ``[B, R]``.

    With ratio r: ``-min(r A, clip(r, 1 - low, 1 + high) A)``, and for A < 0 at most ``-c A``.
    ``cliprange`` (default 0.2) stands in for a bound not given. Returns ``(loss, clipfrac, ppo_kl,
    clipfrac_lower)``: share of tokens where the upper clip binds, mean of ``old - new`` log-prob,
    share where the dual clip binds. With ``num_tokens`` (sampled tokens of the whole mini-batch)
    the three also add up over micro-batches. Raises ``ValueError`` unless ``clip_ratio_c > 1``.
    """
    if clip_ratio_c <= 1.0:
        raise ValueError(f"clip_ratio_c must be greater than 1.0, got {clip_ratio_c}")
    low, high = clip_range(cliprange, cliprange_low, cliprange_high)
    mask = response_mask.bool()
    advantages = torch.where(mask, advantages, 0.0)
    difference = torch.where(mask, log_prob.float() - old_log_prob.float(), 0.0)
    # Beyond the bound the gradient is 0: such a ratio is clipped already, or as good as 0.
    ratio = difference.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    surrogate = torch.maximum(plain, clipped)
    # A negative advantage has no lower bound of its own: the loss grows with the ratio.
    ceiling = -advantages * clip_ratio_c
    dual = (advantages < 0) & (surrogate > ceiling)
    losses = torch.where(dual, ceiling, surrogate)
    loss = agg_loss(losses, mask, loss_agg_mode, row_shares, denominator, loss_scale_factor)
    with torch.no_grad():
        clipfrac = mean_over_tokens((clipped > plain).float(), mask, num_tokens)
        ppo_kl = mean_over_tokens(-difference, mask, num_tokens)
        clipfrac_lower = mean_over_tokens(dual.float(), mask, num_tokens)
    return loss, clipfrac, ppo_kl, clipfrac_lower


def compute_value_loss(
    vpreds: PerToken,
    returns: PerToken,
    values: PerToken,
    response_mask: TokenMask,
    cliprange_value: float,
    loss_agg_mode: str = "token-mean",
    row_shares: PerRow | None = None,
    denominator: Scalar | float | None = None,
    loss_scale_factor: float | None = None,
    num_tokens: Scalar | float | None = None,
) -> tuple[Scalar, Scalar]:
    """Half the squared error to ``returns``, predictions clipped to ``values +- cliprange_value``;
    all ``[B, R]``.

    Returns ``(loss, clipfrac)``: the larger of plain and clipped error, and the share of tokens
    where it is the latter.
    """
    mask = response_mask.bool()
    vpreds, returns, values = (torch.where(mask, x, 0.0) for x in (vpreds, returns, values))
    clipped = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    plain_error = (vpreds - returns) ** 2
    clipped_error = (clipped - returns) ** 2
    # The larger of both, as in the policy's surrogate: leaving the bounds never lowers the loss.
    losses = 0.5 * torch.maximum(plain_error, clipped_error)
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, row_shares, denominator, loss_scale_factor
    )
    binds = (clipped_error > plain_error).float().detach()
    return loss, mean_over_tokens(binds, response_mask, num_tokens)


def compute_entropy_loss(
    logits: TokenLogits | PerToken,
    response_mask: TokenMask,
    loss_agg_mode: str = "token-mean",
    row_shares: PerRow | None = None,
    denominator: Scalar | float | None = None,
    loss_scale_factor: float | None = None,
) -> Scalar:
    """Aggregated token entropy from ``logits [B, R, V]``, or from entropies ``[B, R]`` if those are
    at hand.

    Subtract ``entropy_coeff`` times it from the loss.
    """
    has_vocabulary = logits.dim() == response_mask.dim() + 1
    entropies = entropy_from_logits(logits) if has_vocabulary else logits
    return agg_loss(
        entropies, response_mask, loss_agg_mode, row_shares, denominator, loss_scale_factor
    )
