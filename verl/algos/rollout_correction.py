"""Correction of the mismatch between the rollout engine's log-probs and the trainer's.

Tokens are sampled with the engine's probabilities q. The loss uses the trainer's probabilities p of
the same weights. p and q differ if the engine computes with lower precision or other kernels. The
correction multiplies the loss of a token by the ratio ``p / q``, truncates large weights and
rejects tokens with ratios far from 1. Sources: Yao et al., 2025, "Your efficient RL framework
secretly brings you off-policy RL training"; Liu et al., 2025, "When speed kills stability".
"""

from dataclasses import dataclass

import torch

from verl.algos.shapes import PerRow, PerToken, PerTrajectory, RowIndex, TokenMask
from verl.utils.torch_functional import select_where

_MAX_LOG_RATIO = 20.0  # exp(20) is finite in float32


@dataclass(frozen=True, slots=True)
class CorrectionRule:
    """Rule that turns probability ratios (trainer's over engine's) into token weights.

    ``weight_level`` is ``token`` (weight: the token's ratio), ``sequence`` (the product of the
    ratios of its tokens) or None (weight 1). Weights are truncated at ``largest_weight``.

    ``reject_level`` is ``token``, ``sequence`` (product), ``geometric`` (geometric mean over the
    sequence) or None (reject nothing). A token gets weight 0 if its ratio at this level is outside
    of ``accept_from`` to ``accept_to``.
    """

    weight_level: str | None = "token"
    largest_weight: float = 2.0
    reject_level: str | None = None
    accept_from: float = 0.5
    accept_to: float = 2.0


def compute_correction_weights(
    old_log_prob: PerToken,
    rollout_log_prob: PerToken,
    response_mask: TokenMask,
    sequence_indices: RowIndex,
    correction: CorrectionRule,
) -> tuple[PerToken, dict[str, float]]:
    """Return the weights ``[B, R]`` of the tokens in the loss, and metrics ``rollout_corr/...``.

    The weights correct for the difference between the trainer's and the engine's log-probs.
    Unsampled tokens have weight 0. ``sequence_indices [B]`` is the number of the sequence to which
    each row belongs. A token that ``correction`` rejects has weight 0 and still counts in the
    denominator of the loss.

    >>> old, rollout = torch.tensor([[0.6, 0.1]]).log(), torch.tensor([[0.2, 0.2]]).log()
    >>> arguments = (old, rollout, torch.ones(1, 2), torch.tensor([0]))  # ratios 3 and 0.5
    >>> compute_correction_weights(*arguments, CorrectionRule("token", largest_weight=2.0))[0]
    tensor([[2.0000, 0.5000]], dtype=torch.float64)
    >>> compute_correction_weights(*arguments, CorrectionRule("sequence"))[0]  # 3 * 0.5
    tensor([[1.5000, 1.5000]], dtype=torch.float64)
    """
    mask = response_mask.bool()
    ratios = _ProbRatios(old_log_prob, rollout_log_prob, mask, sequence_indices)
    weights = torch.ones_like(ratios.log_ratios)
    metrics: dict[str, float] = {}
    if correction.weight_level is not None:
        ratio = ratios.compute_ratios(correction.weight_level)
        weights = ratio.clamp(max=correction.largest_weight)
        sampled_ratios = select_where(ratio, mask)
        metrics |= _compute_weight_metrics(
            sampled_ratios.clamp(max=correction.largest_weight),
            sampled_ratios > correction.largest_weight,
        )
    if correction.reject_level is not None:
        ratio = ratios.compute_ratios(correction.reject_level)
        is_accepted = (ratio >= correction.accept_from) & (ratio <= correction.accept_to)
        weights = torch.where(is_accepted, weights, 0.0)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = _mean_or_zero(~is_accepted[mask])
    return weights.masked_fill_(~mask, 0.0), metrics


