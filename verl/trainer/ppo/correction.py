"""Rollout correction of a training step: weights for the train-inference mismatch."""

from verl.algos import (
    CorrectionRule,
    compute_correction_weights,
    compute_mismatch_metrics,
    number_keys,
)
from verl.config.schema import PPOConfig
from verl.config.schema.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS


def correct_rollout(batch: DataProto, config: PPOConfig) -> dict[str, float]:
    """Return ``rollout_corr/...`` metrics from ``old_log_probs`` and ``rollout_log_probs``.

    Add ``rollout_is_weights`` [B, R] to ``batch`` if ``algorithm.rollout_correction`` enables
    importance weights or rejection.
    """
    if config.env.allow_retokenized:
        return {}  # some tokens have no rollout log-probs
    rows_of = config.algorithm.row_weight == "trajectory"
    names = batch.non_tensor_batch["traj_uid"] if rows_of else range(len(batch))
    columns = (
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        number_keys(names),
    )
    metrics = compute_mismatch_metrics(*columns)
    correction = _make_correction(config.algorithm.rollout_correction)
    if correction.weight_level or correction.reject_level:
        weights, measured = compute_correction_weights(*columns, correction)
        batch.batch[CORRECTION_WEIGHTS] = weights.float()
        metrics |= measured
    return metrics


def _make_correction(section: RolloutCorrectionConfig) -> CorrectionRule:
    return CorrectionRule(
        weight_level=section.rollout_is,
        largest_weight=section.rollout_is_threshold,
        reject_level=section.rollout_rs,
        accept_from=section.rollout_rs_threshold_lower,
        accept_to=section.rollout_rs_threshold,
    )
