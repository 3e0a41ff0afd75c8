"""Reward function that adds the scores of a reward model to rule-based rewards."""

import numpy as np
import torch

from verl.config.schema.critic import RewardModelConfig
from verl.protocol import DataProto, object_array
from verl.records import MESSAGES, MODEL_SCORES, REWARD_PARTS
from verl.trainer.ppo.interfaces import RewardFunction, RewardGroup
from verl.utils.torch_functional import find_last_selected

MODEL_PART = "model"  # key of the model's score in the column of named reward parts


class ModelRewards:
    """Weighted sum of rule-based rewards and the scores of a reward model.

    ``token_level_scores`` are those of the rule-based reward function ``rules``, times
    ``rule_weight``. The last sampled token of every row also gets ``weight`` times the score of its
    trajectory. The score is added to the named reward parts as ``model``.
    """

    def __init__(
        self, rules: RewardFunction, group: RewardGroup, config: RewardModelConfig
    ) -> None:
        self.rules = rules
        self.group = group
        self.config = config

    def __call__(self, data: DataProto) -> torch.Tensor:
        """Return ``token_level_scores`` [B, R].

        Raises:
            ValueError: a trajectory has no finite score of the reward model.
        """
        scores = self.config.rule_weight * self.rules(data)
        scored = self.group.compute_rm_score(data.select([], [MESSAGES], []))
        outcomes = broadcast_outcomes(scored.batch[MODEL_SCORES], data.non_tensor_batch["traj_uid"])
        rows, last_columns = find_last_selected(data.batch["response_mask"])
        scores[rows, last_columns] += self.config.weight * outcomes[rows]
        named = data.non_tensor_batch.get(REWARD_PARTS, [{}] * len(data))
        data.non_tensor_batch[REWARD_PARTS] = object_array(
            [
                {**row_parts, MODEL_PART: score}
                for row_parts, score in zip(named, outcomes.tolist(), strict=True)
            ]
        )
        return scores

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Return for each row [B] the rule-based rewards of its turns, times ``rule_weight``.

        The score of the reward model belongs to the trajectory and is not included.
        """
        weight = self.config.rule_weight
        rewards = self.rules.step_rewards(data)
        return object_array([[weight * reward for reward in row] for row in rewards])


def broadcast_outcomes(scores: torch.Tensor, trajectories: np.ndarray) -> torch.Tensor:
    """Return ``scores`` [B] with the finite score of each trajectory on all of its rows.

    In ``scores`` one row of each trajectory is a number and the others are NaN.

    Raises:
        ValueError: a trajectory has no finite score. It must not count as 0.
    """
    outcome: dict[str, float] = {}
    for trajectory, score in zip(trajectories, scores.tolist(), strict=True):
        if np.isfinite(score):
            outcome[str(trajectory)] = score
    absent = [str(trajectory) for trajectory in trajectories if str(trajectory) not in outcome]
    if absent:
        raise ValueError(
            f"reward_model: trajectory {absent[0]} has no finite score; allowed: a finite number "
            "for every trajectory; fix: set another reward_model.model.path, or "
            "reward_model.dtype=float32"
        )
    return torch.tensor([outcome[str(trajectory)] for trajectory in trajectories])
