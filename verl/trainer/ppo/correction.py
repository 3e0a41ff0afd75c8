"""Rollout correction in a training step: from the configuration to a column of weights."""

from verl.algos import Correction, correction_weights, factorize, mismatch_metrics
from verl.config.schema import PPOConfig
from verl.config.schema.algorithm import RolloutCorrectionConfig
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS


def correct_rollout(batch: DataProto, config: PPOConfig) -> dict[str, float]:
    """Add ``rollout_is_weights`` [B, R], where the configuration weighs or rejects, to rows with
    ``old_log_probs`` and ``rollout_log_probs``; returns ``rollout_corr/...``.
    """
    if config.env.allow_retokenized:
        return {}  # the engine's log-probs are not known of all tokens
    rows_of = config.algorithm.row_weight == "trajectory"
    names = batch.non_tensor_batch["traj_uid"] if rows_of else range(len(batch))
    columns = (
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        factorize(names),
    )
    metrics = mismatch_metrics(*columns)
    correction = _correction(config.algorithm.rollout_correction)
    if correction.weigh or correction.reject:
        weights, measured = correction_weights(*columns, correction)
        batch.batch[CORRECTION_WEIGHTS] = weights.float()
        metrics |= measured
    return metrics


def _correction(section: RolloutCorrectionConfig) -> Correction:
    return Correction(
        weigh=section.rollout_is,
        largest_weight=section.rollout_is_threshold,
        reject=section.rollout_rs,
        accept_from=section.rollout_rs_threshold_lower,
        accept_to=section.rollout_rs_threshold,
    )
