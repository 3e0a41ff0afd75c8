"""Losses of actor and critic, exact under any split of a mini-batch into micro-batches and ranks.

Every mode of ``agg_loss`` is a sum over rows divided by a denominator. The denominator of a
mini-batch is the sum of ``compute_loss_denominator`` over its micro-batches on all ranks. If
``agg_loss`` gets this sum for each micro-batch, the losses and gradients of the micro-batches add
up to those of the mini-batch.

Unsampled positions may have any value, also NaN. They are replaced before the computation, because
0 times the derivative at NaN is NaN.
"""

import torch
from jaxtyping import Float
from torch import Tensor

from verl.algos.algorithm_registry import choose
from verl.algos.shapes import PerPosition, PerRow, PerToken, Scalar, TokenMask
from verl.names import KL_ESTIMATORS, LOSS_AGG_MODES
from verl.utils.torch_functional import entropy_from_logits, masked_mean, masked_sum

MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32
TokenLogits = Float[Tensor, "B R V"]


def _get_row_shares(loss_mask: TokenMask, row_shares: PerRow | None) -> PerRow:
    equal_shares = torch.ones(loss_mask.shape[0], dtype=torch.float32, device=loss_mask.device)
    return equal_shares if row_shares is None else row_shares.to(equal_shares)


