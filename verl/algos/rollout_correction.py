"""Correction of what lies between the engine that sampled and the trainer that learns.

Tokens are drawn with the engine's probabilities q and learnt from with the trainer's p. Both belong
to the same weights, and differ where the engine computes in less precision or with other kernels.
A token's ratio ``p / q`` as a weight of its loss makes up for that; the weight is bounded, or taken
away, where the ratio is far from 1 (Yao et al., 2025, "Your efficient RL framework secretly brings
you off-policy RL training"; Liu et al., 2025, "When speed kills stability").
"""

from dataclasses import dataclass

import torch

from verl.algos.algorithm_registry import choose
from verl.algos.shapes import PerRow, PerToken, PerTrajectory, RowIndex, TokenMask
from verl.names import ROLLOUT_IS, ROLLOUT_RS
from verl.utils.torch_functional import masked_sum

_MAX_LOG_RATIO = 20.0  # exp of it is finite in float32


@dataclass(frozen=True, slots=True)
class Correction:
    """What is done about the ratios ``p / q``.

    ``weigh``: by the ratio of the ``token``, or of the ``sequence`` (the product of its tokens'),
    truncated at ``largest_weight``; None: every token weighs 1. ``reject``: what lies outside of
    ``accept_from`` to ``accept_to`` weighs 0: a ``token`` by its ratio, a ``sequence`` by the
    product, or by the ``geometric`` mean of its tokens' ratios; None: nothing.
    """

    weigh: str | None = "token"
    largest_weight: float = 2.0
    reject: str | None = None
    accept_from: float = 0.5
    accept_to: float = 2.0


def correction_weights(
    old_log_prob: PerToken,
    rollout_log_prob: PerToken,
    response_mask: TokenMask,
    sequence: RowIndex,
    correction: Correction,
) -> tuple[PerToken, dict[str, float]]:
    """Weights ``[B, R]`` of the sampled tokens, 0 elsewhere, and metrics ``rollout_corr/...``.

    ``sequence [B]`` numbers the sequences, each of one row or of several. A rejected token weighs
    0 and still counts in the denominators of the loss: the rest is not weighed up for it. Raises
    ``ValueError`` for an unknown kind.
    """
    mask = response_mask.bool()
    ratios = _Ratios(old_log_prob, rollout_log_prob, mask, sequence)
    weights = torch.ones_like(ratios.difference)
    metrics: dict[str, float] = {}
    if correction.weigh is not None:
        choose(correction.weigh, ROLLOUT_IS, "rollout_is (algorithm.rollout_correction.rollout_is)")
        ratio = ratios.of(correction.weigh)
        weights = ratio.clamp(max=correction.largest_weight)
        metrics |= _weight_metrics(weights[mask], ratio[mask] > correction.largest_weight)
    if correction.reject is not None:
        what = "rollout_rs (algorithm.rollout_correction.rollout_rs)"
        choose(correction.reject, ROLLOUT_RS, what)
        ratio = ratios.of(correction.reject)
        accepted = (ratio >= correction.accept_from) & (ratio <= correction.accept_to)
        weights = torch.where(accepted, weights, 0.0)
        metrics["rollout_corr/rollout_rs_masked_fraction"] = _mean(~accepted[mask])
    return torch.where(mask, weights, 0.0), metrics


def mismatch_metrics(
    old_log_prob: PerToken,
    rollout_log_prob: PerToken,
    response_mask: TokenMask,
    sequence: RowIndex,
) -> dict[str, float]:
    """How far the trainer's probabilities p are from the engine's q; nothing without a token.

    ``kl`` and ``k3_kl`` estimate KL(q || p) over sampled tokens, by ``log q - log p`` and by ``r -
    1 - log r`` with ``r = p / q``; ``ppl_ratio`` is the mean over sequences of the trainer's
    perplexity over the engine's.
    """
    mask = response_mask.bool()
    if not mask.any():
        return {}
    ratios = _Ratios(old_log_prob, rollout_log_prob, mask, sequence)
    difference = ratios.difference[mask]
    sampled = ratios.tokens > 0
    perplexities = (-ratios.sums[sampled] / ratios.tokens[sampled]).exp()
    return {
        "rollout_corr/kl": _mean(-difference),
        "rollout_corr/k3_kl": _mean(difference.exp() - 1 - difference),
        "rollout_corr/ppl_ratio": _mean(perplexities),
    }


class _Ratios:
    """``p / q`` of tokens and sequences, float64."""

    def __init__(
        self,
        old_log_prob: PerToken,
        rollout_log_prob: PerToken,
        mask: TokenMask,
        sequence: RowIndex,
    ) -> None:
        # where(), because what is not sampled may hold anything
        difference = torch.where(mask, old_log_prob.double() - rollout_log_prob.double(), 0.0)
        self.difference = difference.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO)
        self.sums = _per_sequence(masked_sum(self.difference, mask, axis=-1), sequence)
        self.tokens = _per_sequence(mask.sum(-1).double(), sequence)
        self._sequence = sequence

    def of(self, kind: str) -> PerToken:
        """``[B, R]``: for every token the ratio that ``kind`` compares."""
        if kind == "token":
            return self.difference.exp()
        logs = self.sums if kind == "sequence" else self.sums / self.tokens.clamp(min=1)
        per_row = logs.clamp(-_MAX_LOG_RATIO, _MAX_LOG_RATIO).exp()[self._sequence]
        return per_row.unsqueeze(-1).expand_as(self.difference)


def _per_sequence(values: PerRow, sequence: RowIndex) -> PerTrajectory:
    size = int(sequence.max()) + 1 if len(sequence) else 0
    return values.new_zeros(size).index_add(0, sequence, values)


def _weight_metrics(weights: torch.Tensor, truncated: torch.Tensor) -> dict[str, float]:
    if not len(weights):
        return {}
    # Kish's effective sample size, as a share of the tokens: 1 where all weigh the same.
    effective = weights.mean() ** 2 / weights.square().mean().clamp(min=1e-30)
    prefix = "rollout_corr/rollout_is"
    return {
        f"{prefix}_mean": _mean(weights),
        f"{prefix}_min": weights.min().item(),
        f"{prefix}_max": weights.max().item(),
        f"{prefix}_eff_sample_size": effective.item(),
        f"{prefix}_ratio_fraction_high": _mean(truncated),
    }


def _mean(values: torch.Tensor) -> float:
    return values.double().mean().item() if len(values) else 0.0