def compute_mismatch_metrics(
    old_log_prob: PerToken,
    rollout_log_prob: PerToken,
    response_mask: TokenMask,
    sequence_indices: RowIndex,
) -> dict[str, float]:
    """Return metrics of the mismatch between the trainer's p and the engine's q.

    ``kl`` and ``k3_kl`` estimate KL(q || p). They are the means over sampled tokens of
    ``log(q / p)`` and of ``r - 1 - log(r)`` with ``r = p / q``. ``ppl_ratio`` is the mean over
    sequences of the trainer's perplexity over the engine's. Without a sampled token the result is
    empty.

    >>> old, rollout = torch.tensor([[0.6, 0.1]]).log(), torch.tensor([[0.2, 0.2]]).log()
    >>> metrics = compute_mismatch_metrics(old, rollout, torch.ones(1, 2), torch.tensor([0]))
    >>> [round(value, 3) for value in metrics.values()]  # kl, k3_kl, ppl_ratio for r = 3 and 0.5
    [-0.203, 0.547, 0.816]
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    ratios = _ProbRatios(old_log_prob, rollout_log_prob, mask, sequence_indices)
    log_ratios = select_where(ratios.log_ratios, mask)
    has_tokens = ratios.token_counts > 0
    mean_log_ratios = ratios.log_ratio_sums[has_tokens] / ratios.token_counts[has_tokens]
    perplexity_ratios = (-mean_log_ratios).clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()
    return {
        "rollout_corr/kl": _mean_or_zero(-log_ratios),
        "rollout_corr/k3_kl": _mean_or_zero(log_ratios.exp() - 1 - log_ratios),
        "rollout_corr/ppl_ratio": _mean_or_zero(perplexity_ratios),
    }


class _ProbRatios:
    """Ratios ``p / q`` of a token's probability by the trainer (p) and the engine (q), float64."""

    def __init__(
        self,
        old_log_prob: PerToken,
        rollout_log_prob: PerToken,
        mask: TokenMask,
        sequence_indices: RowIndex,
    ) -> None:
        # Work in place: each [B, R] float64 tensor takes longer to allocate than to compute.
        log_ratios = old_log_prob.to(torch.float64, copy=True).sub_(rollout_log_prob)
        # Do not multiply by the mask: unsampled positions may hold NaN, and 0 * NaN is NaN.
        log_ratios.masked_fill_(~mask, 0.0)
        # Sum before the limit: the product of a sequence must contain the whole ratio of a token.
        self.log_ratio_sums = _sum_per_sequence(log_ratios.sum(-1), sequence_indices)
        self.log_ratios = log_ratios.clamp_(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        self.token_counts = _sum_per_sequence(mask.sum(-1).double(), sequence_indices)
        self._sequence_indices = sequence_indices

    def compute_ratios(self, ratio_level: str) -> PerToken:
        """Return the ratio ``p / q`` of every token, ``[B, R]``.

        ``ratio_level`` is ``token`` (the token's ratio), ``sequence`` (the product of the ratios of
        its sequence) or ``geometric`` (their geometric mean).
        """
        if ratio_level == "token":
            return self.log_ratios.exp()
        sequence_log_ratios = (
            self.log_ratio_sums
            if ratio_level == "sequence"
            else self.log_ratio_sums / self.token_counts.clamp(min=1)
        )
        row_ratios = sequence_log_ratios.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()[
            self._sequence_indices
        ]
        return row_ratios.unsqueeze(-1).expand_as(self.log_ratios)


def _sum_per_sequence(values: PerRow, sequence_indices: RowIndex) -> PerTrajectory:
    return torch.zeros_like(values).index_add(0, sequence_indices, values)


def _compute_weight_metrics(weights: torch.Tensor, is_truncated: torch.Tensor) -> dict[str, float]:
    if not len(weights):
        return {}
    # Kish's effective sample size, divided by the number of tokens. It is 1 for equal weights.
    effective_share = weights.mean() ** 2 / weights.square().mean().clamp(min=1e-30)
    metric_prefix = "rollout_corr/rollout_is"
    return {
        f"{metric_prefix}_mean": _mean_or_zero(weights),
        f"{metric_prefix}_min": weights.min().item(),
        f"{metric_prefix}_max": weights.max().item(),
        f"{metric_prefix}_eff_sample_size": effective_share.item(),
        f"{metric_prefix}_ratio_fraction_high": _mean_or_zero(is_truncated),
    }


def _mean_or_zero(values: torch.Tensor) -> float:
    return values.double().mean().item() if len(values) else 0.0