def compute_loss_denominator(
    loss_mask: TokenMask, loss_agg_mode: str, row_shares: PerRow | None = None
) -> Scalar:
    """Return the denominator of ``agg_loss``, to be summed over micro-batches and ranks.

    ``token-mean``: number of tokens. ``token-sum``: 0, which means no division. ``seq-mean`` modes:
    number of sequences, the sum of ``row_shares [B]`` over the rows with a token.
    """
    choose(loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")
    row_tokens = loss_mask.bool().sum(-1)
    if loss_agg_mode == "token-sum":
        return torch.zeros((), device=row_tokens.device)
    if loss_agg_mode == "token-mean":
        return row_tokens.sum().float()
    # Padding rows have no sampled token and must not count as sequences.
    return (_get_row_shares(loss_mask, row_shares) * (row_tokens > 0)).sum()


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
    * ``seq-mean-token-sum-norm``: ``seq-mean-token-sum`` divided by the constant
      ``loss_scale_factor`` (Dr.GRPO's constant length; None: R, which depends on the padding).

    A row is a whole sequence, or a fraction of a sequence: ``row_shares [B]`` gives the fractions
    (see ``groups.compute_row_shares``). The first two modes ignore ``row_shares``. ``denominator``
    (that of the whole mini-batch) replaces the one computed from these rows. Rows without a
    token are ignored, and the result without any token is 0. Raises ``ValueError`` for an unknown
    mode.

    >>> losses, mask = torch.tensor([[1.0, 3.0], [8.0, 9.0]]), torch.tensor([[1, 1], [1, 0]])
    >>> {mode: agg_loss(losses, mask, mode).item() for mode in LOSS_AGG_MODES}
    {'token-mean': 4.0, 'token-sum': 12.0, 'seq-mean-token-sum': 6.0, 'seq-mean-token-mean': 5.0,
     'seq-mean-token-sum-norm': 3.0}
    """
    if denominator is None:
        denominator = compute_loss_denominator(loss_mask, loss_agg_mode, row_shares)
    choose(loss_agg_mode, LOSS_AGG_MODES, "loss_agg_mode")
    row_sums = masked_sum(loss_mat, loss_mask, axis=-1)
    if loss_agg_mode == "seq-mean-token-mean":
        # The mean of a sequence is the weighted mean of its rows' means. A row's weight is its
        # fraction of the sequence (row share).
        row_means = row_sums / loss_mask.bool().sum(-1).clamp(min=1)
        row_sums = row_means * _get_row_shares(loss_mask, row_shares)
    elif loss_agg_mode == "seq-mean-token-sum-norm":
        num_positions = loss_mask.shape[-1]
        row_sums = row_sums / (num_positions if loss_scale_factor is None else loss_scale_factor)
    loss_sum = row_sums.sum()
    denominator = torch.as_tensor(denominator, dtype=loss_sum.dtype, device=loss_sum.device)
    # A denominator of 0 means no division (token-sum), or no sampled tokens, where the loss is 0.
    return loss_sum / torch.where(denominator > 0, denominator, 1.0)


def compute_token_mean(
    values: PerToken, mask: TokenMask, num_tokens: Scalar | float | None
) -> Scalar:
    """Return the mean of ``values`` over sampled tokens, or their sum divided by ``num_tokens``."""
    if num_tokens is None:
        return masked_mean(values, mask)
    return masked_sum(values, mask) / num_tokens


def resolve_clip_range(
    cliprange: float | None, low: float | None, high: float | None
) -> tuple[float, float]:
    """Return the clip bounds (low, high).

    ``cliprange`` replaces a bound that is None. If it is None too, the bound is 0.2.
    """
    default_bound = 0.2 if cliprange is None else cliprange
    return (default_bound if low is None else low), (default_bound if high is None else high)


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
    """Compute half the squared error of ``vpreds`` to ``returns``; all ``[B, R]``.

    The loss uses the larger of two errors: that of ``vpreds``, and that of ``vpreds`` clipped to
    ``values +- cliprange_value``. Returns ``(loss, clipfrac)``. ``clipfrac`` is the fraction of
    tokens where the clipped error is larger.

    >>> # The error of 0.9 is 0.1, that of the clipped value 0.5 + 0.2 is 0.3: 0.3^2 / 2 = 0.045.
    >>> vpreds, returns, values = (torch.tensor([[value]]) for value in (0.9, 1.0, 0.5))
    >>> compute_value_loss(vpreds, returns, values, torch.ones(1, 1), cliprange_value=0.2)
    (tensor(0.0450), tensor(1.))
    """
    mask = response_mask.bool()
    vpreds, returns, values = (torch.where(mask, x, 0.0) for x in (vpreds, returns, values))
    clipped_vpreds = torch.clamp(vpreds, values - cliprange_value, values + cliprange_value)
    unclipped_error = (vpreds - returns) ** 2
    clipped_error = (clipped_vpreds - returns) ** 2
    # The larger error is used, as in PPO's policy loss. Moving a value out of the clip range then
    # never lowers the loss.
    losses = 0.5 * torch.maximum(unclipped_error, clipped_error)
    loss = agg_loss(
        losses, response_mask, loss_agg_mode, row_shares, denominator, loss_scale_factor
    )
    is_clipped_error_larger = (clipped_error > unclipped_error).float().detach()
    return loss, compute_token_mean(is_clipped_error_larger, response_mask, num_tokens)


def compute_entropy_loss(
    logits: TokenLogits | PerToken,
    response_mask: TokenMask,
    loss_agg_mode: str = "token-mean",
    row_shares: PerRow | None = None,
    denominator: Scalar | float | None = None,
    loss_scale_factor: float | None = None,
) -> Scalar:
    """Aggregate the token entropies of ``logits [B, R, V]``, or given entropies ``[B, R]``."""
    has_vocabulary = logits.dim() == response_mask.dim() + 1
    entropies = entropy_from_logits(logits) if has_vocabulary else logits
    return agg_loss(
        entropies, response_mask, loss_agg_mode, row_shares, denominator, loss_scale_factor
    )


# ---- KL divergence from the reference policy -----------------------------------------------------

_KL_ESTIMATOR_OF_NAME: dict[str, str] = {
    "kl": "k1",
    "k1": "k1",
    "abs": "abs",
    "mse": "k2",
    "k2": "k2",
    "low_var_kl": "k3",
    "k3": "k3",
}


def kl_penalty(logprob: PerPosition, ref_logprob: PerPosition, kl_penalty: str) -> PerPosition:
    """Estimate KL(policy || reference) for each sampled token (Schulman, 2020), ``[...]``.

    With ``d = logprob - ref_logprob``:

    * ``kl``, ``k1``: d
    * ``abs``: abs(d)
    * ``mse``, ``k2``: d^2 / 2
    * ``low_var_kl``, ``k3``: exp(-d) - 1 + d, with d limited to [-20, 20], the result to [-10, 10]

    With a suffix ``+`` (not for k2) the value is unchanged and the gradient is that of k2,
    ``d * grad(logprob)``.
    The mean of that gradient over sampled tokens is the gradient of the KL divergence. The mean
    gradient of k1 is 0, and that of k3 is the gradient of KL(reference || policy). Raises
    ``ValueError`` for any other name.

    >>> logprob, ref_logprob = torch.tensor([[0.5, 0.25], [0.25, 0.5]]).log()  # d = log 2, -log 2
    >>> [kl_penalty(logprob, ref_logprob, kind) for kind in ("k1", "k2", "k3")]
    [tensor([ 0.6931, -0.6931]), tensor([0.2402, 0.2402]), tensor([0.1931, 0.3069])]
    """
    choose(kl_penalty, KL_ESTIMATORS, "kl_penalty (algorithm.kl_penalty, actor.kl_loss_type)")
    difference = logprob - ref_logprob
    value = _estimate_kl(difference, _KL_ESTIMATOR_OF_NAME[kl_penalty.removesuffix("+")])
    if not kl_penalty.endswith("+"):
        return value
    gradient_term = 0.5 * difference.square()
    return value.detach() + (gradient_term - gradient_term.detach())


def _estimate_kl(difference: PerPosition, estimator: str) -> PerPosition:
    if estimator == "k1":
        return difference
    if estimator == "abs":
        return difference.abs()
    if estimator == "k2":
        return 0.5 * difference.square()
    # The clamp avoids an overflow of exp(-difference). It could occur for a token whose probability
    # under the policy is close to 0.
    clamped_difference = difference.clamp(-20.0, 20.0)
    # k3 is k1 plus a term with mean 0. k3 is never negative and has less variance than k1.
    return ((-clamped_difference).exp() - 1 + clamped_difference).clamp(-10.0, 10.0)
