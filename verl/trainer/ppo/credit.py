"""Rollout correction, rewards and advantages of a batch of rows, computed in the driver."""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from verl.algos import (
    CorrectionRule,
    KLController,
    compute_correction_weights,
    compute_mismatch_metrics,
    factorize_keys,
    find_missing_inputs,
    get_adv_estimator_fn,
    kl_penalty,
)
from verl.config.schema import PPOConfig
from verl.config.schema.critic import RewardModelConfig
from verl.config.settings import value_at_path
from verl.protocol import DataProto, object_array
from verl.records import CORRECTION_WEIGHTS, MESSAGES, MODEL_SCORES, REWARD_PARTS
from verl.single_controller.ray import RayWorkerGroup
from verl.trainer.ppo.interfaces import RewardFunction
from verl.utils.torch_functional import find_last_nonzero

BASELINE_COLUMN = "reward_baselines"  # column [B]: return of the group's greedy trajectory
MODEL_PART = "model"  # key of the reward model's score in the dict of named rewards


def apply_rollout_correction(batch: DataProto, config: PPOConfig) -> dict[str, float]:
    """Add ``rollout_is_weights`` [B, R] to ``batch``, which correct the train-inference mismatch.

    These importance weights of the loss and the returned metrics ``rollout_corr/...`` are computed
    from ``old_log_probs`` and ``rollout_log_probs``. The weights are added only if
    ``algorithm.rollout_correction`` enables importance weights or rejection.
    """
    sequence_ids = range(len(batch))
    if config.algorithm.row_weight == "trajectory":
        sequence_ids = batch.non_tensor_batch["traj_uid"]
    mismatch_inputs = (
        batch.batch["old_log_probs"],
        batch.batch["rollout_log_probs"],
        batch.batch["response_mask"],
        factorize_keys(sequence_ids),
    )
    metrics = compute_mismatch_metrics(*mismatch_inputs)
    correction_config = config.algorithm.rollout_correction
    correction_rule = CorrectionRule(
        weight_level=correction_config.rollout_is,
        largest_weight=correction_config.rollout_is_threshold,
        reject_level=correction_config.rollout_rs,
        accept_from=correction_config.rollout_rs_threshold_lower,
        accept_to=correction_config.rollout_rs_threshold,
    )
    if correction_rule.weight_level or correction_rule.reject_level:
        correction_weights, correction_metrics = compute_correction_weights(
            *mismatch_inputs, correction_rule
        )
        batch.batch[CORRECTION_WEIGHTS] = correction_weights.float()
        metrics |= correction_metrics
    return metrics


@dataclass(frozen=True, slots=True)
class CombinedRewards:
    """Weighted sum of rule-based rewards and the scores of a reward model.

    The reward function ``rule_rewards`` computes ``token_level_scores``, which are multiplied by
    ``rule_weight``. The last sampled token of every row also gets ``weight`` times the score of its
    trajectory. The named parts of a row's reward also get the score, under the name ``model``.
    """

    rule_rewards: RewardFunction
    reward_group: RayWorkerGroup
    config: RewardModelConfig

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Return ``token_level_scores`` [B, R]: rule-based rewards plus weighted model scores."""
        scores = self.config.rule_weight * self.rule_rewards(data)
        scored_rows = self.reward_group.compute_rm_score(data.select([], [MESSAGES], []))
        trajectory_scores = broadcast_trajectory_scores(
            scored_rows.batch[MODEL_SCORES], data.non_tensor_batch["traj_uid"]
        )
        rows, last_columns = find_last_nonzero(data.batch["response_mask"])
        scores[rows, last_columns] += self.config.weight * trajectory_scores[rows]
        reward_parts = data.non_tensor_batch.get(REWARD_PARTS, [{}] * len(data))
        parts_and_scores = zip(reward_parts, trajectory_scores.tolist(), strict=True)
        data.non_tensor_batch[REWARD_PARTS] = object_array(
            {**row_parts, MODEL_PART: score} for row_parts, score in parts_and_scores
        )
        return scores

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Return for each row [B] the rule-based rewards of its turns, times ``rule_weight``."""
        weight = self.config.rule_weight
        rewards = self.rule_rewards.step_rewards(data)
        return object_array([[weight * reward for reward in row] for row in rewards])


def broadcast_trajectory_scores(scores: torch.Tensor, trajectory_ids: np.ndarray) -> torch.Tensor:
    """Return scores [B] in which all rows of a trajectory have its score.

    In the argument ``scores`` [B] one row of each trajectory has a number, and its other rows NaN.
    Raises ``ValueError`` if a trajectory has no finite score, which must not count as 0.
    """
    id_of_row = trajectory_ids.astype(str).tolist()
    id_score_pairs = zip(id_of_row, scores.tolist(), strict=True)
    score_by_trajectory = {
        trajectory_id: score for trajectory_id, score in id_score_pairs if np.isfinite(score)
    }
    unscored_trajectories = [
        trajectory_id for trajectory_id in id_of_row if trajectory_id not in score_by_trajectory
    ]
    if unscored_trajectories:
        raise ValueError(
            f"reward_model: trajectory {unscored_trajectories[0]} has no finite score; allowed: a "
            "finite number for every trajectory; fix: set another reward_model.model.path, or "
            "reward_model.dtype=float32"
        )
    return torch.tensor([score_by_trajectory[trajectory_id] for trajectory_id in id_of_row])


