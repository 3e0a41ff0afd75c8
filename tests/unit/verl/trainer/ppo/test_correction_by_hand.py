"""Weights of a rollout correction and the KL coefficient, in plain numbers: every key, and
statistics over trajectories where they are not those over rows.
"""

import math
from typing import Any

import pytest
import torch

from verl.algos import get_kl_controller
from verl.config.load import load_config
from verl.protocol import DataProto
from verl.records import CORRECTION_WEIGHTS
from verl.trainer.launch.run_plan import count_optimizer_steps
from verl.trainer.ppo.credit import apply_kl_penalty, correct_rollout

# Ratios of trainer's over engine's probability; the first two rows are one trajectory.
RATIOS = [[1.5, 0.4, 1.1], [1.3, 0.9, None], [0.2, 3.0, 1.7], [0.8, 0.95, 0.9]]
NAMES = ["a", "a", "b", "c"]
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


def right(s: dict[str, Any]) -> list[list[float]]:
    """[B, R] weights."""
    found = []
    for row, ratios in enumerate(RATIOS):
        whole = [row]
        if s["row_weight"] == "trajectory":
            whole = [other for other, name in enumerate(NAMES) if name == NAMES[row]]
        told = [ratio for other in whole for ratio in RATIOS[other] if ratio is not None]
        product = math.prod(told)
        of = {"sequence": product, "geometric": product ** (1 / len(told))}
        least = s["rollout_rs_threshold_lower"]
        least = 1 / s["rollout_rs_threshold"] if least is None else least
        weights = []
        for ratio in ratios:
            if ratio is None:
                weights.append(0.0)
                continue
            weight = 1.0
            if s["rollout_is"]:
                weight = min(of.get(s["rollout_is"], ratio), s["rollout_is_threshold"])
            judged = of.get(s["rollout_rs"], ratio)
            if s["rollout_rs"] and not least <= judged <= s["rollout_rs_threshold"]:
                weight = 0.0
            weights.append(weight)
        found.append(weights)
    return found


@pytest.mark.parametrize("change", CHANGES, ids=str)
def test_weights_are_what_the_keys_say(change):
    settings = BASE | change
    config = load_config()
    for key, value in settings.items():
        section = config.algorithm if key == "row_weight" else config.algorithm.rollout_correction
        if value is None and key == "rollout_rs_threshold_lower":
            value = 1 / settings["rollout_rs_threshold"]  # as the configuration fills it in
        setattr(section, key, value)
    mask = torch.tensor([[ratio is not None for ratio in row] for row in RATIOS])
    ratios = torch.tensor([[1.0 if ratio is None else ratio for ratio in row] for row in RATIOS])
    engine = torch.full(ratios.shape, -1.5)
    tensors = {
        "old_log_probs": engine + ratios.log(),
        "rollout_log_probs": engine,
        "response_mask": mask.long(),
    }
    batch = DataProto.from_dict(tensors, {"traj_uid": NAMES})
    correct_rollout(batch, config)
    torch.testing.assert_close(batch.batch[CORRECTION_WEIGHTS], torch.tensor(right(settings)))
    for key in change:
        assert right(settings | {key: BASE[key]}) != right(settings), key


@pytest.mark.parametrize("rows", [1, 2])
def test_the_kl_coefficient_moves_by_trajectories(rows):
    """One trajectory of one or two rows of equal KL is one sample."""
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
    ("words", "actor", "critic"),
    [
        ([], 12 * 2 * 3, 12 * 4 * 5),
        (["trainer.critic_warmup=4"], 8 * 2 * 3, 12 * 4 * 5),
        (["trainer.total_training_steps=7"], 7 * 2 * 3, 7 * 4 * 5),
        (["trainer.critic_warmup=99"], 1 * 2 * 3, 12 * 4 * 5),
        (["actor_rollout_ref.actor.optim.total_training_steps=9"], 9, 12 * 4 * 5),
        (["critic.optim.total_training_steps=9"], 12 * 2 * 3, 9),
    ],
)
def test_a_schedule_is_as_long_as_all_epochs_of_all_iterations(words, actor, critic):
    base = [
        "data.train_batch_size=8",
        "trainer.total_epochs=3",
        "trainer.total_training_steps=null",
        "actor_rollout_ref.actor.ppo_mini_batches=2",
        "actor_rollout_ref.actor.ppo_epochs=3",
        "critic.ppo_mini_batches=4",
        "critic.ppo_epochs=5",
    ]
    config = load_config("ppo_trainer", [*base, *words])
    # Four batches of an epoch.
    config = config.with_values(count_optimizer_steps(config, train_tasks=35))
    optims = config.actor_rollout_ref.actor.optim, config.critic.optim
    assert tuple(optim.total_training_steps for optim in optims) == (actor, critic)
