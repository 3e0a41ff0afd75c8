"""A reward model's scores beside the rewards of rules."""

import numpy as np
import torch

from verl.config.schema import RewardModelConfig
from verl.protocol import DataProto, object_array
from verl.records import MESSAGES, MODEL_SCORES, REWARD_PARTS
from verl.trainer.ppo.interfaces import RewardFunction, RewardGroup
from verl.utils.torch_functional import last_selected

MODEL = "model"  # what the model's score is called among rewards by name


class ModelRewards:
    """``rules`` and the reward models of ``group`` as one reward function.

    ``token_level_scores`` are those of the rules times ``rule_weight``, and on the last sampled
    token of every row ``weight`` times the score of the row's trajectory, which joins the column of
    rewards by name as ``model``.
    """

    def __init__(
        self, rules: RewardFunction, group: RewardGroup, config: RewardModelConfig
    ) -> None:
        self.rules = rules
        self.group = group
        self.config = config

    def __call__(self, data: DataProto) -> torch.Tensor:
        """``token_level_scores`` [B, R]. Raises ``ValueError`` where a trajectory has no score."""
        scores = self.config.rule_weight * self.rules(data)
        found = self.group.compute_rm_score(data.select([], [MESSAGES], []))
        outcomes = model_outcomes(found.batch[MODEL_SCORES], data.non_tensor_batch["traj_uid"])
        rows, last = last_selected(data.batch["response_mask"])
        scores[rows, last] += self.config.weight * outcomes[rows]
        named = data.non_tensor_batch.get(REWARD_PARTS, [{}] * len(data))
        data.non_tensor_batch[REWARD_PARTS] = object_array(
            [{**parts, MODEL: score} for parts, score in zip(named, outcomes.tolist(), strict=True)]
        )
        return scores

    def step_rewards(self, data: DataProto) -> np.ndarray:
        """Of every row [B] a list: the rules' rewards of its steps; a model scores whole plays."""
        weight = self.config.rule_weight
        rewards = self.rules.step_rewards(data)
        return object_array([[weight * reward for reward in row] for row in rewards])


def model_outcomes(scores: torch.Tensor, trajectories: np.ndarray) -> torch.Tensor:
    """``scores`` [B], of which a row of each trajectory is a number and the others NaN, on all rows
    of the trajectory.

    Raises ``ValueError`` for a trajectory that has no finite score: it is no 0.
    """
    outcome: dict[str, float] = {}
    for trajectory, score in zip(trajectories, scores.tolist(), strict=True):
        if np.isfinite(score):
            outcome[str(trajectory)] = score
    absent = [str(trajectory) for trajectory in trajectories if str(trajectory) not in outcome]
    if absent:
        raise ValueError(
            f"reward_model: trajectory {absent[0]} has no finite score; allowed: a finite number "
            "for every play; fix: another reward_model.model.path, or reward_model.dtype=float32"
        )
    return torch.tensor([outcome[str(trajectory)] for trajectory in trajectories])
