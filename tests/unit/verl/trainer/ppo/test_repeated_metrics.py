"""A validation set with several trajectories per task is measured by pass@k, best@k and maj@k."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch

from verl.protocol import DataProto, object_array
from verl.trainer.ppo.metrics import (
    collect_last_actions,
    compute_at_k_metrics,
    compute_validation_metrics,
    list_graded_first_rows,
    list_trajectory_first_rows,
)

# Task, trajectory, won, return, actions by the number of the turn.
TRAJECTORIES = [
    ("t", "a", True, 1.0, {0: "look", 1: "open"}),
    ("t", "b", False, 0.0, {1: "leave"}),
    ("t", "b", False, 0.0, {0: "look"}),  # an earlier turn of b, in a later row
    ("t", "c", True, 0.5, {0: "open"}),
    ("u", "d", False, 0.0, {0: "x"}),
    ("u", "e", False, -1.0, {}),
    ("u", "f", False, 0.0, {0: "x"}),
]


def make_batch(rows) -> DataProto:
    names = ("uid", "traj_uid", "won", "episode_rewards")
    columns = {name: [row[i] for row in rows] for i, name in enumerate(names)}
    columns["steps"] = [
        [SimpleNamespace(step=step, action=action) for step, action in row[4].items()]
        for row in rows
    ]
    return DataProto.from_dict({}, columns)


def test_tasks_with_three_trajectories_by_hand():
    batch = make_batch(TRAJECTORIES)
    assert collect_last_actions(batch) == {
        "a": "open",
        "b": "leave",
        "c": "open",
        "d": "x",
        "f": "x",
    }
    metrics = compute_at_k_metrics(batch, list_trajectory_first_rows(batch))
    assert metrics == pytest.approx(
        {
            "val/pass@1": (2 / 3 + 0) / 2,
            "val/best@1": (0.5 - 1 / 3) / 2,
            "val/maj@1": (2 / 3 + 0) / 2,
            "val/pass@2": (1 + 0) / 2,
            "val/best@2": ((1 + 1 + 0.5) / 3 + 0) / 2,
            "val/maj@2": ((0.5 + 1 + 0.5) / 3 + 0) / 2,
            "val/pass@3": (1 + 0) / 2,
            "val/best@3": (1 + 0) / 2,
            "val/maj@3": (1 + 0) / 2,
        }
    )


def test_single_trajectories_give_no_repeated_metrics():
    batch = make_batch([TRAJECTORIES[0], TRAJECTORIES[4]])
    assert compute_at_k_metrics(batch, list_trajectory_first_rows(batch)) == {}


def test_failed_trajectories_are_no_samples_and_votes_are_answers():
    batch = make_batch(
        [
            ("t", "a", True, 1.0, {0: "so \\boxed{0.5}"}),
            ("t", "b", True, 1.0, {0: "I say 1/2"}),
            ("t", "c", False, 0.0, {0: "7"}),
            ("t", "d", False, 0.0, {0: "broke"}),
            ("u", "e", False, 0.0, {0: "7"}),
            ("u", "f", False, 0.0, {0: ""}),
            ("u", "g", True, 1.0, {0: "8"}),
            ("u", "h", False, 0.0, {}),
            ("v", "i", False, 0.0, {0: "broke"}),
        ]
    )
    columns = batch.non_tensor_batch
    columns["aborted"] = np.isin(columns["traj_uid"].astype(str), ["d", "i"])
    columns["answer"] = object_array(["1/2", "1/2", "7", None, "7", None, "8", None, None])
    metrics = compute_at_k_metrics(batch, list_graded_first_rows(batch))
    # Task t: a and b agree. Task u: no answers agree, and an empty answer is no vote.
    assert metrics["val/pass@1"] == pytest.approx((2 / 3 + 1 / 4) / 2)
    assert metrics["val/maj@4"] == pytest.approx(1 / 4) and metrics["val/tasks@4"] == 1.0
    assert metrics["val/maj@2"] == pytest.approx(((1 + 0.5 + 0.5) / 3 + 3 / 6 * 0.5) / 2)
    assert metrics["val/pass@2"] == pytest.approx((1 + 0.5) / 2) and "val/tasks@2" not in metrics


def test_failed_trajectories_are_in_no_rate():
    batch = make_batch([TRAJECTORIES[0], TRAJECTORIES[1], TRAJECTORIES[3], TRAJECTORIES[4]])
    columns = batch.non_tensor_batch
    columns["aborted"] = np.array([False, True, False, True])
    columns["data_source"] = np.array(["x", "x", "x", "y"])
    columns["episode_lengths"] = np.array([2, 9, 1, 9])
    columns["reward_parts"] = object_array([{"a": 1.0}, {"a": 9.0}, {"a": 3.0}, {}])
    columns["anchor_obs"] = object_array([[], [], [], []])
    batch.batch["response_mask"] = torch.tensor([[1, 1], [1, 0], [1, 0], [1, 1]])
    metrics = compute_validation_metrics(batch)
    assert metrics["val/success_rate"] == 1.0 and metrics["val/x/success_rate"] == 1.0
    counts = ("tasks", "trajectories", "graded", "aborted", "x/graded", "reward/a/graded")
    assert [metrics[f"val/{name}"] for name in counts] == [2, 4, 2, 2, 2, 2]
    assert metrics["val/episode_length"] == 1.5 == metrics["val/tokens_per_episode"]
    assert metrics["val/reward/a/mean"] == 2.0 and "val/y/success_rate" not in metrics
    columns["aborted"][:] = True
    metrics = compute_validation_metrics(batch)
    assert metrics["val/aborted"] == 4 and not [name for name in metrics if "success" in name]