def uses_greedy_baseline(config: PPOConfig) -> bool:
    """Return True if the estimator reads ``reward_baselines``, as ReMax does."""
    return BASELINE_COLUMN in get_adv_estimator_fn(config.algorithm.adv_estimator).inputs.values()


def collect_greedy_returns(greedy_batch: DataProto, scores: torch.Tensor) -> dict[str, float]:
    """Return the sum of ``scores`` [B, R] of each greedy trajectory that did not fail, by uid."""
    columns = greedy_batch.non_tensor_batch
    row_values = zip(columns["uid"], columns["aborted"], scores.sum(-1).tolist(), strict=True)
    return {uid: total for uid, aborted, total in row_values if not aborted}


def add_reward_baselines(batch: DataProto, returns: Mapping[str, float]) -> DataProto:
    """Return the rows of groups in ``returns``, with the column ``reward_baselines`` [B].

    ``returns`` maps the uid of a group to the return of its greedy trajectory. This return is the
    baseline of all rows of the group. Rows of other groups are dropped. Raises ``RuntimeError`` if
    no row is left.
    """
    uids = batch.non_tensor_batch["uid"]
    has_baseline = np.array([uid in returns for uid in uids])
    if not has_baseline.any():
        raise RuntimeError(
            "the greedy trajectory of every group failed twice, so no row has a baseline; fix the "
            "errors of the environment, or choose an estimator without a greedy baseline"
        )
    metrics = batch.meta_info.setdefault("metrics", {})
    metrics["episode/greedy_reward"] = float(np.mean(list(returns.values())))
    metrics["rollout/left_out_without_greedy"] = float(len({*uids[~has_baseline]}))
    rows_with_baseline = batch if has_baseline.all() else batch[has_baseline]
    baselines = [returns[uid] for uid in rows_with_baseline.non_tensor_batch["uid"]]
    rows_with_baseline.batch[BASELINE_COLUMN] = torch.tensor(baselines)
    return rows_with_baseline


def compute_advantage(data: DataProto, config: PPOConfig) -> DataProto:
    """Add ``advantages`` and ``returns`` [B, R], computed by ``algorithm.adv_estimator``.

    Raises ``KeyError`` if ``data`` lacks a batch key that the estimator requires.
    """
    estimator = get_adv_estimator_fn(config.algorithm.adv_estimator)
    columns = {**dict(data.batch.items()), **data.non_tensor_batch}
    missing_inputs = find_missing_inputs(estimator, columns)
    if missing_inputs:
        name = config.algorithm.adv_estimator
        raise KeyError(f"estimator '{name}' needs {missing_inputs}, which the batch lacks")
    # An optional input ("key?") that the batch lacks is omitted from the call.
    value_by_argument = {
        name: columns.get(key.rstrip("?")) for name, key in estimator.inputs.items()
    }
    arguments = {name: value for name, value in value_by_argument.items() if value is not None}
    params = {name: value_at_path(config, path) for name, path in estimator.params.items()}
    data.batch["advantages"], data.batch["returns"] = estimator(**arguments, **params)
    if estimator.metrics is not None:
        metrics = estimator.metrics(data.batch["advantages"], data.batch["returns"], **arguments)
        data.meta_info["metrics"] = data.meta_info.get("metrics", {}) | metrics
    return data


def apply_kl_penalty(
    data: DataProto, kl_ctrl: KLController, kl_penalty_type: str = "kl"
) -> tuple[DataProto, dict[str, float]]:
    """Set ``token_level_rewards`` to ``token_level_scores - beta * KL(old || ref)``; adapt beta.

    Each row of an episode has the return of the whole episode. Therefore the last sampled token of
    each row also gets the KL of the episode's other rows. The sum over a row then does not depend
    on how the episode was split into rows. Example with beta = 1 and two rows of one episode::

        KL per token     [0.1, 0.2] and [0.3, 0.4]
        penalty          [0.1, 0.9] and [0.3, 0.7]    (both sum to 1.0)
    """
    mask = data.batch["response_mask"].float()
    token_kl = kl_penalty(data.batch["old_log_probs"], data.batch["ref_log_prob"], kl_penalty_type)
    sampled_token_kl = torch.where(mask.bool(), token_kl, 0.0)
    row_kl = sampled_token_kl.sum(-1)
    episode_indices = factorize_keys(data.non_tensor_batch["traj_uid"])
    episode_kl = torch.zeros(len(data)).index_add(0, episode_indices, row_kl)[episode_indices]
    rows, last_columns = find_last_nonzero(mask)
    # Add the KL of the episode's other rows to the last sampled token of this row.
    penalty = sampled_token_kl.clone()
    penalty[rows, last_columns] += (episode_kl - row_kl)[rows]
    data.batch["token_level_rewards"] = data.batch["token_level_scores"] - kl_ctrl.value * penalty
    mean_kl = (row_kl / mask.sum(-1).clamp(min=1)).mean().item()
    metrics = {"actor/reward_kl_penalty": mean_kl, "actor/reward_kl_penalty_coeff": kl_ctrl.value}
    kl_ctrl.update(current_kl=mean_kl, n_steps=len(set(data.non_tensor_batch["traj_uid"])))
    return data, metrics
