"""Weights of a rollout correction and the KL coefficient against plain arithmetic, for every key,
and with statistics over trajectories that differ from those over rows."""

import math
from typing import Any

import pytest
import torch

from verl.algos import get_kl_controller
from verl.config.load import load_config
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS
from verl.trainer.launch.run_plan import count_optimizer_steps
from verl.trainer.ppo.credit import apply_kl_penalty, apply_rollout_correction

# Ratios of the trainer's to the engine's probability. The first two rows are one trajectory.
RATIOS = [[1.5, 0.4, 1.1], [1.3, 0.9, None], [0.2, 3.0, 1.7], [0.8, 0.95, 0.9]]
TRAJECTORY_IDS = ["a", "a", "b", "c"]
BASE: dict[str, Any] = {
    "rollout_is": "token",
    "rollout_is_threshold": 1.4,
    "rollout_rs": "token",
    "rollout_rs_threshold": 1.6,
    "rollout_rs_threshold_lower": 0.3,
    "row_weight": "row",
}
CHANGES: list[dict[str, Any]] = [
    {},
    {"rollout_is": "sequence"},
    {"rollout_is": "sequence", "row_weight": "trajectory"},
    {"rollout_is": None},
    {"rollout_is_threshold": 1.2},
    {"rollout_rs": None},
    {"rollout_rs": "sequence"},
    {"rollout_rs": "geometric"},
    {"rollout_rs": "geometric", "rollout_rs_threshold": 1.02, "rollout_rs_threshold_lower": 0.9},
    {"rollout_rs": "sequence", "row_weight": "trajectory", "rollout_rs_threshold_lower": 0.75},
    {"rollout_rs_threshold": 1.2},
    {"rollout_rs_threshold_lower": 0.85},
    {"rollout_rs_threshold_lower": 0.1},
    {"rollout_rs_threshold_lower": None},
]


def expected_weights(s: dict[str, Any]) -> list[list[float]]:
    """Return the weights [B, R]."""
    rows = []
    for row, ratios in enumerate(RATIOS):
        sequence = [row]
        if s["row_weight"] == "trajectory":
            sequence = [
                other for other, name in enumerate(TRAJECTORY_IDS) if name == TRAJECTORY_IDS[row]
            ]
        sequence_ratios = [
            ratio for other in sequence for ratio in RATIOS[other] if ratio is not None
        ]
        product = math.prod(sequence_ratios)
        by_level = {"sequence": product, "geometric": product ** (1 / len(sequence_ratios))}
        lower = s["rollout_rs_threshold_lower"]
        lower = 1 / s["rollout_rs_threshold"] if lower is None else lower
        weights = []
        for ratio in ratios:
            if ratio is None:
                weights.append(0.0)
                continue
            weight = 1.0
            if s["rollout_is"]:
                weight = min(by_level.get(s["rollout_is"], ratio), s["rollout_is_threshold"])
            tested = by_level.get(s["rollout_rs"], ratio)
            if s["rollout_rs"] and not lower <= tested <= s["rollout_rs_threshold"]:
                weight = 0.0
            weights.append(weight)
        rows.append(weights)
    return rows


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_weights_follow_every_key(change):
    settings = BASE | change
    config = load_config()
    for key, value in settings.items():
        section = config.algorithm if key == "row_weight" else config.algorithm.rollout_correction
        if value is None and key == "rollout_rs_threshold_lower":
            value = 1 / settings["rollout_rs_threshold"]  # the configuration derives this value
        setattr(section, key, value)
    mask = torch.tensor([[ratio is not None for ratio in row] for row in RATIOS])
    ratios = torch.tensor([[1.0 if ratio is None else ratio for ratio in row] for row in RATIOS])
    engine = torch.full(ratios.shape, -1.5)
    tensors = {
        "old_log_probs": engine + ratios.log(),
        "rollout_log_probs": engine,
        "response_mask": mask.long(),
    }
    batch = DataProto.from_dict(tensors, {"traj_uid": TRAJECTORY_IDS})
    apply_rollout_correction(batch, config)
    torch.testing.assert_close(
        batch.batch[CORRECTION_WEIGHTS], torch.tensor(expected_weights(settings))
    )
    for key in change:
        assert expected_weights(settings | {key: BASE[key]}) != expected_weights(settings), key


@pytest.mark.parametrize("rows", [1, 2])
def test_kl_coefficient_is_updated_by_trajectories(rows):
    """One trajectory is one sample, whether it has one row or two rows of equal KL."""
    controller = get_kl_controller("adaptive", 0.5, horizon=10, target_kl=0.1)
    tensors = {
        "response_mask": torch.ones(rows, 2, dtype=torch.long),
        "old_log_probs": torch.full((rows, 2), -1.0),
        "ref_log_prob": torch.full((rows, 2), -1.11),
        "token_level_scores": torch.zeros(rows, 2),
    }
    batch = DataProto.from_dict(tensors, {"traj_uid": ["a"] * rows})
    apply_kl_penalty(batch, controller, "kl")
    assert controller.value == pytest.approx(0.5 * (1 + 0.1 * 1 / 10), rel=1e-5)


@pytest.mark.parametrize(
    ("overrides", "actor", "critic"),
    [
        ([], 12 * 2 * 3, 12 * 4 * 5),
        (["trainer.critic_warmup=4"], 8 * 2 * 3, 12 * 4 * 5),
        (["trainer.total_training_steps=7"], 7 * 2 * 3, 7 * 4 * 5),
        (["trainer.critic_warmup=99"], 1 * 2 * 3, 12 * 4 * 5),
        (["actor_rollout_ref.actor.optim.total_training_steps=9"], 9, 12 * 4 * 5),
        (["critic.optim.total_training_steps=9"], 12 * 2 * 3, 9),
    ],
)
def test_schedule_length_counts_all_optimizer_steps(overrides, actor, critic):
    base = [
        "data.train_batch_size=8",
        "trainer.total_epochs=3",
        "trainer.total_training_steps=null",
        "actor_rollout_ref.actor.ppo_mini_batches=2",
        "actor_rollout_ref.actor.ppo_epochs=3",
        "critic.ppo_mini_batches=4",
        "critic.ppo_epochs=5",
    ]
    config = load_config("ppo_trainer", [*base, *overrides])
    # Four batches per epoch.
    config = config.with_values(count_optimizer_steps(config, train_tasks=35))
    optims = config.actor_rollout_ref.actor.optim, config.critic.optim
    assert tuple(optim.total_training_steps for optim in optims) == (actor, critic)
